"""The task graph: tiled operators, the events that order their tiles, and all tiles as arrays.

Edges come from conflicts: read-after-write, write-after-read and write-after-write on every tensor, in program
order. An edge that other edges already imply is dropped, so that in a chain of operators each tile has one wait.
Steps follow each other without a reset: nothing starts before the final event of the step before.

Tiles of groups that a run-time partition lacks (regions.Routing) are tasks that do nothing; or, if the plan can do so,
tasks are created at run time and those are not. Each operator with such tasks waits for one event: what releases a task
is then one of its group's, which its producers' tasks notify if they are created, too; or it is for all groups.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from megaflow.events import NONE, Edge, edge_axes
from megaflow.eventtable import EventTable, EventTensor
from megaflow.orders import KnownOrders
from megaflow.regions import Access, Box, Routing, TiledOperator

MAX_WAITS = 2


@dataclass(frozen=True)
class TaskGraph:
    """All tile tasks of one step. N tasks, E events.

    Attributes:
        operators: in program order.
        edges: the edges that are kept, by consumer.
        event_tensors: one for each set of events; `event_need` int32 [E] is the wait count of each event.
        operator: int32 [N], the operator of each task; coordinates: int32 [N, 3].
        waits: int32 [N, MAX_WAITS], event numbers or NONE.
        notifies: int32 [N, MAX_NOTIFIES], event numbers or NONE.
        final_event: complete when everything in the step is.
        created: bool [operators], whose tasks are created at run time.
        released_at_once: bool [operators], which of those one event releases for all groups, not each group's own.
        by_item: int32 [operators, 4], the fields spread, classes, stride0 and stride1 of the operator's records.
    """

    operators: tuple[TiledOperator, ...]
    edges: tuple[Edge, ...]
    event_tensors: tuple[EventTensor, ...]
    event_need: np.ndarray
    operator: np.ndarray
    coordinates: np.ndarray
    waits: np.ndarray
    notifies: np.ndarray
    final_event: int
    created: np.ndarray
    released_at_once: np.ndarray
    by_item: np.ndarray

    @property
    def tasks(self) -> int:
        return len(self.operator)

    @cached_property
    def first_task(self) -> np.ndarray:
        """int64 [operators + 1]: the number of each operator's first task, and last the number of tasks."""
        return np.concatenate(([0], np.cumsum([op.tiles for op in self.operators])))

    def task_bytes(self) -> np.ndarray:
        """int64 [N]: bytes that each task reads from device memory."""
        return np.array([op.tile_bytes for op in self.operators], np.int64)[self.operator]

    def task_name(self, task: int) -> str:
        """For messages: the operator and the tile."""
        return f"{self.operators[self.operator[task]].name}{self.coordinates[task].tolist()}"

    def event_name(self, event: int) -> str:
        """For messages: the producers and the index in their event tensor."""
        tensor = next(t for t in self.event_tensors if t.first <= event < t.first + t.size)
        index = np.unravel_index(event - tensor.first, tensor.shape)
        return f"{'+'.join(self.operators[p].name for p in tensor.producers)}{[int(i) for i in index]}"


def list_writers(operators: Sequence[TiledOperator]) -> list[tuple[int, ...]]:
    """For each operator the latest earlier ones that write the tensors of its routing: () if none does or it has none.

    Operators of which this is equal, and the routing too, have the same partition.
    """
    latest: dict[str, int] = {}
    writers = []
    for index, op in enumerate(operators):
        tensors = op.routing.tensors if op.routing else ()
        writers.append(tuple(latest[tensor] for tensor in tensors if tensor in latest))
        latest |= {access.tensor: index for access in op.writes}
    return writers


def program_conflicts(operators: Sequence[TiledOperator]) -> list[dict[int, list[tuple[Access, Access]]]]:
    """For each operator, the accesses of earlier operators that it must come after, by earlier operator.

    A write that covers what an earlier access touches hides it: what came before is ordered through the write. Where
    both accesses of a pair have a routing, it is of the same partition.
    """
    writers = list_writers(operators)

    def partition(index: int) -> tuple[Routing | None, tuple[int, ...]]:
        return operators[index].routing, writers[index]

    box_of = cache(Access.box)  # layers repeat each other
    writes: dict[str, list[tuple[int, Access, Box]]] = defaultdict(list)
    reads: dict[str, list[tuple[int, Access, Box]]] = defaultdict(list)
    conflicts: list[dict[int, list[tuple[Access, Access]]]] = []
    for index, op in enumerate(operators):
        found: dict[int, list[tuple[Access, Access]]] = defaultdict(list)
        after = [(access, writes[access.tensor]) for access in op.reads]
        after += [(access, writes[access.tensor] + reads[access.tensor]) for access in op.writes]
        for access, known in after:
            box = box_of(access, op.grid)
            for earlier, other, other_box in known:
                if not box.meets(other_box):
                    continue
                if access.routed and other.routed and partition(earlier) != partition(index):
                    found[earlier].append((other.anywhere(), access))
                else:
                    found[earlier].append((other, access))
        for access in op.writes:
            box = box_of(access, op.grid)
            for lists in (writes, reads):
                lists[access.tensor] = [known for known in lists[access.tensor] if not box.covers(known[2])]
            writes[access.tensor].append((index, access, box))
        for access in op.reads:
            reads[access.tensor].append((index, access, box_of(access, op.grid)))
        conflicts.append(dict(found))
    return conflicts


def kept_edges(operators: Sequence[TiledOperator], created: Sequence[Routing | None]) -> list[list[Edge]]:
    """For each operator the edges into it that no other edges imply.

    Args:
        created: the routing of operators whose tasks are created at run time, None for others.
    """
    orders = KnownOrders()
    axes_of = cache(edge_axes)  # layers repeat each other, so most edges have been derived before
    for index, conflicts in enumerate(program_conflicts(operators)):
        kept: list[Edge] = []
        for earlier in sorted(conflicts, reverse=True):
            grids = operators[earlier].grid, operators[index].grid
            axes = axes_of(*grids, tuple(conflicts[earlier]), created[earlier], created[index])
            if axes is not None and not orders.implied(edge := Edge(earlier, index, axes), kept):
                kept.append(edge)
        orders.add(kept)
    return orders.edges


def terminal_operators(edges_into: Sequence[Sequence[Edge]]) -> tuple[int, ...]:
    """The operators that together come after all others, in program order: the step ends when they have."""
    covered: list[int] = []  # bit p of covered[c]: every tile of p runs before some tile of c
    for edges in edges_into:
        covered.append(0)
        for edge in edges:
            if edge.covers:
                covered[-1] |= covered[edge.producer] | 1 << edge.producer
    terminals, seen = [], 0
    for op in reversed(range(len(covered))):
        if not seen >> op & 1:
            terminals.append(op)
            seen |= covered[op] | 1 << op
    return tuple(reversed(terminals))


def build_task_graph(operators: Sequence[TiledOperator], at_run_time: bool = False) -> TaskGraph:
    """Derive edges and events and lay all tiles out as arrays.

    An operator that depends on more than MAX_WAITS others waits for one event that all of them notify.

    Args:
        at_run_time: tasks of operators with a routing are created at run time, if the step makes the partition.
    Raises:
        PlanError: if an operator would need more notifies than a record holds.
    """
    writers = list_writers(operators)
    created = [op.routing if at_run_time and made else None for op, made in zip(operators, writers, strict=True)]
    edges_into = kept_edges(operators, created)
    coordinates = [op.coordinates() for op in operators]
    waits = [np.full((op.tiles, MAX_WAITS), NONE, np.int32) for op in operators]
    released_at_once = np.array([routing is not None for routing in created])
    table = EventTable(operators, created)
    for consumer, edges in enumerate(edges_into):
        if len(edges) > (MAX_WAITS if created[consumer] is None else 1):
            waits[consumer][:, 0] = table.add_joint(tuple(sorted(edge.producer for edge in edges))).first
            continue
        for column, derived in enumerate(edges):
            edge, tensor = table.add(derived)
            waited = edge.waited(coordinates[consumer])
            waits[consumer][:, column] = np.where(waited == NONE, NONE, waited + tensor.first)
            released_at_once[consumer] &= not tensor.of_group

    final = table.add_joint(terminal_operators(edges_into))
    event_need = np.concatenate(table.needs).astype(np.int32)
    all_waits = np.concatenate(waits)
    all_waits[(all_waits != NONE) & (event_need[all_waits] == 0)] = NONE
    return TaskGraph(
        operators=tuple(operators),
        edges=tuple(e for edges in edges_into for e in edges),
        event_tensors=tuple(table.tensors),
        event_need=event_need,
        operator=np.repeat(np.arange(len(operators), dtype=np.int32), [op.tiles for op in operators]),
        coordinates=np.concatenate(coordinates),
        waits=all_waits,
        notifies=np.concatenate(table.notifies),
        final_event=final.first,
        created=np.array([routing is not None for routing in created]),
        released_at_once=released_at_once,
        by_item=table.by_item,
    )
