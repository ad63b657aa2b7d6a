"""The kept edges order every conflict, and steps follow each other."""

import numpy as np
import pytest
from hypothesis import given, settings
from programs import conflicting_tiles, ordered_tiles, programs

from megaflow.errors import PlanError
from megaflow.regions import Access, Span, TiledOperator
from megaflow.taskgraph import MAX_NOTIFIES, MAX_WAITS, TaskGraph, build_task_graph


def graph_or_none(ops: list[TiledOperator]) -> TaskGraph | None:
    """The graph; None where it cannot be planned and the error says why."""
    try:
        return build_task_graph(ops)
    except PlanError as error:
        assert any(why in str(error) for why in ("a task can wait for", "would notify more than", "waits for"))
        return None


@settings(max_examples=300, deadline=None)
@given(programs())
def test_every_conflict_is_ordered_by_events_though_implied_waits_are_dropped(ops):
    graph = graph_or_none(ops)
    if graph is not None:
        assert not (conflicting_tiles(graph) & ~ordered_tiles(graph)).any()


@settings(max_examples=200, deadline=None)
@given(programs())
def test_an_event_needs_as_many_notifies_as_tiles_give(ops):
    graph = graph_or_none(ops)
    if graph is not None:
        notified = graph.notifies[graph.notifies >= 0]
        assert np.array_equal(np.bincount(notified, minlength=len(graph.event_need)), graph.event_need)
        assert (graph.event_need[graph.waits[graph.waits >= 0]] > 0).all()


@settings(max_examples=200, deadline=None)
@given(programs())
def test_the_final_event_comes_after_all_tasks(ops):
    graph = graph_or_none(ops)
    if graph is not None:
        last = graph.operator == len(graph.operators) - 1
        assert (ordered_tiles(graph)[~last][:, last].any(1)).all()
        assert (graph.notifies[last] == graph.final_event).any(1).all()


def op(name: str, reads: list[str], writes: list[str], tiles: int = 2) -> TiledOperator:
    def access(tensor: str) -> Access:
        return Access(tensor, (4,), (Span.tiles(0, 2),))

    return TiledOperator(name, "kind", (tiles,), tuple(map(access, reads)), tuple(map(access, writes)), 1)


def test_a_chain_needs_one_wait_per_task_and_reused_buffers_add_none():
    ops = [op("load", [], ["x"]), op("f", ["x"], ["y"]), op("g", ["y"], ["x"]), op("h", ["x"], ["y"])]
    graph = build_task_graph(ops)
    assert [(e.producer, e.consumer) for e in graph.edges] == [(0, 1), (1, 2), (2, 3)]
    assert graph.previous_step.tolist() == [True] * 2 + [False] * 6


def test_more_waits_than_a_record_holds_are_refused_by_name():
    names = [f"p{i}" for i in range(MAX_WAITS + 1)]
    ops = [op(n, [], [n]) for n in names] + [op("join", names, ["end"])]
    with pytest.raises(PlanError, match=r"operator join waits for 3 operators"):
        build_task_graph(ops)


def test_more_event_tensors_than_a_record_holds_are_refused_by_name():
    def part(tensor: str, span: Span) -> Access:
        return Access(tensor, (4,), (span,))

    def reader(name: str, tiles: int, reads: list[Access]) -> TiledOperator:
        return TiledOperator(name, "kind", (tiles,), tuple(reads), (part(name, Span.tiles(0, 4 // tiles)),), 1)

    first = Span(None, 1)
    ops = [
        TiledOperator("source", "kind", (4,), (), (part("x", Span.tiles(0, 1)),), 1),
        reader("r0", 4, [part("x", Span.tiles(0, 1))]),
        reader("r1", 2, [part("x", Span.tiles(0, 2)), part("r0", first)]),
        reader("r2", 1, [part("x", Span.whole(4)), part("r1", first)]),
        reader("join", 1, [part("r0", Span.whole(4)), part("r1", Span.whole(4))]),
        reader("end", 1, [part("r2", Span.whole(4)), part("join", Span.whole(4))]),
    ]
    assert MAX_NOTIFIES == 2
    with pytest.raises(PlanError, match=r"operator source would notify more than 2"):
        build_task_graph(ops)


def test_an_operator_that_nothing_waits_for_is_refused_by_name():
    with pytest.raises(PlanError, match=r"nothing in the step waits for aside"):
        build_task_graph([op("aside", [], ["z"]), op("end", ["x"], ["y"])])
