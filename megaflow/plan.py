"""A plan: everything one launch needs besides the model's buffers, as int32 arrays."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from megaflow.errors import PlanError
from megaflow.events import NONE
from megaflow.records import DRAIN, FIELDS, NOTHING, RECORD_WIDTH
from megaflow.taskgraph import TaskGraph

if TYPE_CHECKING:
    from megaflow.verifier import Verdict


def nothing() -> np.ndarray:
    return np.zeros(0, np.int32)


@dataclass(frozen=True)
class Plan:
    """A task graph with a schedule. N tasks, D drain records, E events, W workers.

    Attributes:
        graph: what is scheduled.
        workers: number of resident programs, W.
        records: int32 [N + D, RECORD_WIDTH]. Not dynamic: first the workers' queues, one after the other, then the
            tasks that are taken from drains, by drain.
        event_need: int32 [E], the notifies in one step that complete an event; the graph's events come first.
        queue_offsets: int32 [W + 1], where each worker's records begin (zeros in dynamic mode).
        ready_queues: dynamic: the number of ready queues on the device; 0: tasks come from the workers' queues.
        triggers_of, triggers: int32 [E + 1], [...]: the records that each event releases (dynamic).
        wait_count: int32 [N], events that each record waits for (dynamic).
        initial: int32, records that are ready when a launch starts (dynamic).
        bounds: int32 [E, 3], which of its triggers an event releases (dynamic); empty if all are always released.
            (UNBOUNDED, 0, 0): all. (OF_GROUP, 0, 0): all, but it is an event of one run-time group, complete only in
            steps that have the group, so it counts from 0 each time. (operator, n, k): the first n, and k for each
            group that the operator's routing has, which lie group by group.
    """

    graph: TaskGraph
    workers: int
    records: np.ndarray
    event_need: np.ndarray
    queue_offsets: np.ndarray
    ready_queues: int = 0
    triggers_of: np.ndarray = field(default_factory=nothing)
    triggers: np.ndarray = field(default_factory=nothing)
    wait_count: np.ndarray = field(default_factory=nothing)
    initial: np.ndarray = field(default_factory=nothing)
    bounds: np.ndarray = field(default_factory=nothing)

    @property
    def creates_tasks(self) -> bool:
        """Whether tasks are created at run time: those of a routing's groups that a step has."""
        return len(self.bounds) > 0

    @property
    def dynamic(self) -> bool:
        return self.ready_queues > 0

    def column(self, name: str) -> np.ndarray:
        """One column of the records, int32 [N + D]."""
        return self.records[:, FIELDS.index(name)]

    @property
    def is_task(self) -> np.ndarray:
        """bool [N + D]: which records are tasks and not drains."""
        return self.column("kind") != DRAIN

    @property
    def drains(self) -> int:
        """Number of operators whose tiles go to whoever comes first."""
        return int(self.column("c2")[~self.is_task].max(initial=-1)) + 1

    def event_name(self, event: int) -> str:
        """For messages."""
        if event < len(self.graph.event_need):
            return self.graph.event_name(event)
        return f"barrier {event - len(self.graph.event_need)}"

    def stopped_after(self, operator: str) -> "Plan":
        """The same plan, in which tasks of operators that come later in program order only wait and notify.

        Tasks that are created at run time are by the partition that lies in the buffers, whichever that is.

        Args:
            operator: as in last_of.
        Raises:
            PlanError: no such operator.
        """
        records = self.records.copy()
        records[self.is_task & (self.column("operator") > self.last_of(operator)), FIELDS.index("kind")] = NOTHING
        return replace(self, records=records)

    def last_of(self, operator: str) -> int:
        """The number of an operator in program order.

        Args:
            operator: its name, or the beginning of some names ("layers.3."): the last of them counts.
        Raises:
            PlanError: no such operator.
        """
        names = [op.name for op in self.graph.operators]
        if operator in names:
            return names.index(operator)
        found = [i for i, name in enumerate(names) if name.startswith(operator)]
        if not found:
            raise PlanError(f"no operator's name begins with {operator!r}; there are {names[0]} to {names[-1]}")
        return found[-1]

    def verify(self) -> "Verdict":
        """Prove that all conflicting accesses are ordered, each task runs once a step, and a launch ends.

        Raises:
            VerificationError: what does not hold, by name.
        """
        from megaflow.verifier import verify  # it needs Plan

        return verify(self)


def make_records(
    graph: TaskGraph, waits: np.ndarray, notifies: np.ndarray, event_need: np.ndarray, kind_numbers: Mapping[str, int]
) -> np.ndarray:
    """Records of all tasks in the task graph's order.

    Args:
        waits, notifies: int32 [N, 2], events; a schedule may have changed those of the graph.
        event_need: int32 [E].
        kind_numbers: place of each task kind in the kernel's tuple of bodies.
    Returns:
        int32 [N, RECORD_WIDTH].
    """
    need = np.where(waits == NONE, 0, event_need[waits])
    kinds = np.array([kind_numbers[op.kind] for op in graph.operators], np.int32)
    columns = {
        "operator": graph.operator,
        "kind": kinds[graph.operator],
        "c0": graph.coordinates[:, 0],
        "c1": graph.coordinates[:, 1],
        "c2": graph.coordinates[:, 2],
        "wait0": waits[:, 0],
        "need0": need[:, 0],
        "wait1": waits[:, 1],
        "need1": need[:, 1],
        "notify0": notifies[:, 0],
        "notify1": notifies[:, 1],
        "task": np.arange(graph.tasks),
        **dict(zip(("spread", "classes", "stride0", "stride1"), graph.by_item[graph.operator].T, strict=True)),
    }
    records = np.zeros((graph.tasks, RECORD_WIDTH), np.int32)
    for name, column in columns.items():
        records[:, FIELDS.index(name)] = column
    return records
