"""From placements to a plan: the workers' queues, filled on the host.

Each operator's tiles are dealt out evenly to its workers; where they do not divide, the workers that have read the
fewest bytes so far get one more, so the balance carries over from one operator to the next. A wait is dropped where
an earlier task in the same queue has already waited for it, or a barrier stands for it.
"""

import heapq
from collections.abc import Mapping, Sequence

import numpy as np

from megaflow.errors import ScheduleError
from megaflow.events import NONE
from megaflow.eventtable import MAX_NOTIFIES
from megaflow.plan import Plan, make_records
from megaflow.records import DRAIN, FIELDS, RECORD_WIDTH
from megaflow.scheduler.context import Placement
from megaflow.taskgraph import TaskGraph

ANYBODY = -1


def spread(loads: np.ndarray, tiles: int) -> np.ndarray:
    """Give `tiles` equal tasks to workers in equal numbers, and one more to the least loaded as needed.

    The workers meet again at the end of each operator, so nobody gets two more than another, whatever the loads.

    Args:
        loads: int64 [W], what each worker has already.
    Returns:
        int64 [tiles], the worker of each tile.
    """
    least_loaded = np.argsort(loads, kind="stable")
    return np.resize(least_loaded, tiles)


def by_priority(placements: Sequence[Placement], before: Mapping[str, Sequence[str]]) -> list[Placement]:
    """Placements in the order of the queues: higher priority first, as far as inputs and barriers allow.

    Args:
        before: names of the operators that each operator comes after.
    """
    home = {name: i for i, placement in enumerate(placements) for name in placement.operators}
    waiting, after = [], [[] for _ in placements]  # type: tuple[list[set[int]], list[list[int]]]
    barrier = NONE
    for i, placement in enumerate(placements):
        inputs = {home[name] for op in placement.operators for name in before[op]} - {i}
        inputs |= set(range(barrier + 1, i)) if placement.barrier else set()
        inputs |= {barrier} if barrier != NONE else set()
        waiting.append(inputs)
        for j in inputs:
            after[j].append(i)
        barrier = i if placement.barrier else barrier
    ready = [(-p.priority, i) for i, p in enumerate(placements) if not waiting[i]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, i = heapq.heappop(ready)
        order.append(placements[i])
        for j in after[i]:
            waiting[j].discard(i)
            if not waiting[j]:
                heapq.heappush(ready, (-placements[j].priority, j))
    return order


class Deal:
    """Which worker runs each task, and in which order. N tasks.

    Attributes:
        worker: int64 [N], ANYBODY for the tiles of drained operators.
        group, level, share: sort keys of the tasks in a queue: the placement, the depth of the operator among those
            that were placed with it, and how much of the operator comes before the tile.
        segment: int64 [N], the number of barriers before each task.
    """

    def __init__(
        self,
        graph: TaskGraph,
        workers: int,
        placements: Sequence[Placement],
        before: Mapping[str, Sequence[str]],
    ) -> None:
        index = {op.name: i for i, op in enumerate(graph.operators)}
        first = graph.first_task
        self.worker = np.full(graph.tasks, ANYBODY, np.int64)
        self.group = np.zeros(graph.tasks, np.int64)
        self.level = np.zeros(graph.tasks, np.int64)
        self.share = np.zeros(graph.tasks)
        self.segment = np.zeros(graph.tasks, np.int64)
        self.drained: list[tuple[int, range]] = []  # operator, its tasks
        loads = np.zeros(workers, np.int64)
        segment = 0
        for group, placement in enumerate(placements):
            levels: dict[str, int] = {}
            for name in placement.operators:
                levels[name] = 1 + max((levels[b] for b in before[name] if b in levels), default=-1)
                op = graph.operators[index[name]]
                tasks = slice(first[index[name]], first[index[name] + 1])
                self.group[tasks] = group
                self.level[tasks] = levels[name]
                self.segment[tasks] = segment
                self.share[tasks] = (np.arange(op.tiles) + 0.5) / op.tiles
                if placement.workers is None:
                    self.drained.append((index[name], range(tasks.start, tasks.stop)))
                    continue
                chosen = np.array(placement.workers)
                self.worker[tasks] = chosen[spread(loads[chosen], op.tiles)]
                loads += np.bincount(self.worker[tasks], minlength=workers) * max(op.tile_bytes, 1)
                loads -= loads.min()
            segment += placement.barrier


def wait_for_barriers(graph: TaskGraph, segment: np.ndarray) -> np.ndarray:
    """Waits in which a barrier stands for what came before it; barrier k is event number E + k.

    Args:
        segment: int64 [N], the number of barriers before each task.
    """
    latest = np.full(len(graph.event_need), NONE, np.int64)
    for column in graph.notifies.T:
        given = column != NONE
        np.maximum.at(latest, column[given], segment[given])
    waits = np.where(latest[graph.waits] < segment[:, None], NONE, graph.waits)
    # what waits for a task behind the barrier is behind it too
    alone = (waits == NONE).all(1) & (segment > 0)
    waits[alone, 0] = len(graph.event_need) + segment[alone] - 1
    return waits


def prune_waits(waits: np.ndarray, worker: np.ndarray, place: np.ndarray) -> np.ndarray:
    """Drop waits that an earlier task of the same worker has already done in this step.

    Args:
        waits: int32 [N, 2]; worker: [N], ANYBODY keeps its waits; place: [N], the order within the queues.
    """
    queued = np.flatnonzero(worker != ANYBODY)
    queued = queued[np.argsort(place[queued], kind="stable")]
    flat = waits[queued].reshape(-1)  # a task's waits in order, task after task
    live = np.flatnonzero(flat != NONE)
    key = np.repeat(worker[queued], waits.shape[1])[live] * (int(flat.max(initial=0)) + 1) + flat[live]
    first = np.unique(key, return_index=True)[1]
    repeated = np.ones(len(live), bool)
    repeated[first] = False
    flat[live[repeated]] = NONE
    pruned = waits.copy()
    pruned[queued] = flat.reshape(-1, waits.shape[1])
    return pruned


def notify_barriers(graph: TaskGraph, waits: np.ndarray, segment: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Notifies without those that nobody waits for, and with those of barriers.

    Returns:
        int32 [N, MAX_NOTIFIES], and how often each event is notified in a step, int32 [E + barriers].
    """
    barriers = int(segment.max(initial=0))
    wanted = np.zeros(len(graph.event_need) + barriers, bool)
    wanted[waits[waits != NONE]] = True
    wanted[graph.final_event] = True
    own = np.where((graph.notifies != NONE) & wanted[graph.notifies], graph.notifies, NONE)
    barrier = np.where(segment < barriers, len(graph.event_need) + segment, NONE)
    given = np.sort(np.column_stack((own, barrier)), axis=1)[:, ::-1]  # NONE, which is -1, goes to the end
    if (given[:, MAX_NOTIFIES:] != NONE).any():
        task = int((given[:, MAX_NOTIFIES] != NONE).argmax())
        raise ScheduleError(
            f"{graph.task_name(task)} would notify more than {MAX_NOTIFIES} events with the barrier behind it; "
            "place the operators that wait for it behind the barrier"
        )
    notifies = given[:, :MAX_NOTIFIES].astype(np.int32)
    return notifies, np.bincount(notifies[notifies != NONE], minlength=len(wanted)).astype(np.int32)


def queue_plan(
    graph: TaskGraph,
    workers: int,
    placements: Sequence[Placement],
    before: Mapping[str, Sequence[str]],
    kind_numbers: Mapping[str, int],
) -> Plan:
    """The plan in which workers run their queues.

    Args:
        before: names of the operators that each operator comes after.
    """
    deal = Deal(graph, workers, by_priority(placements, before), before)
    place = np.empty(graph.tasks, np.int64)
    place[np.lexsort((deal.share, deal.level, deal.group))] = np.arange(graph.tasks)
    waits = prune_waits(wait_for_barriers(graph, deal.segment), deal.worker, place)
    notifies, need = notify_barriers(graph, waits, deal.segment)
    need[graph.final_event] += workers * len(deal.drained)
    records = make_records(graph, waits, notifies, need, kind_numbers)

    queued = np.flatnonzero(deal.worker != ANYBODY)
    drains = np.zeros((len(deal.drained) * workers, RECORD_WIDTH), np.int32)
    columns = {name: drains[:, i].reshape(len(deal.drained), workers) for i, name in enumerate(FIELDS)}
    columns["kind"][:] = DRAIN
    for name in ("wait0", "wait1", "notify1"):
        columns[name][:] = NONE
    columns["notify0"][:] = graph.final_event
    start = len(queued) + len(drains)
    taken, keys = [], []
    for number, (op, tasks) in enumerate(deal.drained):
        columns["operator"][number] = op
        columns["c0"][number] = start
        columns["c1"][number] = len(tasks)
        columns["c2"][number] = number
        columns["need0"][number] = len(tasks) + workers
        start += len(tasks)
        taken.append(np.array(tasks))
        keys.append((deal.group[tasks[0]], deal.level[tasks[0]]))
    # a drain comes after what is placed with its operator, so that it fills the time until the others are done
    group = np.concatenate((deal.group[queued], np.repeat([g for g, _ in keys], workers))).astype(np.int64)
    level = np.concatenate((deal.level[queued], np.repeat([k for _, k in keys], workers))).astype(np.int64)
    share = np.concatenate((deal.share[queued], np.ones(len(drains))))
    owner = np.concatenate((deal.worker[queued], np.tile(np.arange(workers), len(deal.drained)))).astype(np.int64)
    order = np.lexsort((share, level, group, owner))
    offsets = np.concatenate(([0], np.cumsum(np.bincount(owner, minlength=workers)))).astype(np.int32)
    in_queues = np.concatenate((records[queued], drains))[order]
    return Plan(graph, workers, np.concatenate((in_queues, *(records[t] for t in taken))), need, offsets)
