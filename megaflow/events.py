"""Event tensors, derived from what tiles read and write.

An event is a counter that the tiles of one operator add to and the tiles of another wait for. For a pair of
operators the derivation groups the producer's tiles, axis by axis, into the finest classes such that each
consumer tile needs tiles of one class only; the product of the classes is the event tensor, and the number of
tiles in a class is its wait count. Where two consumers need overlapping but different tiles, the classes are
joined, so an event may stand for more tiles than a consumer needs, never for fewer. (Event Tensor, MLSys 2026,
writes these maps by hand; here they follow from the regions.)

Where a run-time partition decides which items a producer's tiles write (regions.Routing), the classes can be of items
instead of groups. Which events a tile notifies, and how often, is then read from the partition at run time: once for
each item of its group, the event of the item's class. The wait count is fixed all the same, since each item has a tile.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from megaflow.records import MOST_ITEM_CLASSES
from megaflow.regions import Access, Routing, Span, overlap

NONE = -1


@dataclass(frozen=True)
class AxisClasses:
    """How one producer axis is cut into classes, and which class a consumer coordinate needs.

    Attributes:
        producer: int [producer coordinates], the class of each, NONE where no consumer needs it.
        consumer_axis: the consumer axis that selects the class; None if all consumer tiles need the same.
        consumer: int [consumer coordinates on that axis, or 1], NONE where nothing is needed.
        count: number of classes.
        spread: where the classes are of the items of the producer's routing (`producer` is then int [items]), so many
            items side by side are a class, the last one has what is left; 0 where they are of coordinates.
    """

    producer: np.ndarray
    consumer_axis: int | None
    consumer: np.ndarray
    count: int
    spread: int = 0

    @staticmethod
    def joined(extent: int) -> "AxisClasses":
        """One class for the whole axis, needed by everybody."""
        return AxisClasses(np.zeros(extent, np.int64), None, np.zeros(1, np.int64), 1)

    @staticmethod
    def all_items(number: int) -> "AxisClasses":
        """One class for so many items, needed by everybody."""
        return replace(AxisClasses.joined(number), spread=number)

    def same(self, other: "AxisClasses") -> bool:
        return (
            self.consumer_axis == other.consumer_axis
            and self.spread == other.spread
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
    def by_item(self) -> bool:
        """Whether producer tiles notify once for each item of their group, instead of once."""
        return self.axes[0].spread > 0

    @property
    def stride(self) -> int:
        """By item: the number of events from one class of items to the next; 0 if there is one class."""
        return int(np.prod(self.shape[1:])) if self.shape[0] > 1 else 0

    def without_item_classes(self) -> "Edge":
        """By item: the same edge with one class of all items."""
        return replace(self, axes=(AxisClasses.all_items(len(self.axes[0].producer)), *self.axes[1:]))

    @property
    def covers(self) -> bool:
        """Whether every producer tile is waited for by some consumer tile."""
        selecting = [
            a.consumer_axis for a in self.axes if a.consumer_axis is not None and (a.count > 1 or NONE in a.consumer)
        ]
        if len(set(selecting)) < len(selecting):  # one consumer axis selects two classes: not all pairs occur
            return False
        return all(NONE not in a.producer and len(np.setdiff1d(a.producer, a.consumer)) == 0 for a in self.axes)

    def notified(self, coordinates: np.ndarray) -> np.ndarray:
        """Event index that each producer tile (int [tiles, 3]) notifies, NONE for none; by item, for class 0."""
        nowhere = np.zeros(len(coordinates), np.int64)
        columns = [nowhere if a.spread else a.producer[coordinates[:, i]] for i, a in enumerate(self.axes)]
        return self._index(columns)

    def needs(self, coordinates: np.ndarray) -> np.ndarray:
        """How often the producer tiles notify each event, whatever the items of each group."""
        index = self.notified(coordinates)
        if not self.by_item:
            return np.bincount(index[index != NONE], minlength=int(np.prod(self.shape)))
        of_a_group = index[(coordinates[:, 0] == 0) & (index != NONE)]
        tiles = np.bincount(of_a_group, minlength=int(np.prod(self.shape[1:])))
        return np.outer(np.bincount(self.axes[0].producer), tiles).reshape(-1)

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
    producer_grid: tuple[int, ...],
    consumer_grid: tuple[int, ...],
    conflicts: tuple[tuple[Access, Access], ...],
    producer_routing: Routing | None = None,
    consumer_routing: Routing | None = None,
) -> tuple[AxisClasses, ...] | None:
    """The axes of the edge between two operators, None if none of their tiles conflict.

    Tiles that are created at run time bring rules. A producer's groups are classes only for consumer tiles of the same
    groups; for others its items are. A consumer's group selects a class only where that is the same group's: what
    releases the tiles of all groups must not depend on the group.

    Args:
        conflicts: pairs (producer's access, consumer's access) of the same tensor that must be ordered. Two that have a
            routing have it of the same partition.
        producer_routing, consumer_routing: where the operator's tiles are created at run time.
    """
    sides = (producer_routing, consumer_routing)
    found = [c for a, b in conflicts if (c := _access_classes(a, producer_grid, b, consumer_grid, *sides)) is not None]
    if not found:
        return None
    axes = []
    for axis, classes in enumerate(zip(*found, strict=True)):
        agree = all(a.same(b) for a, b in pairwise(classes))
        axes.append(classes[0] if agree else _joined(axis, producer_grid, producer_routing))
    return tuple(axes)


def _joined(axis: int, producer_grid: tuple[int, ...], routing: Routing | None) -> AxisClasses:
    if routing is not None and axis == 0:
        return AxisClasses.all_items(routing.number)
    return AxisClasses.joined(producer_grid[axis])


def _access_classes(
    a: Access,
    producer_grid: tuple[int, ...],
    b: Access,
    consumer_grid: tuple[int, ...],
    producer_routing: Routing | None,
    consumer_routing: Routing | None,
) -> tuple[AxisClasses, ...] | None:
    relations: dict[int, list[AxisClasses]] = {}
    met = overlap(a, producer_grid, b, consumer_grid)
    for extent, meets, p, c in zip(a.shape, met, a.spans, b.spans, strict=True):
        if not meets.any():
            return None
        if p.axis is None:
            continue
        same_groups = p.routing is not None and p.routing == c.routing
        if producer_routing and p.axis == 0 and not same_groups:
            classes = _item_classes(p, c, consumer_grid, extent, producer_routing)
        elif consumer_routing and c.axis == 0 and not same_groups:
            classes = AxisClasses.joined(producer_grid[p.axis])
        elif p.routing and not same_groups:
            classes = AxisClasses.joined(producer_grid[p.axis])  # a consumer tile may need any group
        else:
            producer, consumer, count = components(meets)
            classes = AxisClasses(producer, c.axis, consumer, count)
        relations.setdefault(p.axis, []).append(classes)
    axes = []
    for axis in range(len(producer_grid)):
        known = relations.get(axis, [])
        # not in this tensor, or in two of its dimensions: wait for the whole axis
        axes.append(known[0] if len(known) == 1 else _joined(axis, producer_grid, producer_routing))
    return tuple(axes)


def _item_classes(p: Span, c: Span, consumer_grid: tuple[int, ...], extent: int, routing: Routing) -> AxisClasses:
    """The finest classes of items, if a tile finds them by a division; else one of all items."""
    if p.routing is None or c.routing is not None:
        return AxisClasses.all_items(routing.number)
    item = np.arange(routing.number)
    start, stop = c.bounds(consumer_grid, extent)
    classes, needs, count = components((start[None] <= item[:, None]) & (item[:, None] < stop[None]))
    spread = int((classes == 0).sum())
    if count > MOST_ITEM_CLASSES or not np.array_equal(classes, item // max(spread, 1)):
        return AxisClasses.all_items(routing.number)
    return AxisClasses(classes, c.axis, needs, count, spread)
