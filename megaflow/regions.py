"""Which part of a tensor a tile touches, as one interval per dimension.

A tile is a point of its operator's grid. In each dimension of a tensor it covers an interval that either
moves with one grid axis or does not move at all, so the region of a tile is a box and two tiles conflict when
their boxes overlap. Events are derived from this alone (megaflow.events).
"""

import re
from dataclasses import dataclass

import numpy as np

LAYER = re.compile(r"layers\.(\d+)\.")  # the beginning of the names of operators in layers


@dataclass(frozen=True)
class Span:
    """Tile coordinate i on `axis` covers [offset + i * step, offset + i * step + length), in elements.

    With `axis` None the interval is the same for every tile. Nothing from `stop` on is covered.
    """

    axis: int | None
    length: int
    step: int = 0
    offset: int = 0
    stop: int | None = None

    @staticmethod
    def tiles(axis: int, size: int) -> "Span":
        """Tiles of `size` elements, side by side along `axis`."""
        return Span(axis, size, size)

    @staticmethod
    def whole(extent: int) -> "Span":
        """All `extent` elements, for every tile."""
        return Span(None, extent)

    def bounds(self, grid: tuple[int, ...], extent: int) -> tuple[np.ndarray, np.ndarray]:
        """First and one-past-last element for each coordinate of `axis`, clipped to the dimension's extent."""
        n = 1 if self.axis is None else grid[self.axis]
        last = extent if self.stop is None else min(self.stop, extent)
        start = self.offset + np.arange(n, dtype=np.int64) * self.step
        return np.clip(start, 0, last), np.clip(start + self.length, 0, last)

    def at(self, tile: tuple[int, ...], extent: int) -> slice:
        """The interval of one tile, clipped to the dimension's extent."""
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

    def at(self, tile: tuple[int, ...]) -> tuple[slice, ...]:
        """What one tile touches."""
        return tuple(span.at(tile, extent) for span, extent in zip(self.spans, self.shape, strict=True))

    def box(self, grid: tuple[int, ...]) -> "Box":
        """What all tiles together touch."""
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
        early_bytes: of tile_bytes, what a tile brings into the L2 cache while it waits for its inputs.
        readers: tiles that read the same bytes side by side, so that device memory serves one and L2 the others.
        source: name of the operator in the logical graph, where `name` is that of a part of it.
        part: the sequences that the tiles are for, None for the whole batch.
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
    early_bytes: int = 0
    readers: int = 1
    source: str = ""
    part: MicroBatch | None = None

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

    A tile pair conflicts when every dimension says yes for the coordinates of its axes.
    """
    assert producer.tensor == consumer.tensor and producer.shape == consumer.shape
    meets = []
    for extent, p, c in zip(producer.shape, producer.spans, consumer.spans, strict=True):
        p_start, p_stop = p.bounds(producer_grid, extent)
        c_start, c_stop = c.bounds(consumer_grid, extent)
        meets.append(
            np.maximum(p_start[:, None], c_start[None]) < np.minimum(p_stop[:, None], c_stop[None])
        )
    return meets
