"""The dynamic schedule: ready queues, filled on the device by the task that completes an event.

Tasks of operators with a routing are created at run time: those of groups that a step lacks never are.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megaflow.errors import PlanError, ScheduleError
from megaflow.events import NONE
from megaflow.plan import Plan, make_records, nothing
from megaflow.records import OF_GROUP, UNBOUNDED
from megaflow.scheduler.program import Program
from megaflow.scheduler.schedule import Schedule
from megaflow.taskgraph import TaskGraph, build_task_graph


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

    @property
    def modes(self) -> frozenset[bool]:
        return frozenset({True})

    def plan(self, program: Program, workers: int, kind_numbers: Mapping[str, int]) -> Plan:
        graph = build_task_graph(program.operators, at_run_time=True)
        records = make_records(graph, graph.waits, graph.notifies, graph.event_need, kind_numbers)
        # what waits for nothing in its own step waits for the end of the step before
        first = (graph.waits == NONE).all(1)
        waits = graph.waits.copy()
        waits[first, 0] = graph.final_event
        task, column = np.nonzero(waits != NONE)
        event = waits[task, column]
        at_once = graph.released_at_once[graph.operator[task]]
        group = np.where(at_once, graph.coordinates[task, 0], 0)
        order = np.lexsort((task, group, at_once, event))
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
            bounds=trigger_bounds(graph, event, task, at_once) if graph.created.any() else nothing(),
        )


def trigger_bounds(graph: TaskGraph, event: np.ndarray, task: np.ndarray, at_once: np.ndarray) -> np.ndarray:
    """Plan.bounds.

    Args:
        event, task: int [triggers]; at_once: bool [triggers], which are for tasks of all groups that there are.
    Raises:
        PlanError: an event releases tasks of several partitions.
    """
    bounds = np.tile(np.array([UNBOUNDED, 0, 0], np.int32), (len(graph.event_need), 1))
    for tensor in graph.event_tensors:
        if tensor.of_group:
            bounds[tensor.first : tensor.first + tensor.size, 0] = OF_GROUP
    others = np.bincount(event[~at_once], minlength=len(bounds))
    each = np.bincount(event[at_once & (graph.coordinates[task, 0] == 0)], minlength=len(bounds))
    for number, op in np.unique(np.stack((event, graph.operator[task]), 1)[at_once], axis=0).tolist():
        mine, first = graph.operators[op], bounds[number, 0]
        if first != UNBOUNDED and graph.operators[first].routing != mine.routing:
            raise PlanError(
                f"operators {graph.operators[first].name} and {mine.name} have different routings, but wait for "
                f"one event, {graph.event_name(number)}; let one of them read something that the other does not"
            )
        if first == UNBOUNDED:
            bounds[number] = op, others[number], each[number]
    return bounds
