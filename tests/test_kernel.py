"""The persistent kernel runs random programs in order: one worker in the interpreter, many on a GPU."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from onetask import config
from programs import conflicting_tiles, plan_or_none, programs
from test_taskgraph import op

from megaflow.backend import interpreted, jit, kernel_device, tl
from megaflow.device import await_inputs
from megaflow.kinds import ROW_WIDTH
from megaflow.plan import Plan
from megaflow.runtime import LoadedPlan, new_control
from megaflow.scheduler import SCHEDULES, Dynamic, Program, Static
from megaflow.taskgraph import TaskGraph

STEPS = 3
VARIANTS = [*SCHEDULES.values(), Static(interleave=True), Dynamic(queues=3)]
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


def run(plan: Plan, launches: tuple[int, ...]) -> list[np.ndarray]:
    """For each launch, int [steps, N, 2]: start and end of each task."""
    device = kernel_device()
    graph = plan.graph
    clock = torch.zeros(1, dtype=torch.int32, device=device)
    stamps = torch.zeros((max(launches), graph.tasks, 2), dtype=torch.int32, device=device)
    table = torch.zeros((len(graph.operators), ROW_WIDTH), dtype=torch.int64)
    for i, operator in enumerate(graph.operators):
        width = operator.grid[1] if len(operator.grid) > 1 else 1
        fields = [clock.data_ptr(), stamps.data_ptr(), int(graph.first_task[i]), graph.tasks, width]
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


@pytest.mark.parametrize("schedule", VARIANTS, ids=repr)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(program=programs())
def test_conflicts_keep_their_order_over_steps_and_launches(schedule, program):
    plan = plan_or_none(program, schedule, WORKERS)
    if plan is not None:
        check(plan.graph, run(plan, (STEPS, 1)))


@pytest.mark.parametrize("schedule", VARIANTS, ids=repr)
def test_a_task_with_two_waits_starts_when_both_are_done(schedule):
    ops = [op("left", [], ["x"]), op("right", [], ["y"]), op("join", ["x", "y"], ["z"]), op("end", ["z"], ["w"])]
    plan = schedule.plan(Program.of(ops), WORKERS, {"kind": 0})
    assert ((plan.graph.waits >= 0).sum(1) == 2).any()
    check(plan.graph, run(plan, (STEPS, STEPS)))
