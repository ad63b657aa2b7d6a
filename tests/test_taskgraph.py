"""The kept edges order every conflict, and steps follow each other."""

import numpy as np
import pytest
from hypothesis import given, settings
from programs import conflicting_tiles, graph_or_none, ordered_tiles, programs

from megaflow.errors import PlanError
from megaflow.eventtable import MAX_NOTIFIES
from megaflow.regions import Access, Span, TiledOperator
from megaflow.taskgraph import MAX_WAITS, build_task_graph


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
        last = (graph.notifies == graph.final_event).any(1)
        assert (ordered_tiles(graph)[~last][:, last].any(1)).all()


def op(name: str, reads: list[str], writes: list[str], tiles: int = 2) -> TiledOperator:
    def access(tensor: str) -> Access:
        return Access(tensor, (4,), (Span.tiles(0, 2),))

    return TiledOperator(name, "kind", (tiles,), tuple(map(access, reads)), tuple(map(access, writes)), 1)


def test_a_chain_needs_one_wait_per_task_and_reused_buffers_add_none():
    ops = [op("load", [], ["x"]), op("f", ["x"], ["y"]), op("g", ["y"], ["x"]), op("h", ["x"], ["y"])]
    graph = build_task_graph(ops)
    assert [(e.producer, e.consumer) for e in graph.edges] == [(0, 1), (1, 2), (2, 3)]
    assert (graph.waits >= 0).sum(1).tolist() == [0] * 2 + [1] * 6


def test_an_operator_with_more_inputs_than_a_record_has_waits_gets_one_event_for_all():
    names = [f"p{i}" for i in range(MAX_WAITS + 1)]
    graph = build_task_graph([op(n, [], [n]) for n in names] + [op("join", names, ["end"])])
    assert (graph.waits[-2:] >= 0).sum(1).tolist() == [1, 1]
    assert graph.event_need[graph.waits[-1, 0]] == 2 * len(names)


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


def test_the_step_ends_when_all_operators_that_nothing_waits_for_have():
    graph = build_task_graph([op("aside", [], ["z"]), op("end", ["x"], ["y"])])
    assert graph.event_need[graph.final_event] == 4
