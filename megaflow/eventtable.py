"""Event tensors and who notifies them: which events the producers' records name, and how often each is notified."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megaflow.errors import PlanError
from megaflow.events import NONE, Edge
from megaflow.records import PLAIN
from megaflow.regions import Routing, TiledOperator

MAX_NOTIFIES = 2


@dataclass(frozen=True)
class EventTensor:
    """Counters that the tiles of some operators notify: `size` events from number `first`.

    With `of_group` each is notified by tasks of one run-time group, in steps that have the group.
    """

    producers: tuple[int, ...]
    shape: tuple[int, ...]
    first: int
    of_group: bool = False

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))


class EventTable:
    """The event tensors so far and which tasks notify them.

    Args:
        created: the routing of operators whose tasks are created at run time, None for others.
    """

    def __init__(self, operators: Sequence[TiledOperator], created: Sequence[Routing | None]) -> None:
        self._operators = operators
        self._created = created
        self.tensors: list[EventTensor] = []
        self.needs: list[np.ndarray] = []
        self.notifies = [np.full((op.tiles, MAX_NOTIFIES), NONE, np.int32) for op in operators]
        self._spread = [0] * len(operators)
        self._strides = [[PLAIN] * MAX_NOTIFIES for _ in operators]
        self._used = [0] * len(operators)
        self._known: dict[tuple[int, ...], list[tuple[EventTensor, np.ndarray, np.ndarray]]] = defaultdict(list)

    def add(self, edge: Edge) -> tuple[Edge, EventTensor]:
        """The event tensor of an edge, which has one class of items if its producer counts items by other classes."""
        producer = edge.producer
        if edge.by_item and edge.stride > 0:
            if self._spread[producer] in (0, edge.axes[0].spread, self._items(producer)):
                self._spread[producer] = edge.axes[0].spread
            else:
                edge = edge.without_item_classes()
        coordinates = self._operators[producer].coordinates()
        of_group = self._created[producer] is not None and not edge.by_item
        stride = edge.stride if edge.by_item else PLAIN
        index, needs = edge.notified(coordinates), edge.needs(coordinates)
        return edge, self._add((producer,), edge.shape, index, needs, (stride,), of_group)

    def add_joint(self, producers: tuple[int, ...]) -> EventTensor:
        """One event for all tiles of several operators."""
        index = np.zeros(sum(self._operators[p].tiles for p in producers), np.int64)
        notified = [self._operators[p].tiles // self._operators[p].grid[0] * self._items(p) for p in producers]
        strides = tuple(PLAIN if self._created[p] is None else 0 for p in producers)
        return self._add(producers, (), index, np.array([sum(notified)]), strides)

    @property
    def by_item(self) -> np.ndarray:
        """int32 [operators, 4], as in TaskGraph."""
        rows = np.zeros((len(self._operators), 4), np.int32)
        for row, spread, strides, routing in zip(rows, self._spread, self._strides, self._created, strict=True):
            if routing is not None and spread:
                row[:] = spread, -(-routing.number // spread), *strides
        return rows

    def _items(self, producer: int) -> int:
        """Of an operator whose tasks are created at run time, the items; of others the length of the first axis."""
        routing = self._created[producer]
        return self._operators[producer].grid[0] if routing is None else routing.number

    def _add(
        self,
        producers: tuple[int, ...],
        shape: tuple[int, ...],
        index: np.ndarray,
        needs: np.ndarray,
        strides: tuple[int, ...],
        of_group: bool = False,
    ) -> EventTensor:
        """The event tensor that the producers' tiles, one operator after the other, notify as `index` says.

        Equal ones are shared.

        Args:
            strides: of each producer, from one class of items to the next; PLAIN if it notifies once.
        Raises:
            PlanError: if a producer notifies MAX_NOTIFIES event tensors already.
        """
        for tensor, known, known_needs in self._known[producers]:
            same = tensor.shape == shape and tensor.of_group == of_group
            if same and np.array_equal(known, index) and np.array_equal(known_needs, needs):
                return tensor
        first = self.tensors[-1].first + self.tensors[-1].size if self.tensors else 0
        tensor = EventTensor(producers, shape, first, of_group)
        events = np.where(index == NONE, NONE, index + first)
        start = 0
        for producer, stride in zip(producers, strides, strict=True):
            used = self._used[producer]
            if used == MAX_NOTIFIES:
                raise PlanError(
                    f"operator {self._operators[producer].name} would notify more than {MAX_NOTIFIES} event tensors; "
                    "let its consumers read it in the same tiles"
                )
            tiles = self._operators[producer].tiles
            self.notifies[producer][:, used] = events[start : start + tiles]
            self._strides[producer][used] = stride
            if stride != PLAIN and not self._spread[producer]:
                self._spread[producer] = self._items(producer)
            self._used[producer] += 1
            start += tiles
        self.tensors.append(tensor)
        self.needs.append(needs)
        self._known[producers].append((tensor, index, needs))
        return tensor
