"""A plan that creates tasks at run time, as an ordinary plan that is right only if that one is, for any partition.

Whatever the partition is, each item is in one group. Tile (k, r) of the ordinary plan stands for tile r of the groups
in which the items of class k are: item by item, it runs when the tile of the item's group does, touches the item, and
notifies the events of the item's class. An event of a group becomes one for each class. That it is complete says, to a
tile of that routing, that the tasks of its own item's group have ended; to tasks after an event by item, that those of
all items of the class have. The first says less, where items of a class are in different groups. It is never taken for
the second: a conflict that is not item by item is one between tiles of different classes, too, and there are two.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd

import numpy as np

from megaflow.createdtasks import Created, created_operators, released
from megaflow.events import NONE
from megaflow.eventtable import EventTensor
from megaflow.plan import Plan, nothing
from megaflow.records import FIELDS, OF_GROUP
from megaflow.regions import Access, Routing, Span, TiledOperator


@dataclass(frozen=True)
class StandIns:
    """The tiles of the ordinary plan, N of them.

    Attributes:
        operators: the operators that they are of.
        like: int [N], the task that each is like, of those that are created at run time one of the first group.
        item_class: int [N], 0 where there are none.
        copies: int [E], of an event of the first group the number of that for class 0 in its place, NONE of others.
        tensors: what these events are; event_need: int32 [all events].
    """

    operators: tuple[TiledOperator, ...]
    like: np.ndarray
    item_class: np.ndarray
    copies: np.ndarray
    tensors: tuple[EventTensor, ...]
    event_need: np.ndarray

    @staticmethod
    def of(plan: Plan, found: Mapping[int, Created], widths: Mapping[int, int]) -> "StandIns":
        graph = plan.graph
        operators, like, item_class = [], [], []
        copies, needs, tensors = np.full(len(plan.event_need), NONE), [plan.event_need], []
        first = len(plan.event_need)
        for number, op in enumerate(graph.operators):
            if number not in found:
                operators.append(op)
                like.append(np.arange(graph.first_task[number], graph.first_task[number + 1]))
                item_class.append(np.zeros(op.tiles, np.int64))
                continue
            operators.append(of_items(op, widths[number]))
            classes, tasks, own = operators[-1].grid[0], found[number].tasks[0], found[number].own[:, 0]
            like.append(np.tile(tasks, classes))
            item_class.append(np.repeat(np.arange(classes), len(tasks)))
            for event in np.unique(own[own != NONE]).tolist():
                copies[event] = first
                tensors.append(EventTensor((number,), (classes,), first))
                needs.append(np.full(classes, plan.event_need[event], np.int32))
                first += classes
        return StandIns(
            tuple(operators),
            np.concatenate(like),
            np.concatenate(item_class),
            copies,
            tuple(tensors),
            np.concatenate(needs),
        )

    def triggers(self, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
        """The events and the tiles that they release: of each class those that the first group has."""
        graph = plan.graph
        event, task = released(plan)
        kept = ~graph.created[graph.operator[task]] | (graph.coordinates[task, 0] == 0)
        order = np.argsort(self.like, kind="stable")
        begin, end = (np.searchsorted(self.like[order], task[kept], side) for side in ("left", "right"))
        times = end - begin
        within = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)
        tile, event = order[np.repeat(begin, times) + within], np.repeat(event[kept], times)
        own = plan.bounds[event, 0] == OF_GROUP
        return np.where(own, self.copies[event] + self.item_class[tile], event), tile


def by_items(plan: Plan) -> Plan:
    """The ordinary plan, with the same event numbers and further ones.

    Raises:
        VerificationError: what the plan does is not the same for each group of any partition.
    """
    found = {c.operator: c for c in created_operators(plan)}
    widths = class_widths(plan, list(found.values()))
    tiles = StandIns.of(plan, found, widths)
    graph, like = plan.graph, tiles.like
    operator, coordinates, records = graph.operator[like], graph.coordinates[like], plan.records[like]
    of_class = graph.created[operator]
    coordinates[of_class, 0] = tiles.item_class[of_class]
    records[:, FIELDS.index("task")], records[:, FIELDS.index("c0")] = np.arange(len(like)), coordinates[:, 0]
    notified = []
    for i in (0, 1):
        event = records[:, FIELDS.index(f"notify{i}")]
        for number, c in found.items():
            mine = (operator == number) & (event != NONE)
            if c.plain(i):
                event[mine] = tiles.copies[event[mine]] + tiles.item_class[mine]
            else:
                event[mine] += tiles.item_class[mine] * widths[number] // c.spread * c.stride[i]
        notified.append(event)
    notifies = np.stack(notified, 1)
    # what was checked to be complete by item is complete with one notify of each tile
    need = tiles.event_need.copy()
    need[: len(plan.event_need)] = np.bincount(notifies[notifies != NONE], minlength=len(need))[: len(plan.event_need)]
    event, task = tiles.triggers(plan)
    return replace(
        plan,
        graph=replace(
            graph,
            operators=tiles.operators,
            event_tensors=graph.event_tensors + tiles.tensors,
            event_need=need,
            operator=operator,
            coordinates=coordinates,
            waits=graph.waits[like],
            notifies=notifies,
        ),
        records=records,
        event_need=need,
        triggers_of=np.concatenate(([0], np.cumsum(np.bincount(event, minlength=len(need))))).astype(np.int32),
        triggers=task[np.argsort(event, kind="stable")].astype(np.int32),
        wait_count=plan.wait_count[like],
        initial=np.flatnonzero(np.isin(like, plan.initial)).astype(np.int32),
        bounds=nothing(),
    )


def class_widths(plan: Plan, found: list[Created]) -> dict[int, int]:
    """Items in a class, by operator: the same for all with a routing, and so that there are two classes."""
    widths: dict[Routing, int] = {}
    routing_of = {}
    for c in found:
        routing = plan.graph.operators[c.operator].routing
        assert routing is not None
        routing_of[c.operator] = routing
        if c.classes > 1:
            widths[routing] = gcd(widths.get(routing, 0), c.spread)
    return {number: widths.get(routing, -(-routing.number // 2)) for number, routing in routing_of.items()}


def of_items(op: TiledOperator, width: int) -> TiledOperator:
    """The operator with classes of `width` items in place of groups; what moves with the group may be anywhere."""
    routing = op.routing
    assert routing is not None

    def access(a: Access) -> Access:
        spans = []
        for extent, span in zip(a.shape, a.spans, strict=True):
            if span.routing is not None:
                spans.append(Span.tiles(0, width))
            else:
                spans.append(Span.whole(extent) if span.axis == 0 else span)
        return replace(a, spans=tuple(spans))

    return replace(
        op,
        name=f"{op.name} by items",
        grid=(-(-routing.number // width), *op.grid[1:]),
        reads=tuple(map(access, op.reads)),
        writes=tuple(map(access, op.writes)),
        routing=None,
    )
