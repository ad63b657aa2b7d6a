"""One step of a plan, played in rounds on the host: does it end, and what has ended when each task starts?

In a round everything that can run does. A tile that a drain hands out runs in the order of the tickets, with some
worker at the drain, and no worker passes the drain before its last tile has ended: a real worker passes sooner, so a
play that ends shows that launches do, whoever takes which tile.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megaflow.errors import VerificationError
from megaflow.events import NONE
from megaflow.plan import Plan


@dataclass(frozen=True)
class Waits:
    """What each record waits for. R records, K the most waits of one.

    Attributes:
        event: int [R, K], NONE for none.
        need: int [R, K], the event's count at which the wait ends.
    """

    event: np.ndarray
    need: np.ndarray

    @staticmethod
    def of(plan: Plan) -> "Waits":
        if not plan.dynamic:
            columns = [np.stack([plan.column(f"{name}{i}") for i in (0, 1)], 1) for name in ("wait", "need")]
            columns[0][~plan.is_task] = NONE  # these fields of a drain mean something else
            return Waits(*columns)
        # every task is released by its triggers; those of the final event stand for the step before
        event = np.repeat(np.arange(len(plan.event_need)), np.diff(plan.triggers_of))
        inside = event != plan.graph.final_event
        task, event = plan.triggers[inside], event[inside]
        order = np.argsort(task, kind="stable")
        task, event = task[order], event[order]
        counts = np.bincount(task, minlength=len(plan.records))
        place = np.arange(len(task)) - np.repeat(np.cumsum(counts) - counts, counts)
        events = np.full((len(plan.records), int(counts.max(initial=1))), NONE)
        events[task, place] = event
        return Waits(events, np.where(events == NONE, 0, plan.event_need[events]))


class Playback:
    """The play, and what is known in it.

    Knowledge is a row of numbers: for each worker how many records of its queue have ended for certain, and for each
    event that records outside queues notify whether it is complete; the last number is always 0.

    Attributes:
        count: int64 [E], how often each event is notified in a step.
        known: int16 [rows, W + events + 1]; row_of: int64 [R], the row of what is known when a record starts.
        final: int16 [W + events + 1], what is known when the final event is complete.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        notifies = np.stack([plan.column("notify0"), plan.column("notify1")], 1)
        self._notifies = notifies.astype(np.int64)
        self._is_task = plan.is_task
        self._first_tile, self._tiles = plan.column("c0"), plan.column("c1")  # of drains
        self.count = np.bincount(notifies[notifies != NONE], minlength=len(plan.event_need))
        self._waits = waits = Waits.of(plan)
        # an event that is notified more often than a wait needs says nothing about any one notifier
        self._telling = (waits.event != NONE) & (waits.need == self.count[waits.event])

        self._offsets = np.zeros(plan.workers + 1, np.int64) if plan.dynamic else plan.queue_offsets.astype(np.int64)
        self.queued = int(self._offsets[-1])
        lengths = np.diff(self._offsets)
        self._lengths = lengths
        self._workers = 0 if plan.dynamic else plan.workers
        free = np.arange(self.queued, len(plan.records))
        events = np.unique(notifies[free])
        events = events[events != NONE]
        self._column_of = np.full(len(plan.event_need) + 1, self._workers + len(events))  # [-1] is for NONE
        self._column_of[events] = self._workers + np.arange(len(events))
        width = self._workers + len(events) + 1

        told = np.where(self._telling[free], waits.event[free], NONE)
        alike, row = np.unique(np.sort(told, 1), axis=0, return_inverse=True)
        self.row_of = np.concatenate((np.arange(self.queued), self.queued + row.reshape(-1)))
        self.known = np.zeros((self.queued + len(alike), width), np.int16)
        self._event_known = np.zeros((len(plan.event_need), width), np.int16)
        self._event_known[events, self._column_of[events]] = 1
        self._after = np.zeros((self._workers, width), np.int16)  # what each worker knows after its latest record
        self._seen = np.zeros(len(plan.event_need), np.int64)
        self._place = np.zeros(plan.workers, np.int64)
        self._ended = np.zeros(len(plan.records), bool)

    @property
    def final(self) -> np.ndarray:
        return self._event_known[self.plan.graph.final_event]

    def columns(self, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where a row says that records have ended: int64 [n, 2] columns, of which one is above int64 [n, 1]."""
        worker = np.searchsorted(self._offsets[1:], records, side="right")
        queued = records < self.queued
        columns = self._column_of[self._notifies[records]]
        columns[queued] = worker[queued, None]
        place = np.where(queued, records - self._offsets[np.minimum(worker, self.plan.workers - 1)], 0)
        return columns, place[:, None]

    def run(self) -> int:
        """Play the step. Returns the number of rounds. Raises VerificationError if something cannot run."""
        rounds = 0
        while len(able := np.concatenate((self._able_heads(), self._able_free()))):
            self._end(able)
            rounds += 1
        if not self._ended.all():
            raise VerificationError(self._stuck())
        return rounds

    def _can_start(self, records: np.ndarray) -> np.ndarray:
        event = self._waits.event[records]
        return ((event == NONE) | (self._seen[event] >= self._waits.need[records])).all(1)

    def _heads(self) -> np.ndarray:
        active = np.flatnonzero(self._place < self._lengths)
        return self._offsets[active] + self._place[active]

    def _able_heads(self) -> np.ndarray:
        heads = self._heads()
        able = self._can_start(heads)
        for tiles, here in self._at_drains(heads):
            able[here] = self._ended[tiles].all()
        return heads[able]

    def _able_free(self) -> np.ndarray:
        if self.plan.dynamic:
            waiting = np.flatnonzero(~self._ended)
            return waiting[self._can_start(waiting)]
        able = [np.zeros(0, np.int64)]
        for tiles, _ in self._at_drains(self._heads()):
            waiting = tiles[~self._ended[tiles]]
            able.append(waiting[np.logical_and.accumulate(self._can_start(waiting))])
        return np.concatenate(able)

    def _at_drains(self, heads: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """For each drain that workers have come to the records of its tiles, and which of the heads are there."""
        here = np.flatnonzero(~self._is_task[heads])
        first = self._first_tile[heads[here]]
        for start in np.unique(first):
            at = here[first == start]
            yield np.arange(start, start + self._tiles[heads[at[0]]]), at

    def _end(self, records: np.ndarray) -> None:
        """Run records that can: note what they know, and tell those who wait for them."""
        rows, first, row = np.unique(self.row_of[records], return_index=True, return_inverse=True)
        leaders = records[first]  # one of those that know the same
        after = np.zeros((len(rows), self.known.shape[1]), np.int16)
        for k in range(self._waits.event.shape[1]):
            telling = self._telling[leaders, k]
            heard = self._event_known[self._waits.event[leaders[telling], k]]
            after[telling] = np.maximum(after[telling], heard)
        queued = leaders < self.queued
        worker = np.searchsorted(self._offsets[1:], leaders[queued], side="right")
        if len(worker):
            after[queued] = np.maximum(after[queued], self._after[worker])
        self.known[rows] = after
        if len(worker):
            self._place[worker] += 1
            after[queued, worker] = self._place[worker]
            self._after[worker] = after[queued]
        self._ended[records] = True

        event = self._notifies[records].reshape(-1)
        self._seen += np.bincount(event[event != NONE], minlength=len(self._seen))
        pairs = np.unique(event * len(rows) + np.repeat(row.reshape(-1), self._notifies.shape[1]))
        event, row = np.divmod(pairs[pairs >= 0], len(rows))
        if len(event):
            events, first = np.unique(event, return_index=True)
            told = np.maximum.reduceat(after[row], first)
            self._event_known[events] = np.maximum(self._event_known[events], told)

    def _stuck(self) -> str:
        heads = self._heads()
        stuck = heads[self._is_task[heads]] if len(heads) else np.zeros(0, np.int64)
        stuck = np.concatenate((stuck, np.arange(self.queued, len(self._ended))))
        record = int(stuck[~self._ended[stuck] & ~self._can_start(stuck)][0])
        k = next(
            k for k, event in enumerate(self._waits.event[record])
            if event != NONE and self._seen[event] < self._waits.need[record, k]
        )  # fmt: skip
        event = int(self._waits.event[record, k])
        task = int(self.plan.column("task")[record])
        return (
            f"{self.plan.graph.task_name(task)} waits forever for event {self.plan.event_name(event)}: "
            f"seen {self._seen[event]}, needed {self._waits.need[record, k]}"
        )
