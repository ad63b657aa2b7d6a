"""The proof that a plan is right, from its arrays alone: how edges were derived or waits dropped plays no part in it.

One step is played (megaflow.playback): that shows that a launch ends, since nothing that a task does can keep another
from running. The play finds, for each task, what has ended for certain when it starts (a vector clock: Fidge 1988,
Mattern 1989). Each pair of tiles that touch the same elements, one of them writing, is looked up in that. Steps repeat
each other: the final event comes after all of a step, and nothing of the next step begins before it. A plan that
creates tasks at run time is proved for all partitions at once, by an ordinary plan in its place (megaflow.itemtiles).
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from megaflow.errors import VerificationError
from megaflow.events import NONE
from megaflow.itemtiles import by_items
from megaflow.plan import Plan
from megaflow.playback import Playback
from megaflow.records import FIELDS
from megaflow.regions import Access, overlap
from megaflow.taskgraph import program_conflicts


@dataclass(frozen=True)
class Verdict:
    """What was proved, in numbers.

    Attributes:
        tasks: each runs exactly once in a step, those that are created at run time if their group is there.
        conflicts: pairs of tiles that touch the same elements, one of them writing, and are ordered. Pairs that follow
            from others, through a write in between that covers both, are not counted. Of tasks that are created at run
            time those count that stand for them (megaflow.itemtiles).
        rounds: with enough workers a step takes the time of so many tasks.
    """

    tasks: int
    conflicts: int
    rounds: int


def verify(plan: Plan) -> Verdict:
    """Prove that conflicting accesses are ordered, that each task runs once a step, and that a launch ends.

    Raises:
        VerificationError: what does not hold, by name.
    """
    check_tasks(plan)
    if plan.dynamic:
        check_triggers(plan)
    else:
        check_drains(plan)
    shown = by_items(plan) if plan.creates_tasks else plan
    play = Playback(shown)
    check_counts(shown, play)
    rounds = play.run()
    check_end(shown, play)
    return Verdict(plan.graph.tasks, check_order(shown, play), rounds)


def check_tasks(plan: Plan) -> None:
    """Each task of the graph has exactly one record, which says what the graph does."""
    graph = plan.graph
    task = plan.column("task")[plan.is_task]
    if (task < 0).any() or (task >= graph.tasks).any():
        raise VerificationError(f"a record is for task {task.min()} or {task.max()}; there are {graph.tasks}")
    times = np.bincount(task, minlength=graph.tasks)
    if (times != 1).any():
        wrong = int((times != 1).argmax())
        raise VerificationError(f"{graph.task_name(wrong)} runs {times[wrong]} times in a step")
    wanted = {"operator": graph.operator, **{f"c{i}": graph.coordinates[:, i] for i in range(3)}}
    for name, values in wanted.items():
        differs = plan.column(name)[plan.is_task] != values[task]
        if differs.any():
            raise VerificationError(f"{graph.task_name(int(task[differs.argmax()]))}: its record has another {name}")
    for name in ("wait0", "wait1", "notify0", "notify1"):
        event = plan.column(name)[plan.is_task | (name[0] == "n")]
        if ((event < NONE) | (event >= len(plan.event_need))).any():
            raise VerificationError(f"a record has {name} {event.min()} or {event.max()}, which is no event")


def check_drains(plan: Plan) -> None:
    """Each record behind the queues belongs to one drain, whose tickets are counted right."""
    queued = int(plan.queue_offsets[-1])
    records = plan.records[~plan.is_task]
    if not plan.is_task[queued:].all() or (np.diff(plan.queue_offsets) < 0).any():
        raise VerificationError("the workers' queues do not fit the records")
    if (records[:, [FIELDS.index("wait0"), FIELDS.index("wait1")]] != NONE).any():
        raise VerificationError("a drain waits for an event; only the tiles that it hands out may")
    fields = [FIELDS.index(name) for name in ("c2", "c0", "c1", "need0")]
    found, visits = np.unique(records[:, fields], axis=0, return_counts=True)
    taken = np.zeros(len(plan.records) - queued, np.int64)
    for (number, start, tiles, tickets), workers in zip(found.tolist(), visits.tolist(), strict=True):
        if tickets != tiles + workers:
            raise VerificationError(f"drain {number}: {tickets} tickets for {tiles} tiles and {workers} workers")
        if not queued <= start <= start + tiles <= len(plan.records):
            raise VerificationError(f"drain {number}: its tiles are not the records from {queued} on")
        taken[start - queued : start - queued + tiles] += 1
    if (taken != 1).any() or len(found) != plan.drains:
        raise VerificationError("the drains do not hand out each tile behind the queues exactly once")


def check_triggers(plan: Plan) -> None:
    """Each task is released once: by all its events together, or by the end of the step before."""
    graph = plan.graph
    event = np.repeat(np.arange(len(plan.event_need)), np.diff(plan.triggers_of))
    times = np.bincount(plan.triggers, minlength=graph.tasks)
    wrong = np.flatnonzero((times != plan.wait_count) | (times == 0))
    if len(wrong):
        task = int(wrong[0])
        raise VerificationError(
            f"{graph.task_name(task)} is triggered {times[task]} times and waits for {plan.wait_count[task]}"
        )
    first = np.sort(plan.triggers[event == graph.final_event])
    if not np.array_equal(first, np.sort(plan.initial)) or (plan.wait_count[first] != 1).any():
        raise VerificationError("what is ready when a launch starts is not what the final event releases")


def check_counts(plan: Plan, play: Playback) -> None:
    """Where the kernel looks for an event's exact count, the event is notified so often."""
    exact = np.arange(len(plan.event_need)) == plan.graph.final_event
    if plan.dynamic:
        exact |= np.diff(plan.triggers_of) > 0
    wrong = np.flatnonzero(exact & (play.count != plan.event_need))
    if len(wrong):
        event = int(wrong[0])
        raise VerificationError(
            f"event {plan.event_name(event)} needs {plan.event_need[event]} notifies in a step and gets "
            f"{play.count[event]}"
        )


def check_end(plan: Plan, play: Playback) -> None:
    """The final event comes after everything."""
    columns, place = play.columns(np.arange(len(plan.records)))
    early = np.flatnonzero(~(play.final[columns] > place).any(1))
    if len(early):
        task = int(plan.column("task")[early[0]])
        what = plan.graph.task_name(task) if plan.is_task[early[0]] else f"drain {plan.column('c2')[early[0]]}"
        raise VerificationError(f"the step may end before {what} has")


@dataclass(frozen=True)
class Meeting:
    """Which tiles of an earlier operator touch what tiles of a later one do, in groups of later tiles that are alike.

    Attributes:
        groups: int64 [groups, size], the later tiles.
        meets: bool [earlier tiles, groups].
    """

    groups: np.ndarray
    meets: np.ndarray

    @staticmethod
    def of(a: Access, early_grid: tuple[int, ...], b: Access, late_grid: tuple[int, ...]) -> "Meeting":
        early, late = (np.indices(grid).reshape(len(grid), -1) for grid in (early_grid, late_grid))
        key = np.zeros(late.shape[1], np.int64)
        for axis in {span.axis for span in b.spans if span.axis is not None}:
            key = key * late_grid[axis] + late[axis]
        groups = np.argsort(key, kind="stable").reshape(int(key.max()) + 1, -1)
        meets = np.ones((early.shape[1], len(groups)), bool)
        for dimension, p, c in zip(overlap(a, early_grid, b, late_grid), a.spans, b.spans, strict=True):
            rows = np.zeros(early.shape[1], np.int64) if p.axis is None else early[p.axis]
            columns = np.zeros(len(groups), np.int64) if c.axis is None else late[c.axis][groups[:, 0]]
            meets &= dimension[rows[:, None], columns]
        return Meeting(groups, meets)


def check_order(plan: Plan, play: Playback) -> int:
    """Conflicting tiles are in program order. Returns the number of pairs."""
    graph = plan.graph
    record_of = np.empty(graph.tasks, np.int64)
    record_of[plan.column("task")[plan.is_task]] = np.flatnonzero(plan.is_task)
    first = graph.first_task
    columns, place = play.columns(record_of)
    rows = play.row_of[record_of]
    meeting_of = cache(Meeting.of)  # layers repeat each other
    total = 0
    for consumer, conflicts in enumerate(program_conflicts(graph.operators)):
        late = slice(first[consumer], first[consumer + 1])
        for producer, pairs in conflicts.items():
            early = slice(first[producer], first[producer + 1])
            told_by = columns[early] if (columns[early, 0] != columns[early, 1]).any() else columns[early, :1]
            wanted, column = np.unique(told_by, return_inverse=True)
            column = column.reshape(told_by.shape)
            known = play.known[rows[late, None], wanted]
            for a, b in pairs:
                meeting = meeting_of(a, graph.operators[producer].grid, b, graph.operators[consumer].grid)
                least = known[meeting.groups].min(1)
                ended = (least[:, column] > place[early]).any(2)
                if not (ended.T | ~meeting.meets).all():
                    tile, group = np.argwhere(meeting.meets & ~ended.T)[0]
                    told = (known[:, column[tile]] > place[early][tile]).any(1)
                    other = meeting.groups[group][told[meeting.groups[group]].argmin()]
                    raise VerificationError(
                        f"{graph.task_name(late.start + other)} may start before "
                        f"{graph.task_name(early.start + tile)} has ended; both touch the same part of {a.tensor}"
                    )
                total += int(meeting.meets.sum()) * meeting.groups.shape[1]
    return total
