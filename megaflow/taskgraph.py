"""The task graph: tiled operators, the events that order their tiles, and all tiles as arrays.

Edges come from conflicts: read-after-write, write-after-read and write-after-write on every tensor, in program
order. An edge that other edges already imply is dropped, so that in a chain of operators each tile has one wait.
Steps follow each other without a reset: operators that wait for nothing in their own step wait for the last
operator of the step before.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from megaflow.errors import PlanError
from megaflow.events import NONE, Edge, edge_axes
from megaflow.orders import KnownOrders
from megaflow.regions import Access, TiledOperator

MAX_WAITS = 2
MAX_NOTIFIES = 2


@dataclass(frozen=True)
class EventTensor:
    """Counters that the tiles of one operator notify: `size` events from number `first`."""

    producer: int
    shape: tuple[int, ...]
    first: int

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))


@dataclass(frozen=True)
class TaskGraph:
    """All tile tasks of one step. N tasks, E events.

    Attributes:
        operators: in program order.
        edges: the edges that are kept, by consumer.
        event_tensors: one for each set of events; `event_need` int32 [E] is the wait count of each event.
        operator: int32 [N], the operator of each task; coordinates: int32 [N, 3].
        waits: int32 [N, MAX_WAITS], event numbers or NONE. A task that waits across steps does so in column 0.
        previous_step: bool [N], whether the wait in column 0 is for the step before.
        notifies: int32 [N, MAX_NOTIFIES], event numbers or NONE.
        final_event: complete when everything in the step is.
    """

    operators: tuple[TiledOperator, ...]
    edges: tuple[Edge, ...]
    event_tensors: tuple[EventTensor, ...]
    event_need: np.ndarray
    operator: np.ndarray
    coordinates: np.ndarray
    waits: np.ndarray
    previous_step: np.ndarray
    notifies: np.ndarray
    final_event: int

    @property
    def tasks(self) -> int:
        return len(self.operator)

    def task_bytes(self) -> np.ndarray:
        """int64 [N]: bytes that each task reads from device memory."""
        return np.array([op.tile_bytes for op in self.operators], np.int64)[self.operator]

    def event_name(self, event: int) -> str:
        """For messages: the producer and the index in its event tensor."""
        for tensor in self.event_tensors:
            if tensor.first <= event < tensor.first + tensor.size:
                index = np.unravel_index(event - tensor.first, tensor.shape)
                return f"{self.operators[tensor.producer].name}{[int(i) for i in index]}"
        return f"event {event}"


def program_conflicts(operators: Sequence[TiledOperator]) -> list[dict[int, list[tuple[Access, Access]]]]:
    """For each operator, the accesses of earlier operators that it must come after, by earlier operator.

    A write that covers its whole tensor ends the search: what came before it is ordered through it.
    """
    writes: dict[str, list[tuple[int, Access]]] = defaultdict(list)
    reads: dict[str, list[tuple[int, Access]]] = defaultdict(list)
    conflicts: list[dict[int, list[tuple[Access, Access]]]] = []
    for index, op in enumerate(operators):
        found: dict[int, list[tuple[Access, Access]]] = defaultdict(list)
        for access in op.reads:
            for earlier, write in writes[access.tensor]:
                found[earlier].append((write, access))
        for access in op.writes:
            for earlier, other in writes[access.tensor] + reads[access.tensor]:
                found[earlier].append((other, access))
        for access in op.writes:
            if _covers(access, op.grid):
                writes[access.tensor].clear()
                reads[access.tensor].clear()
            writes[access.tensor].append((index, access))
        for access in op.reads:
            reads[access.tensor].append((index, access))
        conflicts.append(dict(found))
    return conflicts


def _covers(access: Access, grid: tuple[int, ...]) -> bool:
    axes = [span.axis for span in access.spans if span.axis is not None]
    if len(set(axes)) < len(axes):  # a diagonal
        return False
    for extent, span in zip(access.shape, access.spans, strict=True):
        start, stop = span.bounds(grid, extent)
        if start[0] > 0 or stop[-1] < extent or (start[1:] > stop[:-1]).any():
            return False
    return True


def kept_edges(operators: Sequence[TiledOperator]) -> list[list[Edge]]:
    """For each operator the edges into it that no other edges imply.

    Raises:
        PlanError: beyond MAX_WAITS edges, or if the last operator does not depend on all others.
    """
    orders = KnownOrders()
    axes_of = cache(edge_axes)  # layers repeat each other, so most edges have been derived before
    covered: list[int] = []  # bit p of covered[c]: every tile of p runs before some tile of c
    for index, conflicts in enumerate(program_conflicts(operators)):
        kept: list[Edge] = []
        for earlier in sorted(conflicts, reverse=True):
            axes = axes_of(operators[earlier].grid, operators[index].grid, tuple(conflicts[earlier]))
            if axes is not None and not orders.implied(edge := Edge(earlier, index, axes), kept):
                kept.append(edge)
        if len(kept) > MAX_WAITS:
            names = ", ".join(operators[e.producer].name for e in kept)
            raise PlanError(
                f"operator {operators[index].name} waits for {len(kept)} operators ({names}); a task can wait for "
                f"{MAX_WAITS}. Make some of them depend on each other"
            )
        orders.add(kept)
        covered.append(0)
        for edge in kept:
            if edge.covers:
                covered[index] |= covered[edge.producer] | 1 << edge.producer
    last = len(operators) - 1
    unordered = [op.name for i, op in enumerate(operators[:-1]) if not covered[last] >> i & 1]
    if unordered:
        raise PlanError(
            f"nothing in the step waits for {unordered[0]} in the end; the last operator ({operators[last].name}) "
            "must depend on all others, so that steps can follow each other"
        )
    return orders.edges


def build_task_graph(operators: Sequence[TiledOperator]) -> TaskGraph:
    """Derive edges and events and lay all tiles out as arrays.

    Raises:
        PlanError: if a task would need more waits or notifies than a record holds, or if the last operator does
            not depend on all others.
    """
    edges_into = kept_edges(operators)
    coordinates = [op.coordinates() for op in operators]
    waits = [np.full((op.tiles, MAX_WAITS), NONE, np.int32) for op in operators]
    notifies = [np.full((op.tiles, MAX_NOTIFIES), NONE, np.int32) for op in operators]
    notified = [0] * len(operators)
    event_tensors: list[EventTensor] = []
    needs: list[np.ndarray] = []
    tensors_of: dict[int, list[tuple[EventTensor, np.ndarray]]] = defaultdict(list)

    def event_tensor(producer: int, shape: tuple[int, ...], index: np.ndarray) -> EventTensor:
        """The event tensor that the producer's tiles notify as `index` says; shared between equal ones."""
        for tensor, known in tensors_of[producer]:
            if tensor.shape == shape and np.array_equal(known, index):
                return tensor
        if notified[producer] == MAX_NOTIFIES:
            raise PlanError(
                f"operator {operators[producer].name} would notify more than {MAX_NOTIFIES} event tensors; "
                "let its consumers read it in the same tiles"
            )
        first = event_tensors[-1].first + event_tensors[-1].size if event_tensors else 0
        tensor = EventTensor(producer, shape, first)
        event_tensors.append(tensor)
        tensors_of[producer].append((tensor, index))
        notifies[producer][:, notified[producer]] = np.where(index == NONE, NONE, index + tensor.first)
        needs.append(np.bincount(index[index != NONE], minlength=tensor.size))
        notified[producer] += 1
        return tensor

    for consumer, edges in enumerate(edges_into):
        for column, edge in enumerate(edges):
            tensor = event_tensor(edge.producer, edge.shape, edge.notified(coordinates[edge.producer]))
            waited = edge.waited(coordinates[consumer])
            waits[consumer][:, column] = np.where(waited == NONE, NONE, waited + tensor.first)

    last = len(operators) - 1
    final = event_tensor(last, (), np.zeros(operators[last].tiles, np.int64))
    event_need = np.concatenate(needs).astype(np.int32)
    all_waits = np.concatenate(waits)
    all_waits[(all_waits != NONE) & (event_need[all_waits] == 0)] = NONE
    previous_step = (all_waits == NONE).all(1)
    all_waits[previous_step, 0] = final.first
    return TaskGraph(
        operators=tuple(operators),
        edges=tuple(e for edges in edges_into for e in edges),
        event_tensors=tuple(event_tensors),
        event_need=event_need,
        operator=np.repeat(np.arange(len(operators), dtype=np.int32), [op.tiles for op in operators]),
        coordinates=np.concatenate(coordinates),
        waits=all_waits,
        previous_step=previous_step,
        notifies=np.concatenate(notifies),
        final_event=final.first,
    )
