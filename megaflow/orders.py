"""Which waits are implied by others: the order between tiles that kept edges already guarantee.

An order from operator p to operator c says, axis by axis of p's grid, which coordinates a tile of c is known to
run after; the tiles of p that it runs after are the product of these sets. Orders compose along chains of edges.
All statements are one-sided: what is claimed holds, but not all that holds is claimed.

Of an operator whose tiles are created at run time a consumer may know items instead of groups: it comes after the
tiles of the groups that these items are in. Which groups those are is not known, so only all items stand for all
groups. Tiles that are never created are in any order.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megaflow.events import NONE, Edge


@dataclass(frozen=True)
class AxisOrder:
    """For one producer axis: bool [consumer coordinates, producer coordinates], and the axis of the consumer
    that the first index runs over (None: one row, the same for all consumer tiles). With `by_item` the second index
    runs over the items of the producer's routing."""

    axis: int | None
    after: np.ndarray
    by_item: bool = False

    def includes(self, other: "AxisOrder") -> bool:
        """Whether every consumer tile that `other` puts after a coordinate is after it here too."""
        after = self.after
        if self.by_item != other.by_item:  # all or nothing
            after = np.broadcast_to(after.all(1, keepdims=True), (len(after), other.after.shape[1]))
        if self.axis == other.axis:
            return bool((after | ~other.after).all())
        return bool((after.all(0) | ~other.after.any(0)).all())

    def through(self, earlier: "AxisOrder") -> "AxisOrder":
        """From self, consumer -> middle, and what the middle's coordinate selects of `earlier`."""
        if not self.by_item:
            after = (self.after.astype(np.float32) @ earlier.after.astype(np.float32)) > 0
            return AxisOrder(self.axis, after, earlier.by_item)
        # only the same group is selected by a group whose tiles are created at run time (events.edge_axes)
        assert earlier.axis == 0 and np.array_equal(earlier.after, np.eye(len(earlier.after))), earlier
        return self


@dataclass(frozen=True)
class Order:
    """One AxisOrder for each axis of the producer's grid."""

    axes: tuple[AxisOrder, ...]

    @staticmethod
    def of(edge: Edge) -> "Order":
        """What an edge guarantees by itself."""
        return Order(
            tuple(
                AxisOrder(
                    a.consumer_axis,
                    (a.consumer[:, None] == a.producer[None]) & (a.consumer[:, None] != NONE),
                    a.spread > 0,
                )
                for a in edge.axes
            )
        )

    @cached_property
    def everywhere(self) -> bool:
        """Whether every consumer tile is after some producer tile."""
        return all(bool(a.after.any(1).all()) for a in self.axes)

    def includes(self, other: "Order") -> bool:
        return all(a.includes(b) for a, b in zip(self.axes, other.axes, strict=True))

    def through(self, earlier: "Order") -> "Order | None":
        """The order c -> p from self, c -> x, and `earlier`, x -> p; None where it cannot be stated as a product."""
        selecting = [a.axis for a in earlier.axes if a.axis is not None]
        if not (self.everywhere and earlier.everywhere) or len(set(selecting)) < len(selecting):
            return None
        axes = []
        for a in earlier.axes:
            if a.axis is None:
                axes.append(a)
            else:
                axes.append(self.axes[a.axis].through(a))
        return Order(tuple(axes))


class KnownOrders:
    """The orders between operators that follow from the edges kept so far.

    Operators are numbered in program order; `edges[c]` are the edges into operator c.
    """

    def __init__(self) -> None:
        self.edges: list[list[Edge]] = []
        self._known: dict[tuple[int, int], list[Order]] = {}

    def implied(self, edge: Edge, kept: list[Edge]) -> bool:
        """Whether the edge's order follows from the edges `kept` for the same consumer and from earlier ones."""
        wanted = Order.of(edge)
        return any(order.includes(wanted) for order in self._orders_via(kept, edge.producer))

    def add(self, edges: list[Edge]) -> None:
        """Record the next operator with all the edges into it."""
        self.edges.append(edges)

    def _orders(self, consumer: int, producer: int) -> list[Order]:
        key = (consumer, producer)
        if key not in self._known:
            self._known[key] = self._orders_via(self.edges[consumer], producer)
        return self._known[key]

    def _orders_via(self, edges: list[Edge], producer: int) -> list[Order]:
        found: list[Order] = []
        for edge in edges:
            direct = Order.of(edge)
            if edge.producer == producer:
                orders = [direct]
            elif edge.producer > producer:
                composed = (direct.through(order) for order in self._orders(edge.producer, producer))
                orders = [order for order in composed if order is not None]
            else:
                orders = []
            for order in orders:
                # two ways between two operators are often alike; over many layers they would double with each
                if not any(known.includes(order) for known in found):
                    found.append(order)
        return found
