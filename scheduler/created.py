"""Tasks that are created at run time, on the host: what their events do with a step's partition, as in the kernel."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from math import ceil

import numpy as np

from megaflow.plan import Plan
from megaflow.records import OF_GROUP, PLAIN, UNBOUNDED
from megaflow.regions import TiledOperator

ReadTensor = Callable[[str], Sequence[int]]  # the present values of an int32 tensor, by its name


def no_tensors(name: str) -> Sequence[int]:
    """For plans that create no tasks at run time."""
    raise KeyError(f"there is no tensor {name}; give the values of partitions")


def even_partitions(operators: Sequence[TiledOperator]) -> dict[str, list[int]]:
    """The tensors of partitions into as many groups as are likely, with the items dealt out to them in turns."""
    tensors = {}
    for op in operators:
        if op.routing is not None:
            most = min(op.routing.groups, op.routing.number)
            groups = most if op.expected is None else min(most, max(1, ceil(op.expected)))
            members = [range(group, op.routing.number, groups) for group in range(groups)]
            tensors[op.routing.count] = [groups]
            tensors[op.routing.indptr] = [0, *accumulate(map(len, members))]
            tensors[op.routing.items] = list(chain(*members))
    return tensors


class CreatedTasks:
    """What depends on partitions.

    Args:
        plan: a dynamic one.
        read: how to read a routing's tensors.
    """

    def __init__(self, plan: Plan, read: ReadTensor) -> None:
        self._read = read
        self._routings = [op.routing for op in plan.graph.operators]
        self._triggers = plan.triggers.tolist()
        self._first = plan.triggers_of.tolist()
        self._bounds = plan.bounds.tolist() if plan.creates_tasks else [[UNBOUNDED, 0, 0]] * len(plan.event_need)

    def of_group(self, event: int) -> bool:
        """Whether an event is that of one group: it counts from 0 each time."""
        return bool(self._bounds[event][0] == OF_GROUP)

    def notified(self, record: Mapping[str, int]) -> list[tuple[int, int]]:
        """The events that a task notifies, and how often."""
        classes: list[int] = []
        if record["spread"] > 0:
            routing = self._routings[record["operator"]]
            assert routing is not None
            begin, end = self._read(routing.indptr)[record["c0"] : record["c0"] + 2]
            items = np.array(self._read(routing.items)[begin:end], np.int64) // record["spread"]
            classes = np.bincount(items, minlength=record["classes"]).tolist()
        events = []
        for i in (0, 1):
            event, stride = record[f"notify{i}"], record[f"stride{i}"]
            if event >= 0 and (record["spread"] == 0 or stride == PLAIN):
                events.append((event, 1))
            elif event >= 0:
                events += [(event + number * stride, count) for number, count in enumerate(classes) if count > 0]
        return events

    def released(self, event: int) -> list[int]:
        """The tasks that an event releases when it is complete."""
        begin, end = self._first[event : event + 2]
        operator, others, each = self._bounds[event]
        if operator >= 0:
            routing = self._routings[operator]
            assert routing is not None
            end = min(end, begin + others + self._read(routing.count)[0] * each)
        return self._triggers[begin:end]
