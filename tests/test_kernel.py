"""The persistent kernel runs random programs in order: one worker in the interpreter, many on a GPU."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from onetask import config
from programs import conflicting_tiles, programs
from test_taskgraph import graph_or_none, op

from megaflow.backend import interpreted, jit, kernel_device, tl
from megaflow.device import await_inputs
from megaflow.kinds import ROW_WIDTH
from megaflow.runtime import LoadedPlan, new_control
from megaflow.scheduler import SCHEDULES, scheduler
from megaflow.taskgraph import TaskGraph, build_task_graph

STEPS = 3
WORKERS = 1 if interpreted() else 40


@jit
def stamp_body(row, c0, c1, c2, step, inputs, CONFIG: tl.constexpr):
    """Write down when the task started and ended, by a clock that all workers share."""
    clock = tl.load(row).to(tl.pointer_type(tl.int32))
    stamps = tl.load(row + 1).to(tl.pointer_type(tl.int32))
    first = tl.load(row + 2).to(tl.int32)
    tasks = tl.load(row + 3).to(tl.int32)
    width = tl.load(row + 4).to(tl.int32)
    await_inputs(inputs)
    at = stamps + (step * tasks + first + c0 * width + c1) * 2
    tl.store(at, tl.atomic_add(clock, 1, sem="acq_rel", scope="gpu"))
    tl.debug_barrier()
    tl.store(at + 1, tl.atomic_add(clock, 1, sem="acq_rel", scope="gpu"))


def run(graph: TaskGraph, schedule: str, launches: tuple[int, ...]) -> list[np.ndarray]:
    """For each launch, int [steps, N, 2]: start and end of each task."""
    device = kernel_device()
    plan = scheduler(schedule)(graph, WORKERS, {"stamp": 0})
    clock = torch.zeros(1, dtype=torch.int32, device=device)
    stamps = torch.zeros((max(launches), graph.tasks, 2), dtype=torch.int32, device=device)
    firsts = np.concatenate(([0], np.cumsum([o.tiles for o in graph.operators])))
    table = torch.zeros((len(graph.operators), ROW_WIDTH), dtype=torch.int64)
    for i, operator in enumerate(graph.operators):
        width = operator.grid[1] if len(operator.grid) > 1 else 1
        fields = [clock.data_ptr(), stamps.data_ptr(), int(firsts[i]), graph.tasks, width]
        table[i, : len(fields)] = torch.tensor(fields)
    loaded = LoadedPlan(plan, table.to(device), new_control(device), [stamp_body], config(1))
    results = []
    for steps in launches:
        stamps.fill_(-1)
        loaded.launch(steps)
        assert loaded.finish() == steps
        results.append(stamps[:steps].cpu().clone().numpy())
    return results


def check(graph: TaskGraph, launches: list[np.ndarray]) -> None:
    conflicts = conflicting_tiles(graph)
    steps = np.concatenate(launches)
    assert (steps >= 0).all(), "every task ran in every step"
    assert len(np.unique(steps)) == steps.size, "and only once"
    for start, end in np.moveaxis(steps, 2, 1):
        assert (end[:, None] < start[None, :])[conflicts].all()
    for before, after in pairwise(steps):
        assert before.max() < after.min()


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(program=programs(kind="stamp"))
def test_conflicts_keep_their_order_over_steps_and_launches(schedule, program):
    graph = graph_or_none(program)
    if graph is not None:
        check(graph, run(graph, schedule, (STEPS, 1)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_task_with_two_waits_starts_when_both_are_done(schedule):
    ops = [op("left", [], ["x"]), op("right", [], ["y"]), op("join", ["x", "y"], ["z"]), op("end", ["z"], ["w"])]
    graph = build_task_graph([dataclasses.replace(o, kind="stamp") for o in ops])
    assert ((graph.waits >= 0).sum(1) == 2).any()
    check(graph, run(graph, schedule, (STEPS, STEPS)))
