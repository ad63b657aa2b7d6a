"""Tasks that are created at run time: by data-dependent triggers and updates, for whatever partition a step makes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from routed import KINDS, Lists, Meaning, Partition, Shape, partitions, shapes

from megaflow.plan import Plan
from megaflow.records import OF_GROUP
from megaflow.regions import Access, Routing, Span, TiledOperator
from megaflow.scheduler import Dynamic, Hybrid, Program, Static, Unfused
from megaflow.scheduler.reference_vm import run_plan
from megaflow.scheduler.simulator import simulate

STEPS = 3
DYNAMIC = [Dynamic(), Dynamic(queues=3)]
STATIC = [Static(), Hybrid(), Unfused()]


def order_of(plan: Plan, steps: list[list[Partition]], choose) -> list[list[int]]:
    """For each step, the tasks in the order in which they ran; a step begins when the one before has ended."""
    lists = Lists(plan.graph, steps)
    ran: list[list[int]] = [[] for _ in steps]

    def execute(task: int, step: int) -> None:
        assert not any(ran[step + 1 :])
        ran[step].append(task)
        lists.ran(task, step)

    run_plan(plan, len(steps), choose, execute, lists.read)
    return ran


def check(plan: Plan, steps: list[list[Partition]], ran: list[list[int]], created: bool) -> None:
    """Each task whose group is there ran once, the others did not if tasks are created, and conflicts are in order."""
    for partition, order in zip(steps, ran, strict=True):
        meaning = Meaning.of(plan.graph, partition)
        wanted = np.flatnonzero(meaning.present) if created else np.arange(plan.graph.tasks)
        assert sorted(order) == wanted.tolist()
        place = np.full(plan.graph.tasks, -1)
        place[order] = np.arange(len(order))
        early, late = np.nonzero(meaning.conflicts)
        assert (place[early] < place[late]).all()


@pytest.mark.parametrize("schedule", DYNAMIC + STATIC, ids=repr)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), shape=shapes(), random=st.randoms(use_true_random=False))
def test_groups_that_are_there_run_once_in_the_order_of_their_elements(schedule, data, shape, random):
    plan = shape.plan_or_none(schedule)
    if plan is None:
        return
    steps = data.draw(partitions(shape, STEPS))
    created = isinstance(schedule, Dynamic)
    assert plan.creates_tasks == created
    check(plan, steps, order_of(plan, steps, random.randrange), created)


@pytest.mark.parametrize("schedule", DYNAMIC[:1] + STATIC, ids=repr)
@settings(max_examples=150, deadline=None)
@given(shape=shapes())
def test_plans_are_proved_for_all_partitions(schedule, shape):
    plan = shape.plan_or_none(schedule)
    if plan is not None:
        assert plan.verify().tasks == plan.graph.tasks


def events_between(plan: Plan, producer: str, consumer: str) -> tuple[np.ndarray, np.ndarray]:
    """The events that a consumer's tiles wait for, and how many notifies each of these needs."""
    graph = plan.graph
    names = [op.name for op in graph.operators]
    waited = graph.waits[graph.operator == names.index(consumer), 0]
    tensor = next(t for t in graph.event_tensors if t.first <= waited[0] < t.first + t.size)
    assert tensor.producers == (names.index(producer),)
    return waited, graph.event_need[waited]


def test_an_ordinary_tile_waits_for_the_items_that_it_reads_once_for_each_tile_of_their_groups():
    plan = Shape(items=5, gathered=2, first=1, second=2).plan(Dynamic())
    waited, need = events_between(plan, "layers.0.second", "layers.0.gather")
    assert len(np.unique(waited)) == 2 * 3, "two columns of three classes of items"
    assert need.tolist() == [2, 2, 1, 2, 2, 1], "one tile of each group has the column"


def test_without_creation_it_waits_for_all_tiles_of_the_column():
    plan = Shape(items=5, groups=3, gathered=2, second=2).plan(Static())
    waited, need = events_between(plan, "layers.0.second", "layers.0.gather")
    assert len(np.unique(waited)) == 2
    assert (need == 3).all()


def test_a_tile_of_a_group_waits_for_its_own_groups_tiles():
    plan = Shape(groups=3, first=2).plan(Dynamic())
    waited, need = events_between(plan, "layers.0.first", "layers.0.second")
    assert len(np.unique(waited)) == 3
    assert (need == 2).all()
    assert (plan.bounds[waited, 0] == OF_GROUP).all()


def test_lists_are_overwritten_after_all_items_though_what_comes_between_needs_some():
    def edges(shape: Shape) -> list[tuple[str, tuple[int, ...]]]:
        graph = shape.plan(Dynamic()).graph
        names = [op.name for op in graph.operators]
        return [(names[e.producer], e.shape) for e in graph.edges if names[e.consumer] == "layers.1.make"]

    assert edges(Shape(items=4, gathered=2)) == [("layers.0.mix", (1,))]
    assert ("layers.0.second", (1, 1)) in edges(Shape(items=4, gathered=2, some=True))


def test_items_that_no_division_finds_are_one_class():
    routing = Routing("count", "indptr", "items", 3, 6)
    lists = tuple(Access(name, (n,), (Span.whole(n),)) for name, n in (("count", 1), ("indptr", 4), ("items", 6)))
    out = Access("out", (6,), (Span.routed(routing),))
    crooked = Access("out", (6,), (Span(0, 3, 2),))  # items 0 to 2, 2 to 4, 4 and 5
    ops = [
        TiledOperator("layers.0.make", "kind", (1,), (), lists, 1),
        TiledOperator("layers.0.routed", "kind", (3,), lists, (out,), 1, routing=routing),
        TiledOperator("layers.0.gather", "kind", (3,), (crooked,), (Access("end", (3,), (Span.tiles(0, 1),)),), 1),
    ]
    plan = Dynamic().plan(Program.of(ops), 2, {"kind": 0})
    assert plan.event_need[plan.graph.waits[-3:, 0]].tolist() == [6, 6, 6]
    plan.verify()


def test_operators_whose_partition_is_not_made_in_the_step_have_all_their_tasks():
    routing = Routing("count", "indptr", "items", 3, 6)
    lists = tuple(Access(name, (n,), (Span.whole(n),)) for name, n in (("count", 1), ("indptr", 4), ("items", 6)))
    out = Access("out", (6,), (Span.routed(routing),))
    plan = Dynamic().plan(
        Program.of([TiledOperator("alone", "kind", (3,), lists, (out,), 1, routing=routing)]), 2, {"kind": 0}
    )
    assert not plan.creates_tasks
    assert len(plan.initial) == 3
    plan.verify()


@settings(max_examples=60, deadline=None)
@given(shape=shapes())
def test_a_simulation_has_as_many_groups_as_are_expected(shape):
    plan = shape.plan_or_none(Dynamic())
    if plan is None:
        return
    simulation = simulate(plan)
    assert (simulation.worker >= 0).all(), "as many groups as there can be"
    few = [op if op.routing is None else expecting(op, 1.5) for op in shape.operators()]
    simulation = simulate(Dynamic().plan(Program.of(few), 2, KINDS))
    graph = simulation.plan.graph
    absent = graph.created[graph.operator] & (graph.coordinates[:, 0] >= 2)
    assert ((simulation.worker < 0) == absent).all()
    assert simulation.end[absent].sum() == 0
    assert sum(len(simulation.timeline(worker)) for worker in range(2)) == (~absent).sum()


def expecting(op: TiledOperator, groups: float) -> TiledOperator:
    return replace(op, irregular=True, expected=groups)
