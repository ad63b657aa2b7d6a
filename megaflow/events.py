"""Event tensors, derived from what tiles read and write.

An event is a counter that the tiles of one operator add to and the tiles of another wait for. For a pair of
operators the derivation groups the producer's tiles, axis by axis, into the finest classes such that each
consumer tile needs tiles of one class only; the product of the classes is the event tensor, and the number of
tiles in a class is its wait count. Where two consumers need overlapping but different tiles, the classes are
joined, so an event may stand for more tiles than a consumer needs, never for fewer. (Event Tensor, MLSys 2026,
writes these maps by hand; here they follow from the regions.)
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megaflow.regions import Access, overlap

NONE = -1


@dataclass(frozen=True)
class AxisClasses:
    """How one producer axis is cut into classes, and which class a consumer coordinate needs.

    Attributes:
        producer: int [producer coordinates], the class of each, NONE where no consumer needs it.
        consumer_axis: the consumer axis that selects the class; None if all consumer tiles need the same.
        consumer: int [consumer coordinates on that axis, or 1], NONE where nothing is needed.
        count: number of classes.
    """

    producer: np.ndarray
    consumer_axis: int | None
    consumer: np.ndarray
    count: int

    @staticmethod
    def joined(extent: int) -> "AxisClasses":
        """One class for the whole axis, needed by everybody."""
        return AxisClasses(np.zeros(extent, np.int64), None, np.zeros(1, np.int64), 1)

    def same(self, other: "AxisClasses") -> bool:
        return (
            self.consumer_axis == other.consumer_axis
            and np.array_equal(self.producer, other.producer)
            and np.array_equal(self.consumer, other.consumer)
        )


def components(meets: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Connected components of a bipartite relation between intervals in order.

    Args:
        meets: bool [producers, consumers]; both sides are intervals whose bounds do not decrease.
    Returns:
        The component of each producer and of each consumer (NONE for those that meet nothing) and their number.
    """
    producer = np.full(meets.shape[0], NONE, np.int64)
    consumer = np.full(meets.shape[1], NONE, np.int64)
    needed = np.flatnonzero(meets.any(0))
    first = meets.argmax(0)[needed]
    last = meets.shape[0] - 1 - meets[::-1].argmax(0)[needed]
    order = np.argsort(first, kind="stable")
    reach, count = NONE, 0
    for i in order:
        if first[i] > reach:
            count += 1
        reach = max(reach, last[i])
        producer[first[i] : last[i] + 1] = count - 1
        consumer[needed[i]] = count - 1
    producer[~meets.any(1)] = NONE
    return producer, consumer, count


@dataclass(frozen=True)
class Edge:
    """Consumer tiles wait for producer tiles. `axes` has one entry for each axis of the producer's grid."""

    producer: int
    consumer: int
    axes: tuple[AxisClasses, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the event tensor."""
        return tuple(a.count for a in self.axes)

    @property
    def covers(self) -> bool:
        """Whether every producer tile is waited for by some consumer tile."""
        selecting = [
            a.consumer_axis
            for a in self.axes
            if a.consumer_axis is not None and (a.count > 1 or NONE in a.consumer)
        ]
        if len(set(selecting)) < len(selecting):  # one consumer axis selects two classes: not all pairs occur
            return False
        return all(
            NONE not in a.producer and len(np.setdiff1d(a.producer, a.consumer)) == 0 for a in self.axes
        )

    def notified(self, coordinates: np.ndarray) -> np.ndarray:
        """Event index that each producer tile (int [tiles, 3]) notifies, NONE for none."""
        return self._index([a.producer[coordinates[:, i]] for i, a in enumerate(self.axes)])

    def waited(self, coordinates: np.ndarray) -> np.ndarray:
        """Event index that each consumer tile (int [tiles, 3]) waits for, NONE for none."""
        columns = []
        for a in self.axes:
            at = 0 if a.consumer_axis is None else coordinates[:, a.consumer_axis]
            columns.append(np.broadcast_to(a.consumer[at], len(coordinates)))
        return self._index(columns)

    def _index(self, columns: list[np.ndarray]) -> np.ndarray:
        stacked = np.stack(columns)
        index = np.ravel_multi_index(tuple(np.maximum(stacked, 0)), self.shape)
        return np.where((stacked == NONE).any(0), NONE, index)


def edge_axes(
    producer_grid: tuple[int, ...], consumer_grid: tuple[int, ...], conflicts: tuple[tuple[Access, Access], ...]
) -> tuple[AxisClasses, ...] | None:
    """The axes of the edge between two operators, None if none of their tiles conflict.

    Args:
        conflicts: pairs (producer's access, consumer's access) of the same tensor that must be ordered.
    """
    found = [c for a, b in conflicts if (c := _access_classes(a, producer_grid, b, consumer_grid)) is not None]
    if not found:
        return None
    axes = []
    for extent, classes in zip(producer_grid, zip(*found, strict=True), strict=True):
        agree = all(a.same(b) for a, b in pairwise(classes))
        axes.append(classes[0] if agree else AxisClasses.joined(extent))
    return tuple(axes)


def _access_classes(
    a: Access, producer_grid: tuple[int, ...], b: Access, consumer_grid: tuple[int, ...]
) -> tuple[AxisClasses, ...] | None:
    relations: dict[int, list[tuple[int | None, np.ndarray]]] = {}
    for meets, p, c in zip(overlap(a, producer_grid, b, consumer_grid), a.spans, b.spans, strict=True):
        if not meets.any():
            return None
        if p.axis is not None:
            relations.setdefault(p.axis, []).append((c.axis, meets))
    axes = []
    for axis, extent in enumerate(producer_grid):
        found = relations.get(axis, [])
        if len(found) != 1:  # not in this tensor, or in two of its dimensions: wait for the whole axis
            axes.append(AxisClasses.joined(extent))
            continue
        consumer_axis, meets = found[0]
        classes, needs, count = components(meets)
        axes.append(AxisClasses(classes, consumer_axis, needs, count))
    return tuple(axes)
