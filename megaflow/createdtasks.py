"""What a plan does with tasks that are created at run time: is it the same for each group of any partition?

A dynamic plan releases such tasks up to the partition's count of groups, or group by group, and counts notifies by
item. Here that is checked field by field; megaflow.itemtiles builds on it.
"""

from dataclasses import dataclass

import numpy as np

from megaflow.errors import VerificationError
from megaflow.events import NONE
from megaflow.plan import Plan
from megaflow.records import MOST_ITEM_CLASSES, OF_GROUP, PLAIN, UNBOUNDED
from megaflow.taskgraph import list_writers


@dataclass(frozen=True)
class Created:
    """An operator whose tasks are created at run time. G groups, K tiles of each.

    Attributes:
        operator: its number.
        tasks: int [G, K].
        spread, classes: of its items, 0 where it notifies none by item.
        by_item: int [2, K], the events that it notifies by item, of class 0, or NONE; stride: of each row.
        own: int [2, G, K], the events of its group alone that it notifies, or NONE.
    """

    operator: int
    tasks: np.ndarray
    spread: int
    classes: int
    by_item: np.ndarray
    stride: tuple[int, int]
    own: np.ndarray

    def plain(self, column: int) -> bool:
        """Whether what notify 0 or 1 names is notified once."""
        return self.spread == 0 or self.stride[column] == PLAIN

    @staticmethod
    def of(plan: Plan, operator: int) -> "Created":
        """Raises VerificationError if its records differ in more than the group."""
        graph, routing = plan.graph, plan.graph.operators[operator].routing
        assert routing is not None
        tasks = np.arange(graph.first_task[operator], graph.first_task[operator + 1]).reshape(routing.groups, -1)
        fields = {name: plan.column(name)[tasks] for name in ("spread", "classes", "stride0", "stride1")}
        spread, classes, *stride = (int(values[0, 0]) for values in fields.values())
        alike = all((values == values[0, 0]).all() for values in fields.values())
        counted = spread > 0 and classes == -(-routing.number // spread) <= MOST_ITEM_CLASSES
        if not alike or not (counted or (spread == classes == 0)) or min(stride) < PLAIN:
            raise VerificationError(f"{graph.operators[operator].name}: its records count items by different classes")
        notified = np.stack([plan.column(f"notify{i}")[tasks] for i in (0, 1)])
        plain = np.array([spread == 0 or s == PLAIN for s in stride])[:, None, None]
        by_item = np.where(plain, NONE, notified)
        if (by_item != by_item[:, :1]).any():
            raise VerificationError(f"{graph.operators[operator].name}: what it notifies by item differs by group")
        return Created(
            operator, tasks, spread, classes, by_item[:, 0], (stride[0], stride[1]), np.where(plain, notified, NONE)
        )


def created_operators(plan: Plan) -> list[Created]:
    """The operators whose tasks are created at run time, after a check that all groups are treated alike.

    Raises:
        VerificationError: for some partition a task would not be released, or an event not be complete.
    """
    graph = plan.graph
    if not np.array_equal(plan.column("task"), np.arange(graph.tasks)):
        raise VerificationError(
            "records of a dynamic plan are not in the order of the tasks, by which it releases them"
        )
    ordinary = ~graph.created[graph.operator]
    if (plan.column("spread")[ordinary] != 0).any():
        raise VerificationError("a task that is in every step notifies by item, but has none")
    if plan.bounds.shape != (len(plan.event_need), 3) or (plan.bounds[:, 0] < OF_GROUP).any():
        raise VerificationError("the bounds of events are not one for each")
    found = [Created.of(plan, int(operator)) for operator in np.flatnonzero(graph.created)]
    if (plan.wait_count[~ordinary] != 1).any() or (~ordinary[plan.initial]).any():
        raise VerificationError("a task that is created at run time does not wait for one event of its step")
    for c in found:
        if (every_class(c) >= len(plan.event_need)).any():
            raise VerificationError(f"{graph.operators[c.operator].name} notifies by item what is no event")
    check_own_events(plan, found)
    check_bounds(plan)
    check_item_counts(plan, found)
    return found


def check_own_events(plan: Plan, found: list[Created]) -> None:
    """Events of one group are notified by its tasks alone, release its tasks alone, and are alike in all groups."""
    graph = plan.graph
    own = plan.bounds[:, 0] == OF_GROUP
    ordinary = ~graph.created[graph.operator]
    events = np.stack([plan.column("notify0"), plan.column("notify1")])[:, ordinary]
    others = np.concatenate([events.reshape(-1), *(every_class(c).reshape(-1) for c in found)])
    if own[others[others != NONE]].any() or own[graph.final_event]:
        raise VerificationError("an event of one group is notified by others")
    label = np.full(len(own), NONE)  # what it is to its group
    owner, group = label.copy(), label.copy()
    for c in found:
        name = graph.operators[c.operator].name
        for row, notified in enumerate(np.moveaxis(c.own, 1, 0)):
            mine, count = np.unique(notified[notified != NONE], return_counts=True)
            if (owner[mine] != NONE).any() or not own[mine].all():
                raise VerificationError(f"{name} notifies once an event that is not of its group alone")
            owner[mine], group[mine], label[mine] = c.operator, row, np.arange(len(mine))
            if (plan.event_need[mine] != count).any():
                raise VerificationError(f"{name}: an event of a group needs more or fewer notifies than it gets")
        labels = np.where(c.own == NONE, NONE, label[c.own])
        if (labels != labels[:, :1]).any():
            raise VerificationError(f"{name}: the events of its groups are not alike")

    event, task = released(plan)
    task, event = task[own[event]], event[own[event]]
    if ordinary[task].any() or (graph.coordinates[task, 0] != group[event]).any():
        raise VerificationError("an event of one group releases a task that is not of the group")
    writers, routing = list_writers(graph.operators), [op.routing for op in graph.operators]
    for early, late in np.unique(np.stack((owner[event], graph.operator[task]), 1), axis=0).tolist():
        if (writers[early], routing[early]) != (writers[late], routing[late]):
            raise VerificationError(f"{graph.operators[late].name} is released by the groups of another partition")
    tile = task - graph.first_task[graph.operator[task]]
    sizes = np.array([op.tiles // op.grid[0] for op in graph.operators])[graph.operator[task]]
    groups = np.array([op.grid[0] for op in graph.operators])[graph.operator[task]]
    keys = np.stack((owner[event], label[event], graph.operator[task], tile % sizes, groups), 1)
    unique, times = np.unique(keys, axis=0, return_counts=True)
    if (times != unique[:, 4]).any():
        raise VerificationError("the events of groups do not release the same tiles in each")


def check_bounds(plan: Plan) -> None:
    """What an event releases up to a count are all groups' tasks, group by group; what it always does is no group's."""
    graph = plan.graph
    writers = list_writers(graph.operators)
    created = graph.created[graph.operator[plan.triggers]]
    event, _ = released(plan)
    if created[plan.bounds[event, 0] == UNBOUNDED].any():
        raise VerificationError("a task is released whether its group is there or not")
    for number in np.flatnonzero(plan.bounds[:, 0] > UNBOUNDED):
        operator, others, each = plan.bounds[number].tolist()
        begin, end = plan.triggers_of[number : number + 2]
        routing = graph.operators[operator].routing if operator < len(graph.operators) else None
        name = f"event {plan.event_name(int(number))}"
        if routing is None or not graph.created[operator]:
            raise VerificationError(f"{name} releases tasks up to a count that is not there")
        if (
            min(others, each) < 0
            or end - begin != others + each * routing.groups
            or created[begin : begin + others].any()
        ):
            raise VerificationError(f"{name} releases tasks up to a count of something else")
        tasks = plan.triggers[begin + others : end].reshape(routing.groups, each)
        if (
            not created[begin + others : end].all()
            or (np.arange(routing.groups) != graph.coordinates[tasks, 0].T).any()
        ):
            raise VerificationError(f"{name} does not release its tasks group by group")
        operators = graph.operator[tasks]
        for late in np.unique(operators).tolist():
            if (graph.operators[late].routing, writers[late]) != (routing, writers[operator]):
                raise VerificationError(f"{name} releases tasks of {graph.operators[late].name} by another partition")
        sizes = np.array([op.tiles // op.grid[0] for op in graph.operators])[operators]
        tiles = (tasks - graph.first_task[operators]) % sizes
        if (operators != operators[0]).any() or (tiles != tiles[0]).any():
            raise VerificationError(f"{name} does not release the same tiles of each group")


def check_item_counts(plan: Plan, found: list[Created]) -> None:
    """Events that are not of a group get the notifies that they need, whatever the partition."""
    graph = plan.graph
    ordinary = ~graph.created[graph.operator]
    events = np.concatenate([plan.column(name)[ordinary] for name in ("notify0", "notify1")])
    count = np.bincount(events[events != NONE], minlength=len(plan.event_need))
    for c in found:
        routing = graph.operators[c.operator].routing
        assert routing is not None
        sizes = np.minimum(c.spread, routing.number - c.spread * np.arange(c.classes))
        events = every_class(c)
        times = np.broadcast_to(sizes[:, None, None], events.shape)
        np.add.at(count, events[events != NONE], times[events != NONE])
    exact = (np.diff(plan.triggers_of) > 0) & (plan.bounds[:, 0] != OF_GROUP)
    exact[graph.final_event] = True
    wrong = np.flatnonzero(exact & (count != plan.event_need))
    if len(wrong):
        event = int(wrong[0])
        raise VerificationError(
            f"event {plan.event_name(event)} needs {plan.event_need[event]} notifies in a step and gets {count[event]}"
        )


def every_class(c: Created) -> np.ndarray:
    """int [classes, 2, K]: the events that a group's tiles notify by item."""
    step = np.arange(c.classes)[:, None, None] * np.array(c.stride)[:, None]
    return np.where(c.by_item == NONE, NONE, c.by_item + step)


def released(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """The events and the tasks that they release, int [triggers] each."""
    return np.repeat(np.arange(len(plan.event_need)), np.diff(plan.triggers_of)), plan.triggers
