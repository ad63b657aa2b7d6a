"""Which part of a tensor a tile touches, as one interval per dimension.

A tile is a point of its operator's grid. In each dimension of a tensor it covers an interval that either
moves with one grid axis or does not move at all, so the region of a tile is a box and two tiles conflict when
their boxes overlap. Events are derived from this alone (megaflow.events).

One thing the host may not know: which rows of a tensor belong to which tile, where a run-time partition of the rows
(Routing) decides it. Such a span is marked; what meets what then follows from the partition's properties.
"""

import re
from dataclasses import dataclass, replace

import numpy as np

LAYER = re.compile(r"layers\.(\d+)\.")  # the beginning of the names of operators in layers


@dataclass(frozen=True)
class Routing:
    """A partition of items into groups that tasks make at run time.

    Group g, of those below the count, has the items that `items` lists from indptr[g] to indptr[g + 1]. Each item is in
    one group, and each group below the count has an item.

    Attributes:
        count, indptr, items: names of the int32 tensors [1], [groups + 1], [number].
        groups: the most groups that there can be.
        number: of items.
    """

    count: str
    indptr: str
    items: str
    groups: int
    number: int

    @property
    def tensors(self) -> tuple[str, str, str]:
        return self.count, self.indptr, self.items


@dataclass(frozen=True)
class Span:
    """Tile coordinate i on `axis` covers [offset + i * step, offset + i * step + length), in elements.

    With `axis` None the interval is the same for every tile. Nothing from `stop` on is covered. With `routing` a tile
    covers those elements of the interval that are items of its group.
    """

    axis: int | None
    length: int
    step: int = 0
    offset: int = 0
    stop: int | None = None
    routing: Routing | None = None

    @staticmethod
    def tiles(axis: int, size: int) -> "Span":
        """Tiles of `size` elements, side by side along `axis`."""
        return Span(axis, size, size)

    @staticmethod
    def whole(extent: int) -> "Span":
        """All `extent` elements, for every tile."""
        return Span(None, extent)

    @staticmethod
    def routed(routing: Routing) -> "Span":
        """The items of a tile's group, which is its coordinate on the first axis."""
        return Span(0, routing.number, routing=routing)

    def bounds(self, grid: tuple[int, ...], extent: int) -> tuple[np.ndarray, np.ndarray]:
        """First and one-past-last element for each coordinate of `axis`, clipped to the dimension's extent."""
        n = 1 if self.axis is None else grid[self.axis]
        last = extent if self.stop is None else min(self.stop, extent)
        start = self.offset + np.arange(n, dtype=np.int64) * self.step
        return np.clip(start, 0, last), np.clip(start + self.length, 0, last)

    def at(self, tile: tuple[int, ...], extent: int) -> slice:
        """The interval of one tile, clipped to the dimension's extent; with `routing` it covers a part of that."""
        last = extent if self.stop is None else min(self.stop, extent)
        start = self.offset + (0 if self.axis is None else tile[self.axis] * self.step)
        return slice(min(start, last), min(start + self.length, last))


@dataclass(frozen=True)
class Access:
    """What the tiles of one operator touch of one tensor: a span for each dimension of `shape`."""

    tensor: str
    shape: tuple[int, ...]
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.spans), (self.tensor, self.shape, self.spans)
        for extent, span in zip(self.shape, self.spans, strict=True):
            assert span.routing is None or span.routing.number == extent, (self.tensor, extent, span.routing)

    def at(self, tile: tuple[int, ...]) -> tuple[slice, ...]:
        """What one tile touches, whatever the items of its group."""
        return tuple(span.at(tile, extent) for span, extent in zip(self.spans, self.shape, strict=True))

    @property
    def routed(self) -> bool:
        """Whether a run-time partition decides what a tile touches."""
        return any(span.routing for span in self.spans)

    def anywhere(self) -> "Access":
        """The same, but a tile may touch the items of any group."""
        spans = zip(self.spans, self.shape, strict=True)
        return replace(self, spans=tuple(Span.whole(extent) if span.routing else span for span, extent in spans))

    def box(self, grid: tuple[int, ...]) -> "Box":
        """What all tiles together touch; each item of a routing has a tile."""
        intervals, whole = [], True
        for extent, span in zip(self.shape, self.spans, strict=True):
            start, stop = span.bounds(grid, extent)
            intervals.append((int(start.min()), int(stop.max())))
            whole &= not (start[1:] > stop[:-1]).any()
        axes = [span.axis for span in self.spans if span.axis is not None]
        diagonal = len(set(axes)) < len(axes)
        return Box(tuple(intervals), whole and not diagonal)


@dataclass(frozen=True)
class Box:
    """An interval [start, stop) in each dimension of a tensor; `filled` if all of it is touched."""

    intervals: tuple[tuple[int, int], ...]
    filled: bool

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for start, stop in self.intervals)

    def meets(self, other: "Box") -> bool:
        pairs = zip(self.intervals, other.intervals, strict=True)
        return all(max(a, c) < min(b, d) for (a, b), (c, d) in pairs)

    def covers(self, other: "Box") -> bool:
        """Whether every element that `other` may touch is touched here."""
        pairs = zip(self.intervals, other.intervals, strict=True)
        return self.filled and all(a <= c and d <= b for (a, b), (c, d) in pairs)


@dataclass(frozen=True)
class MicroBatch:
    """Sequences start to stop of the batch, the part of it with this number."""

    number: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class TiledOperator:
    """An operator cut into tile tasks.

    Attributes:
        name: of the operator in the logical graph, with its sequences where it is a part.
        kind: name of its task kind.
        grid: tiles along each of up to three axes.
        reads, writes: regions by tile; tensors that no operator writes (weights) may be left out.
        tile_bytes: bytes of device memory that one tile reads, for load balance and the cost model.
        params: numbers that the tiling decided and the kernel needs.
        tile_flops: floating-point operations of one tile.
        irregular: whether a tile's work depends on data that the host does not know (lengths, routing); tile_bytes and
            tile_flops are then those of a tile that is full.
        expected: irregular: on how many coordinates of the first axis, from 0 up, tiles are likely to be full, the
            others empty; None: it follows the context, along the last axis.
        joined: whether tiles leave parts of results, which the last of them to arrive adds up.
        early_bytes: of tile_bytes, what a tile brings into the L2 cache while it waits for its inputs.
        readers: tiles that read the same bytes side by side, so that device memory serves one and L2 the others.
        source: name of the operator in the logical graph, where `name` is that of a part of it.
        part: the sequences that the tiles are for, None for the whole batch.
        routing: where the first axis runs over the groups of a run-time partition: tiles of groups from its count on
            do nothing. The tiles read its tensors.
    """

    name: str
    kind: str
    grid: tuple[int, ...]
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    tile_bytes: int
    params: tuple[tuple[str, int], ...] = ()
    tile_flops: int = 0
    irregular: bool = False
    expected: float | None = None
    joined: bool = False
    early_bytes: int = 0
    readers: int = 1
    source: str = ""
    part: MicroBatch | None = None
    routing: Routing | None = None

    def __post_init__(self) -> None:
        routings = {span.routing for access in self.reads + self.writes for span in access.spans} - {None}
        assert routings <= {self.routing}, (self.name, routings)
        if self.routing is not None:
            assert self.grid[0] == self.routing.groups, (self.name, self.grid, self.routing)
            assert {*self.routing.tensors} <= {access.tensor for access in self.reads}, (self.name, self.routing)

    @property
    def tiles(self) -> int:
        return int(np.prod(self.grid))

    @property
    def layer(self) -> int | None:
        """The layer that it belongs to, by its name; None outside layers."""
        found = LAYER.match(self.name)
        return int(found[1]) if found else None

    def param(self, name: str) -> int:
        return dict(self.params)[name]

    def coordinates(self) -> np.ndarray:
        """int32 [tiles, 3]: the grid point of each tile, last axis fastest, missing axes 0."""
        points = np.indices(self.grid).reshape(len(self.grid), -1).T
        return np.pad(points, ((0, 0), (0, 3 - len(self.grid)))).astype(np.int32)


def overlap(
    producer: Access, producer_grid: tuple[int, ...], consumer: Access, consumer_grid: tuple[int, ...]
) -> list[np.ndarray]:
    """For each dimension, bool [producer coordinates, consumer coordinates]: do the two intervals meet?

    A tile pair conflicts when every dimension says yes for the coordinates of its axes. Two tiles with the same routing
    have common items where their groups are equal (the caller knows that it is the same partition, too).
    """
    assert producer.tensor == consumer.tensor and producer.shape == consumer.shape
    meets = []
    for extent, p, c in zip(producer.shape, producer.spans, consumer.spans, strict=True):
        if p.routing is not None and p.routing == c.routing:
            meets.append(np.eye(p.routing.groups, dtype=bool))
            continue
        p_start, p_stop = p.bounds(producer_grid, extent)
        c_start, c_stop = c.bounds(consumer_grid, extent)
        meets.append(np.maximum(p_start[:, None], c_start[None]) < np.minimum(p_stop[:, None], c_stop[None]))
    return meets
