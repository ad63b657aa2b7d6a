"""Static and dynamic plans of random programs, run on the host with workers in any order."""

import numpy as np
import pytest
from hostvm import run_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import conflicting_tiles, programs
from test_taskgraph import graph_or_none

from megaflow.errors import ScheduleError
from megaflow.scheduler import SCHEDULES, scheduler
from megaflow.scheduler.static import spread

STEPS = 2


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=150, deadline=None)
@given(program=programs(), workers=st.integers(1, 5), data=st.data())
def test_every_task_runs_once_a_step_and_conflicts_keep_their_order(schedule, program, workers, data):
    graph = graph_or_none(program)
    if graph is None:
        return
    plan = scheduler(schedule)(graph, workers, {"kind": 0})
    order: list[tuple[int, int]] = []
    seed = data.draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    run_plan(plan, STEPS, lambda n: int(random.integers(n)), lambda task, step: order.append((step, task)))

    assert sorted(order) == [(step, task) for step in range(STEPS) for task in range(graph.tasks)]
    place = {at: i for i, at in enumerate(order)}
    for early, late in zip(*np.nonzero(conflicting_tiles(graph)), strict=True):
        for step in range(STEPS):
            assert place[step, int(early)] < place[step, int(late)]
    assert max(place[0, t] for t in range(graph.tasks)) < min(place[1, t] for t in range(graph.tasks))


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
        scheduler("fastest")
