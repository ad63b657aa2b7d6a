"""The persistent kernel runs random programs in order: one worker in the interpreter, many on a GPU."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onetask import config
from programs import conflicting_tiles, plan_or_none, programs
from routed import Meaning, Partition, Shape, partitions, shapes
from test_taskgraph import op

from megaflow.backend import interpreted, jit, kernel_device, tl
from megaflow.device import await_inputs
from megaflow.kinds import ROW_WIDTH
from megaflow.lanes import number, pointer
from megaflow.plan import Plan
from megaflow.runtime import LoadedPlan, new_control
from megaflow.scheduler import SCHEDULES, Dynamic, Hybrid, Program, Static
from megaflow.taskgraph import TaskGraph

STEPS = 3
VARIANTS = [*SCHEDULES.values(), Static(interleave=True), Dynamic(queues=3)]
WORKERS = 1 if interpreted() else 40


@jit
def stamp_body(row, c0, c1, c2, step, inputs, CONFIG: tl.constexpr):
    """Write down when the task started and ended, by a clock that all workers share."""
    clock = pointer(row, 0, tl.int32)
    stamps = pointer(row, 1, tl.int32)
    first = number(row, 2)
    tasks = number(row, 3)
    width = number(row, 4)
    await_inputs(inputs)
    at = stamps + (step * tasks + first + c0 * width + c1) * 2
    tl.store(at, tl.atomic_add(clock, 1, sem="acq_rel", scope="gpu"))
    tl.debug_barrier()
    tl.store(at + 1, tl.atomic_add(clock, 1, sem="acq_rel", scope="gpu"))


@jit
def make_body(row, c0, c1, c2, step, inputs, CONFIG: tl.constexpr):
    """Write down when the task started and ended, and between that the partition of its layer and step."""
    clock = pointer(row, 0, tl.int32)
    stamps = pointer(row, 1, tl.int32)
    task = step * number(row, 3) + number(row, 2)
    made = pointer(row, 5, tl.int32) + step * number(row, 6)
    lists = pointer(row, 7, tl.int32)
    await_inputs(inputs)
    tl.store(stamps + task * 2, tl.atomic_add(clock, 1, sem="acq_rel", scope="gpu"))
    o = tl.arange(0, 128)
    tl.store(lists + o, tl.load(made + o, mask=o < 96), mask=o < 96)
    tl.debug_barrier()
    tl.store(stamps + task * 2 + 1, tl.atomic_add(clock, 1, sem="acq_rel", scope="gpu"))


def run(plan: Plan, launches: tuple[int, ...], made: torch.Tensor | None = None) -> list[np.ndarray]:
    """For each launch, int [steps, N, 2]: start and end of each task, -1 of tasks that did not run.

    Args:
        made: int32 [steps, layers, 3, 32], the tensors of each layer's partition in each step of a launch.
    """
    device = kernel_device()
    graph = plan.graph
    made = torch.zeros((1, 1, 3, 32), dtype=torch.int32) if made is None else made
    made = made.to(device)
    lists = torch.zeros((3, 32), dtype=torch.int32, device=device)
    clock = torch.zeros(1, dtype=torch.int32, device=device)
    stamps = torch.zeros((max(launches), graph.tasks, 2), dtype=torch.int32, device=device)
    table = torch.zeros((len(graph.operators), ROW_WIDTH), dtype=torch.int64)
    for i, operator in enumerate(graph.operators):
        width = operator.grid[1] if len(operator.grid) > 1 else 1
        fields = [clock.data_ptr(), stamps.data_ptr(), int(graph.first_task[i]), graph.tasks, width]
        if operator.kind == "make":
            fields += [made[0, operator.layer].data_ptr(), made.stride(0), lists.data_ptr()]
        table[i, : len(fields)] = torch.tensor(fields)
        if operator.routing:
            table[i, -3:] = torch.tensor([tensor.data_ptr() for tensor in lists])
    loaded = LoadedPlan(plan, table.to(device), new_control(device), [stamp_body, make_body], config(1))
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


def made_by(shape: Shape, steps: list[list[Partition]]) -> torch.Tensor:
    """int32 [steps, layers, 3, 32], as `run` takes it; the rest is poisoned."""
    made = torch.full((len(steps), shape.layers, 3, 32), -(2**31), dtype=torch.int32)
    for step, layers in enumerate(steps):
        for layer, partition in enumerate(layers):
            for row, values in enumerate(partition.tensors(shape.routing).values()):
                made[step, layer, row, : len(values)] = torch.tensor(values)
    return made


@pytest.mark.parametrize("schedule", [Dynamic(), Dynamic(queues=3), Static(), Hybrid()], ids=repr)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), shape=shapes(items=12, groups=5))
def test_tasks_are_created_for_the_groups_of_each_step(schedule, data, shape):
    plan = shape.plan_or_none(schedule, WORKERS)
    if plan is None:
        return
    steps = data.draw(partitions(shape, STEPS))
    for launch in run(plan, (STEPS, STEPS), made_by(shape, steps)):
        for stamps, partition in zip(launch, steps, strict=True):
            meaning = Meaning.of(plan.graph, partition)
            start, end = stamps.T
            assert ((start >= 0) == (meaning.present | (not plan.creates_tasks))).all()
            assert len(np.unique(stamps[start >= 0])) == 2 * (start >= 0).sum(), "and once"
            assert (end[:, None] < start[None, :])[meaning.conflicts].all()
        for before, after in pairwise(launch):
            assert before.max() < after[after >= 0].min()
