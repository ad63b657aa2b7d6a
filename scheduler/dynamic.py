"""The dynamic schedule: a global ready queue, filled on the device by the task that completes an event."""

from collections.abc import Mapping

import numpy as np

from megaflow.events import NONE
from megaflow.plan import Plan, make_records
from megaflow.taskgraph import TaskGraph


def dynamic_plan(graph: TaskGraph, workers: int, kind_numbers: Mapping[str, int]) -> Plan:
    """Triggers for each event; the order in which tasks run is decided at run time."""
    records = make_records(graph, graph.waits, kind_numbers)
    task, column = np.nonzero(graph.waits != NONE)
    event = graph.waits[task, column]
    order = np.argsort(event, kind="stable")
    counts = np.bincount(event, minlength=len(graph.event_need))
    return Plan(
        graph,
        True,
        workers,
        records,
        np.zeros(workers + 1, np.int32),
        np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        task[order].astype(np.int32),
        (graph.waits != NONE).sum(1).astype(np.int32),
        np.flatnonzero(graph.previous_step).astype(np.int32),
    )
