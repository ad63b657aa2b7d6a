"""A plan: everything one launch needs besides the model's buffers, as int32 arrays."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megaflow.events import NONE
from megaflow.records import FIELDS, RECORD_WIDTH
from megaflow.taskgraph import TaskGraph


@dataclass(frozen=True)
class Plan:
    """A task graph with a schedule. N tasks, E events, W workers.

    Attributes:
        graph: what is scheduled.
        dynamic: whether tasks come from the device's ready queue; otherwise from per-worker queues.
        workers: number of resident programs, W.
        records: int32 [N, RECORD_WIDTH]; static: grouped by worker, in the order of its queue.
        queue_offsets: int32 [W + 1], where each worker's records begin (static; zeros in dynamic mode).
        triggers_of, triggers: int32 [E + 1], [...]: the records that each event releases (dynamic).
        wait_count: int32 [N], events that each record waits for (dynamic).
        initial: int32, records that are ready when a launch starts (dynamic).
    """

    graph: TaskGraph
    dynamic: bool
    workers: int
    records: np.ndarray
    queue_offsets: np.ndarray
    triggers_of: np.ndarray
    triggers: np.ndarray
    wait_count: np.ndarray
    initial: np.ndarray

    def field(self, name: str) -> np.ndarray:
        """One column of the records, int32 [N]."""
        return self.records[:, FIELDS.index(name)]


def make_records(graph: TaskGraph, waits: np.ndarray, kind_numbers: Mapping[str, int]) -> np.ndarray:
    """Records of all tasks in the task graph's order.

    Args:
        waits: int32 [N, 2], the events to wait for; a schedule may have dropped some of graph.waits.
        kind_numbers: place of each task kind in the kernel's tuple of bodies.
    Returns:
        int32 [N, RECORD_WIDTH].
    """
    need = np.where(waits == NONE, 0, graph.event_need[waits])
    kinds = np.array([kind_numbers[op.kind] for op in graph.operators], np.int32)
    columns = {
        "operator": graph.operator,
        "kind": kinds[graph.operator],
        "c0": graph.coordinates[:, 0],
        "c1": graph.coordinates[:, 1],
        "c2": graph.coordinates[:, 2],
        "wait0": waits[:, 0],
        "need0": need[:, 0],
        "previous": graph.previous_step,
        "wait1": waits[:, 1],
        "need1": need[:, 1],
        "notify0": graph.notifies[:, 0],
        "notify1": graph.notifies[:, 1],
        "task": np.arange(graph.tasks),
    }
    records = np.zeros((graph.tasks, RECORD_WIDTH), np.int32)
    for name, column in columns.items():
        records[:, FIELDS.index(name)] = column
    return records
