"""Plans of random programs in every schedule, run on the host with workers in any order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import conflicting_tiles, plan_or_none, programs
from test_taskgraph import op

from megaflow.errors import HazardError, ScheduleError
from megaflow.scheduler import Dynamic, Hybrid, Static, Unfused, find_schedule
from megaflow.scheduler.queues import spread
from megaflow.scheduler.reference_vm import run_plan
from megaflow.scheduler.versions import Versions

STEPS = 2
VARIANTS = [Static(), Static(interleave=True), Hybrid(), Unfused(), Dynamic(), Dynamic(queues=3)]


@pytest.mark.parametrize("schedule", VARIANTS, ids=repr)
@settings(max_examples=80, deadline=None)
@given(program=programs(), workers=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_every_task_runs_once_a_step_and_conflicts_keep_their_order(schedule, program, workers, seed):
    plan = plan_or_none(program, schedule, workers)
    if plan is None:
        return
    order: list[tuple[int, int]] = []
    random = np.random.default_rng(seed)
    run_plan(plan, STEPS, lambda n: int(random.integers(n)), lambda task, step: order.append((step, task)))

    tasks = range(plan.graph.tasks)
    assert sorted(order) == [(step, task) for step in range(STEPS) for task in tasks]
    place = {at: i for i, at in enumerate(order)}
    for early, late in zip(*np.nonzero(conflicting_tiles(plan.graph)), strict=True):
        for step in range(STEPS):
            assert place[step, int(early)] < place[step, int(late)]
    assert max(place[0, t] for t in tasks) < min(place[1, t] for t in tasks)


@settings(max_examples=60, deadline=None)
@given(program=programs(), schedule=st.sampled_from(VARIANTS), random=st.randoms(use_true_random=False))
def test_tiles_read_what_the_operators_one_after_the_other_would_leave(program, schedule, random):
    plan = plan_or_none(program, schedule, 3)
    if plan is None:
        return
    versions = Versions(program)

    def execute(task: int, _: int) -> None:
        number, tile = int(plan.graph.operator[task]), tuple(plan.graph.coordinates[task].tolist())
        versions.read(number, tile)
        versions.written(number, tile)

    run_plan(plan, 1, random.randrange, execute)


def test_a_tile_that_reads_too_early_or_too_late_is_named():
    versions = Versions([op("f", [], ["x"]), op("g", ["x"], ["y"]), op("h", ["y"], ["x"])])
    with pytest.raises(HazardError, match=r"g\[1, 0, 0\] reads x as the step before left it, not f"):
        versions.read(1, (1, 0, 0))
    versions.written(0, (1, 0, 0))
    versions.read(1, (1, 0, 0))
    versions.written(2, (1, 0, 0))
    with pytest.raises(HazardError, match=r"g\[1, 0, 0\] reads x as h left it, not f"):
        versions.read(1, (1, 0, 0))


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=50), st.integers(0, 200))
def test_no_worker_gets_two_tiles_more_than_another_and_the_least_loaded_get_the_extra(loads, tiles):
    load = np.array(loads)
    counts = np.bincount(spread(load, tiles), minlength=len(loads))
    assert counts.sum() == tiles
    assert counts.max() - counts.min() <= 1
    if counts.max() > counts.min():
        assert load[counts == counts.max()].max() <= load[counts == counts.min()].min()


def test_an_unknown_schedule_is_named_with_those_there_are():
    with pytest.raises(ScheduleError, match=r"'fastest' is unknown; choose one of static, dynamic"):
        find_schedule("fastest")
