"""A discrete-event simulation of one decode step: when each task of a plan runs, by a cost model, without a GPU.

It follows the same arrays as the kernel (megaflow.kernel): queues, drains, waits, notifies, ready queues, triggers.
A task is taken, waits for its events, loads while it computes, and notifies. While it waits it loads what it would
prefetch. All workers that load get the same share of the memory's bandwidth.
"""

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from megaflow.errors import DeadlockError
from megaflow.plan import Plan
from megaflow.records import DRAIN, FIELDS
from megaflow.scheduler.bandwidth import NEVER, Bandwidth
from megaflow.scheduler.costs import H200_COSTS, Costs
from megaflow.scheduler.created import CreatedTasks, even_partitions
from megaflow.scheduler.simulation import Simulation
from megaflow.scheduler.work import Work

PUSH_WIDTH = 128  # tasks that the kernel's push releases at once


def simulate(plan: Plan, costs: Costs = H200_COSTS, fill: float = 1.0) -> Simulation:
    """Predict one step of a plan, in the middle of a launch of many.

    Args:
        fill: the share of their work that irregular operators have: attention's is the context over the longest one
            that the plan was made for. Tiles along the last grid axis are filled one after the other.
    Raises:
        DeadlockError: tasks are left, but no worker can go on.
    """
    assert 0 <= fill <= 1, fill
    machine = (ReadyMachine if plan.dynamic else QueueMachine)(plan, costs, fill)
    return machine.run()


class Machine:
    """Workers, events and memory as time goes on; what QueueMachine and ReadyMachine have in common."""

    def __init__(self, plan: Plan, costs: Costs, fill: float) -> None:
        self.plan = plan
        self.costs = costs
        self.work = Work(plan, costs, fill)
        self.now = 0.0
        self._memory = Bandwidth(costs.memory_bytes_per_s, costs.worker_bytes_per_s)
        self._agenda: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._planned = 0
        self.task = plan.column("task").tolist()
        self._loaded_early = [0.0] * plan.workers
        self._running = [False] * plan.workers
        self.record = [-1] * plan.workers  # what each worker has taken
        self._workers = [-1] * plan.graph.tasks
        self._starts, self._runs, self._ends = ([NEVER] * plan.graph.tasks for _ in range(3))
        self.absent = np.zeros(plan.graph.tasks, bool)  # tasks that are not created
        self._need = plan.event_need.tolist()
        self._seen = [0] * len(self._need)
        self.completed = [NEVER] * len(self._need)

    def at(self, time: float, act: Callable[[Any], None], subject: Any) -> None:
        """Plan act(subject) for a time. What is planned for the same time happens in the order of the calls."""
        self._planned += 1
        heapq.heappush(self._agenda, (time, self._planned, act, subject))

    def run(self) -> Simulation:
        self.begin()
        agenda, memory = self._agenda, self._memory
        while True:
            loaded = self.now + memory.next_end()
            if agenda and agenda[0][0] <= loaded:
                time, _, act, subject = heapq.heappop(agenda)
                memory.advance(time - self.now)
                self.now = time
                act(subject)
            elif loaded < NEVER:
                self.now = loaded
                self._loaded(memory.end_next())
            else:
                break
        times = np.array([self._starts, self._runs, self._ends])
        times[:, self.absent] = 0
        left = int((times[2] == NEVER).sum())
        if left or self.completed[self.plan.graph.final_event] == NEVER:
            raise DeadlockError(f"no worker can go on, but {left} tasks are left")
        return Simulation(
            plan=self.plan,
            seconds=self.completed[self.plan.graph.final_event] + self.between_steps(),
            worker=np.array(self._workers, np.int64),
            start=times[0],
            run=times[1],
            end=times[2],
        )

    def begin(self) -> None:
        """Plan what happens at the start of a step."""
        raise NotImplementedError

    def between_steps(self) -> float:
        """Seconds from the end of a step to the start of the next."""
        raise NotImplementedError

    def finished(self, worker: int) -> None:
        """A worker has ended its task: notify, take the next."""
        raise NotImplementedError

    def take(self, worker: int, record: int) -> None:
        """A worker begins with a task."""
        self.record[worker] = record
        self._workers[self.task[record]] = worker
        self._starts[self.task[record]] = self.now

    def load_early(self, worker: int) -> None:
        """Load what a task prefetches while it waits."""
        task = self.task[self.record[worker]]
        if self.work.early[task] > 0:
            self._memory.begin(worker, self.work.early[task], self.work.demand[task])

    def go_on(self, worker: int) -> None:
        """The events of a worker's task are complete."""
        task = self.task[self.record[worker]]
        self._runs[task] = self.now
        self._running[worker] = True
        early = self._loaded_early[worker] + self._memory.stop(worker)
        self._loaded_early[worker] = 0.0
        if self.work.load[task] > early:
            self._memory.begin(worker, self.work.load[task] - early, self.work.demand[task])
        else:
            self._loaded(worker)

    def _loaded(self, worker: int) -> None:
        task = self.task[self.record[worker]]
        if not self._running[worker]:
            self._loaded_early[worker] = self.work.early[task]
            return
        computed = self._runs[task] + self.work.compute_s[task]
        self.at(max(self.now, computed) + self.work.fixed_s[task], self._end, worker)

    def _end(self, worker: int) -> None:
        self._running[worker] = False
        self._ends[self.task[self.record[worker]]] = self.now
        self.finished(worker)

    def count(self, event: int, times: int = 1) -> bool:
        """Count notifies. Returns whether they complete the event."""
        self._seen[event] += times
        if self._seen[event] < self._need[event]:
            return False
        self.completed[event] = self.now
        return True


def _events(plan: Plan, name: str) -> list[list[int]]:
    """The events that each record waits for or notifies."""
    pairs = np.column_stack((plan.column(f"{name}0"), plan.column(f"{name}1"))).tolist()
    return [[event for event in pair if event >= 0] for pair in pairs]


class QueueMachine(Machine):
    """Workers run their queues and take tiles from drains."""

    def __init__(self, plan: Plan, costs: Costs, fill: float) -> None:
        super().__init__(plan, costs, fill)
        kind = plan.column("kind")
        self._drains = set(np.flatnonzero(kind == DRAIN).tolist())
        self._first_tile = plan.column("c0").tolist()
        self._tiles = plan.column("c1").tolist()
        self._number = plan.column("c2").tolist()
        self._waits = _events(plan, "wait")
        self._notifies = _events(plan, "notify")
        self._waiting = [0] * plan.workers
        self._waiters: list[list[int]] = [[] for _ in plan.event_need]
        self._place = plan.queue_offsets[:-1].tolist()
        self._stop = plan.queue_offsets[1:].tolist()
        self._tickets = [0] * plan.drains

    def begin(self) -> None:
        for worker in range(self.plan.workers):
            self._next(worker)

    def between_steps(self) -> float:
        return self.costs.event_s

    def _next(self, worker: int) -> None:
        record = self._place[worker]
        if record == self._stop[worker]:
            return
        if record in self._drains:
            self.at(self.now + self.costs.atomic_s, self._draw, worker)
            return
        self._place[worker] += 1
        self._start(worker, record)

    def _draw(self, worker: int) -> None:
        drain = self._place[worker]
        ticket = self._tickets[self._number[drain]]
        self._tickets[self._number[drain]] += 1
        if ticket < self._tiles[drain]:
            self._start(worker, self._first_tile[drain] + ticket)
            return
        self._notify(drain)
        self._place[worker] += 1
        self._next(worker)

    def _start(self, worker: int, record: int) -> None:
        self.take(worker, record)
        self.at(self.now + self.costs.start_s, self._arrive, worker)

    def _arrive(self, worker: int) -> None:
        ready = self.now
        for event in self._waits[self.record[worker]]:
            if self.completed[event] == NEVER:
                self._waiters[event].append(worker)
                self._waiting[worker] += 1
            else:
                ready = max(ready, self.completed[event] + self.costs.event_s)
        if self._waiting[worker]:
            self.load_early(worker)
        elif ready > self.now:
            self.load_early(worker)
            self.at(ready, self.go_on, worker)
        else:
            self.go_on(worker)

    def _notify(self, record: int) -> None:
        for event in self._notifies[record]:
            if self.count(event):
                for worker in self._waiters[event]:
                    self._waiting[worker] -= 1
                    if not self._waiting[worker]:
                        self.at(self.now + self.costs.event_s, self.go_on, worker)

    def finished(self, worker: int) -> None:
        self._notify(self.record[worker])
        self._next(worker)


class ReadyMachine(Machine):
    """Workers pop ready tasks; the one that completes an event pushes what waited for it.

    Several ready queues are simulated as one. Where tasks are created at run time, as many groups are there as are
    likely to be, and the items are dealt out to them evenly.
    """

    def __init__(self, plan: Plan, costs: Costs, fill: float) -> None:
        super().__init__(plan, costs, fill)
        self._ready = deque(plan.initial.tolist())
        self._idle: deque[int] = deque()
        self._left = plan.wait_count.tolist()
        partitions = even_partitions(plan.graph.operators)
        self._created = CreatedTasks(plan, partitions.__getitem__)
        self._fields = [dict(zip(FIELDS, record, strict=True)) for record in plan.records.tolist()]
        groups = np.array([partitions[op.routing.count][0] if op.routing else 0 for op in plan.graph.operators])
        operator = plan.graph.operator
        self.absent = plan.graph.created[operator] & (plan.graph.coordinates[:, 0] >= groups[operator])

    def begin(self) -> None:
        for worker in range(self.plan.workers):
            self._pop(worker)

    def between_steps(self) -> float:
        return 4 * self.costs.atomic_s  # a push, and the look at a slot that finds what was pushed

    def _pop(self, worker: int) -> None:
        if self._ready:
            self._give(worker, 2 * self.costs.atomic_s)
        else:
            self._idle.append(worker)

    def _give(self, worker: int, seconds: float) -> None:
        """The first ready task to a worker; to pop it takes so long."""
        self.take(worker, self._ready.popleft())
        self.at(self.now + seconds + self.costs.start_s, self.go_on, worker)

    def finished(self, worker: int) -> None:
        events = self._created.notified(self._fields[self.record[worker]])
        self.at(self.now + self.costs.atomic_s, self._notify, (worker, events))

    def _notify(self, subject: tuple[int, list[tuple[int, int]]]) -> None:
        worker, events = subject
        done = self.now
        if events and self.count(*events[0]) and events[0][0] != self.plan.graph.final_event:
            released = self._created.released(events[0][0])
            for i in range(0, len(released), PUSH_WIDTH):
                done += 3 * self.costs.atomic_s
                self.at(done, self._push, released[i : i + PUSH_WIDTH])
        if len(events) > 1:
            self.at(done + self.costs.atomic_s, self._notify, (worker, events[1:]))
        else:
            self.at(done, self._pop, worker)

    def _push(self, released: list[int]) -> None:
        for task in released:
            self._left[task] -= 1
            if not self._left[task]:
                self._ready.append(task)
        while self._ready and self._idle:
            self._give(self._idle.popleft(), self.costs.atomic_s)
