"""Derived edges and wait counts, against an enumeration of elements."""

from itertools import product

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from megaflow.events import NONE, Edge, edge_axes
from megaflow.regions import Access, Span, TiledOperator


def elements(access: Access, tile: tuple[int, ...]) -> set[tuple[int, ...]]:
    """All elements of the tensor that a tile touches, one by one."""
    ranges = []
    for extent, span in zip(access.shape, access.spans, strict=True):
        start = span.offset + (tile[span.axis] * span.step if span.axis is not None else 0)
        ranges.append([i for i in range(start, start + span.length) if 0 <= i < extent])
    return set(product(*ranges))


def tiles(op: TiledOperator) -> list[tuple[int, ...]]:
    return list(product(*map(range, op.grid)))


def enumerated(producer: TiledOperator, a: Access, consumer: TiledOperator, b: Access) -> np.ndarray:
    """bool [producer tiles, consumer tiles]: do they touch a common element?"""
    left = [elements(a, t) for t in tiles(producer)]
    right = [elements(b, t) for t in tiles(consumer)]
    return np.array([[bool(p & c) for c in right] for p in left])


def derive(producer: TiledOperator, consumer: TiledOperator, *conflicts: tuple[Access, Access]) -> Edge | None:
    axes = edge_axes(producer.grid, consumer.grid, conflicts)
    return None if axes is None else Edge(0, 1, axes)


def derived(edge, producer: TiledOperator, consumer: TiledOperator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Event of each producer tile and of each consumer tile, and the count of each event."""
    notified = edge.notified(producer.coordinates())
    waited = edge.waited(consumer.coordinates())
    need = np.bincount(notified[notified != NONE], minlength=int(np.prod(edge.shape)))
    return notified, waited, need


@st.composite
def operators(draw, shape: tuple[int, ...]) -> tuple[TiledOperator, Access]:
    grid = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    free = list(range(len(grid)))
    spans = []
    for extent in shape:
        axis = draw(st.sampled_from([None, *free]))
        if axis is not None:
            free.remove(axis)
        length, step = draw(st.integers(1, extent)), draw(st.integers(1, 4))
        spans.append(Span(axis, length, step if axis is not None else 0, draw(st.integers(0, extent - 1))))
    access = Access("t", shape, tuple(spans))
    return TiledOperator("op", "kind", grid, (), (), 1), access


@given(st.data())
def test_a_consumer_waits_for_every_tile_it_conflicts_with(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=2)))
    producer, a = data.draw(operators(shape))
    consumer, b = data.draw(operators(shape))
    conflicts = enumerated(producer, a, consumer, b)
    edge = derive(producer, consumer, (a, b))
    if edge is None:
        assert not conflicts.any()
        return
    notified, waited, need = derived(edge, producer, consumer)
    for c in range(consumer.tiles):
        reached = (notified == waited[c]) & (waited[c] != NONE)
        assert not (conflicts[:, c] & ~reached).any()
        if waited[c] != NONE:
            assert need[waited[c]] == reached.sum() > 0


@given(st.data())
def test_tiles_side_by_side_are_waited_for_exactly(data):
    shape, producer_spans, consumer_spans, producer_grid, consumer_grid = [], [], [], [], []
    for axis in range(data.draw(st.integers(1, 2))):
        size, ratio = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
        extent = data.draw(st.integers(1, 12))
        shape.append(extent)
        producer_grid.append(-(-extent // size))
        consumer_grid.append(-(-extent // (size * ratio)))
        producer_spans.append(Span.tiles(axis, size))
        consumer_spans.append(Span.tiles(axis, size * ratio))
    a, b = Access("t", tuple(shape), tuple(producer_spans)), Access("t", tuple(shape), tuple(consumer_spans))
    producer = TiledOperator("p", "kind", tuple(producer_grid), (), (a,), 1)
    consumer = TiledOperator("c", "kind", tuple(consumer_grid), (b,), (), 1)
    edge = derive(producer, consumer, (a, b))
    notified, waited, need = derived(edge, producer, consumer)
    exact = enumerated(producer, a, consumer, b)
    assert np.array_equal(notified[:, None] == waited[None, :], exact)
    assert np.array_equal(need[waited], exact.sum(0))


@given(st.data())
def test_two_conflicts_of_a_pair_share_one_event_that_is_enough_for_both(data):
    shape = (data.draw(st.integers(1, 6)),)
    producer, a1 = data.draw(operators(shape))
    consumer, b1 = data.draw(operators(shape))
    spans = [Span(data.draw(st.sampled_from([None, 0])), data.draw(st.integers(1, 3)), 1) for _ in range(2)]
    a2, b2 = (Access("u", shape, (span,)) for span in spans)
    edge = derive(producer, consumer, (a1, b1), (a2, b2))
    conflicts = enumerated(producer, a1, consumer, b1) | enumerated(producer, a2, consumer, b2)
    assume(edge is not None)
    notified, waited, _ = derived(edge, producer, consumer)
    reached = (notified[:, None] == waited[None, :]) & (waited != NONE)[None, :]
    assert not (conflicts & ~reached).any()
