"""A plan that creates tasks at run time, as an ordinary plan that is right only if that one is, for any partition.

Whatever the partition is, each item is in one group. Tile (k, r) of the ordinary plan stands for tile r of the groups
in which the items of class k are: item by item, it runs when the tile of the item's group does, touches the item, and
notifies the events of the item's class. An event of a group becomes one for each class. That it is complete says, to a
tile of that routing, that the tasks of its own item's group have ended; to tasks after an event by item, that those of
all items of the class have. The first says less, where items of a class are in different groups. It is never taken for
the second: a conflict that is not item by item is one between tiles of different classes, too, and there are two.
"""

from dataclasses import replace
from math import gcd

import numpy as np

from megaflow.createdtasks import Created, created_operators, released
from megaflow.events import NONE
from megaflow.eventtable import EventTensor
from megaflow.plan import Plan, nothing
from megaflow.records import FIELDS, OF_GROUP
from megaflow.regions import Access, Routing, Span, TiledOperator


def by_items(plan: Plan) -> Plan:
    """The ordinary plan, with the same event numbers and further ones.

    Raises:
        VerificationError: what the plan does is not the same for each group of any partition.
    """
    found = {c.operator: c for c in created_operators(plan)}
    widths = class_widths(plan, list(found.values()))
    graph = plan.graph
    operators, blocks = [], []  # blocks: the task that each tile is like, and its class
    for number, op in enumerate(graph.operators):
        if number in found:
            width = widths[found[number].operator]
            op = of_items(op, width)
            mine = found[number].tasks[0]
        else:
            mine = np.arange(graph.first_task[number], graph.first_task[number + 1])
        classes = op.grid[0] if number in found else 1
        operators.append(op)
        blocks.append(np.stack((np.tile(mine, classes), np.repeat(np.arange(classes), len(mine)))))
    like, item_class = np.concatenate(blocks, 1)
    operator = graph.operator[like]
    tasks = np.arange(len(like))
    coordinates = graph.coordinates[like]
    of_class = graph.created[operator]
    coordinates[of_class, 0] = item_class[of_class]

    # events of groups: those of the first group stand for all, one for each class
    tensors, copies, first = list(graph.event_tensors), np.full(len(plan.event_need), NONE), len(plan.event_need)
    needs = []
    for c in found.values():
        for event in np.unique(c.own[:, 0][c.own[:, 0] != NONE]).tolist():
            classes = operators[c.operator].grid[0]
            tensors.append(EventTensor((c.operator,), (classes,), first))
            copies[event] = first
            needs.append(np.full(classes, plan.event_need[event]))
            first += classes

    records = plan.records[like]
    columns = {name: records[:, i] for i, name in enumerate(FIELDS)}
    columns["task"][:], columns["c0"][:] = tasks, coordinates[:, 0]
    for number, c in found.items():
        mine = operator == number
        for i in (0, 1):
            event = columns[f"notify{i}"]
            plain = mine & (event != NONE) & (c.by_item[i, 0] == NONE)
            event[plain] = copies[event[plain]] + item_class[plain]
            if c.spread:
                step = item_class * widths[number] // c.spread * c.stride[i]
                event[:] = np.where(mine & (event != NONE) & ~plain, event + step, event)
    notified = np.concatenate((columns["notify0"], columns["notify1"]))
    need = np.concatenate((plan.event_need, *needs)).astype(np.int32)
    got = np.bincount(notified[notified != NONE], minlength=len(need))
    need[: len(plan.event_need)] = got[: len(plan.event_need)]  # what they get by item is what they need

    # triggers: of the first group's tiles for those of all classes
    event, task = released(plan)
    kept = ~graph.created[graph.operator[task]] | (graph.coordinates[task, 0] == 0)
    order = np.argsort(like, kind="stable")
    begin, end = (np.searchsorted(like[order], task[kept], side) for side in ("left", "right"))
    times = end - begin
    within = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)
    new_task = order[np.repeat(begin, times) + within]
    new_event = np.repeat(event[kept], times)
    own = plan.bounds[new_event, 0] == OF_GROUP
    new_event[own] = copies[new_event[own]] + item_class[new_task[own]]
    by_event = np.argsort(new_event, kind="stable")
    counts = np.bincount(new_event, minlength=len(need))
    return replace(
        plan,
        graph=replace(
            graph,
            operators=tuple(operators),
            event_tensors=tuple(tensors),
            event_need=need,
            operator=operator,
            coordinates=coordinates,
            waits=graph.waits[like],
            notifies=notified.reshape(2, -1).T,
        ),
        records=records,
        event_need=need,
        triggers_of=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        triggers=new_task[by_event].astype(np.int32),
        wait_count=plan.wait_count[like],
        initial=np.searchsorted(like[order], plan.initial).astype(np.int32),
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
