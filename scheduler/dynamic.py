"""The dynamic schedule: ready queues, filled on the device by the task that completes an event."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megaflow.errors import ScheduleError
from megaflow.events import NONE
from megaflow.plan import Plan, make_records
from megaflow.scheduler.program import Program
from megaflow.scheduler.schedule import Schedule
from megaflow.taskgraph import build_task_graph


@dataclass(frozen=True)
class Dynamic(Schedule):
    """The order in which tasks run is decided at run time.

    Attributes:
        queues: 1: a central ready queue; more: tasks are spread over so many, and a worker whose own is empty takes
            from the others.
    """

    queues: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.queues <= 64:
            raise ScheduleError(f"queues is {self.queues}; it must be 1 to 64")

    def plan(self, program: Program, workers: int, kind_numbers: Mapping[str, int]) -> Plan:
        graph = build_task_graph(program.operators)
        records = make_records(graph, graph.waits, graph.notifies, graph.event_need, kind_numbers)
        # what waits for nothing in its own step waits for the end of the step before
        first = (graph.waits == NONE).all(1)
        waits = graph.waits.copy()
        waits[first, 0] = graph.final_event
        task, column = np.nonzero(waits != NONE)
        event = waits[task, column]
        order = np.argsort(event, kind="stable")
        counts = np.bincount(event, minlength=len(graph.event_need))
        return Plan(
            graph,
            workers,
            records,
            graph.event_need,
            np.zeros(workers + 1, np.int32),
            ready_queues=self.queues,
            triggers_of=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
            triggers=task[order].astype(np.int32),
            wait_count=(waits != NONE).sum(1).astype(np.int32),
            initial=np.flatnonzero(first).astype(np.int32),
        )
