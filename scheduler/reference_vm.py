"""The reference VM: a plan executed on the host, task by task, its workers interleaved as the caller chooses.

It follows the same arrays as the kernel (megaflow.kernel): queues, drains, waits, notifies, triggers. What a task
computes is up to the caller: megaflow.models.reference runs torch oracles on poisoned buffers, tests record the
order. (A Python VM beside the GPU's as the debugging tool: Hazy Research, Megakernels.)
"""

from collections.abc import Callable

from megaflow.errors import DeadlockError
from megaflow.plan import Plan
from megaflow.records import DRAIN, FIELDS, NOTHING
from megaflow.scheduler.created import CreatedTasks, ReadTensor, no_tensors

Choose = Callable[[int], int]  # picks one of n workers (or ready tasks) that could go on
Execute = Callable[[int, int], None]  # (task of the task graph, step from 0)


def run_plan(plan: Plan, steps: int, choose: Choose, execute: Execute, read: ReadTensor = no_tensors) -> None:
    """Run all tasks of `steps` steps, but for those that Plan.stopped_after leaves out.

    Args:
        read: how to read the partitions by which tasks are created at run time.
    Raises:
        DeadlockError: tasks are left, but no worker can go on.
    """
    vm = DynamicVM(plan, steps, read) if plan.dynamic else QueueVM(plan, steps)
    while able := vm.able():
        vm.advance(able[choose(len(able))], execute)
    vm.check_done()


class Counters:
    """The events of a plan, and its records as Python ints: much faster than numpy one by one."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.need = plan.event_need.tolist()
        self.seen = [0] * len(self.need)
        self.records = [dict(zip(FIELDS, record, strict=False)) for record in plan.records.tolist()]

    def complete(self, event: int, need: int, step: int) -> bool:
        return event < 0 or self.seen[event] >= need * (step + 1)

    def notify(self, record: dict[str, int]) -> None:
        """Count what a record notifies."""
        for event in (record["notify0"], record["notify1"]):
            if event >= 0:
                self.seen[event] += 1


class QueueVM:
    """Workers that run their queues, and take tiles from drains."""

    def __init__(self, plan: Plan, steps: int) -> None:
        self._plan = plan
        self._steps = steps
        self._counters = Counters(plan)
        self._offsets = plan.queue_offsets.tolist()
        self._place = [0] * plan.workers
        self._step = [0] * plan.workers
        self._held: list[int | None] = [None] * plan.workers  # the record that a worker has begun, not a drain
        self._tickets = [0] * plan.drains
        for worker in range(plan.workers):
            if self._offsets[worker] == self._offsets[worker + 1]:
                self._step[worker] = steps

    def able(self) -> list[int]:
        """Workers that can go on."""
        return [worker for worker in range(self._plan.workers) if self._can_go_on(worker)]

    def _can_go_on(self, worker: int) -> bool:
        step = self._step[worker]
        if step == self._steps:
            return False
        final = self._plan.graph.final_event
        if self._place[worker] == 0 and not self._counters.complete(final, self._counters.need[final], step - 1):
            return False  # the kernel waits at the start of each step
        held = self._held[worker]
        record = self._counters.records[self._offsets[worker] + self._place[worker] if held is None else held]
        return all(self._counters.complete(record[f"wait{i}"], record[f"need{i}"], step) for i in (0, 1))

    def advance(self, worker: int, execute: Execute) -> None:
        """Let a worker run its task, or take a tile from the drain that it has come to."""
        step, held = self._step[worker], self._held[worker]
        record = self._counters.records[self._offsets[worker] + self._place[worker] if held is None else held]
        if record["kind"] == DRAIN:
            ticket = self._tickets[record["c2"]] - record["need0"] * step
            self._tickets[record["c2"]] += 1
            if ticket < record["c1"]:
                self._held[worker] = record["c0"] + ticket
                return
        elif record["kind"] != NOTHING:
            execute(record["task"], step)
        self._counters.notify(record)
        self._held[worker] = None
        if held is not None:
            return
        self._place[worker] += 1
        if self._offsets[worker] + self._place[worker] == self._offsets[worker + 1]:
            self._place[worker] = 0
            self._step[worker] += 1

    def check_done(self) -> None:
        stuck = [worker for worker in range(self._plan.workers) if self._step[worker] < self._steps]
        if stuck:
            raise DeadlockError(f"workers {stuck} cannot go on")


class DynamicVM:
    """Tasks that are released by events; any ready one may be next."""

    def __init__(self, plan: Plan, steps: int, read: ReadTensor = no_tensors) -> None:
        self._plan = plan
        self._steps = steps
        self._counters = Counters(plan)
        self._created = CreatedTasks(plan, read)
        self._arrivals = [0] * plan.graph.tasks
        self._ready = [(int(task), 0) for task in plan.initial]
        self._in_every_step = ~plan.graph.created[plan.graph.operator]
        self._left = int(self._in_every_step.sum()) * steps

    def able(self) -> list[int]:
        """Places in the list of ready tasks."""
        return list(range(len(self._ready)))

    def advance(self, place: int, execute: Execute) -> None:
        """Run a ready task and release what it was the last to be waited for."""
        task, step = self._ready.pop(place)
        record = self._counters.records[task]
        if record["kind"] != NOTHING:
            execute(record["task"], step)
        self._left -= int(self._in_every_step[task])
        for event, times in self._created.notified(record):
            if self._completes(event, times, step):
                self._release(event, step + (event == self._plan.graph.final_event))

    def _completes(self, event: int, times: int, step: int) -> bool:
        """Count notifies of an event. Returns whether these complete it."""
        seen, need = self._counters.seen, self._counters.need[event]
        seen[event] += times
        if not self._created.of_group(event):
            return seen[event] == need * (step + 1)
        complete = seen[event] == need
        if complete:
            seen[event] = 0
        return complete

    def _release(self, event: int, step: int) -> None:
        if step == self._steps:
            return
        for task in self._created.released(event):
            self._arrivals[task] += 1
            waits = int(self._plan.wait_count[task])
            if waits == 1 or self._arrivals[task] == waits * (step + (event != self._plan.graph.final_event)):
                self._ready.append((task, step))

    def check_done(self) -> None:
        final = self._plan.graph.final_event
        ended = self._counters.complete(final, self._counters.need[final], self._steps - 1)
        if self._left or not ended:
            raise DeadlockError(
                f"no task is ready, but the last step has {'ended' if ended else 'not ended'} and of the "
                f"tasks that are in every step {self._left} are left"
            )
