"""Plans executed on the host: workers take turns as a test chooses, task by task, over several steps."""

from collections.abc import Callable

import numpy as np

from megaflow.plan import Plan

Start = Callable[[int, int], None]  # (task of the task graph, step from 0)


class StuckError(AssertionError):
    """No worker can go on, but tasks are left."""


def run_plan(plan: Plan, steps: int, choose: Callable[[int], int], start: Start) -> None:
    """Run all tasks; `choose(n)` picks one of the n tasks that could start now."""
    counters = np.zeros(len(plan.graph.event_need), np.int64)
    if plan.dynamic:
        _run_dynamic(plan, steps, choose, start, counters)
    else:
        _run_static(plan, steps, choose, start, counters)


def _notify(plan: Plan, record: int, counters: np.ndarray) -> list[int]:
    events = [e for e in (plan.field("notify0")[record], plan.field("notify1")[record]) if e >= 0]
    for event in events:
        counters[event] += 1
    return events


def _run_static(plan: Plan, steps: int, choose: Callable[[int], int], start: Start, counters: np.ndarray) -> None:
    length = np.diff(plan.queue_offsets)
    done = np.zeros(plan.workers, np.int64)

    def can_start(worker: int) -> bool:
        step, place = divmod(int(done[worker]), int(length[worker]))
        final = plan.graph.final_event
        if place == 0 and counters[final] < step * plan.graph.event_need[final]:
            return False  # the kernel waits at the start of each step
        record = plan.queue_offsets[worker] + place
        for wait, need, shift in (("wait0", "need0", plan.field("previous")[record]), ("wait1", "need1", 0)):
            event = plan.field(wait)[record]
            if event >= 0 and counters[event] < plan.field(need)[record] * (step + 1 - shift):
                return False
        return True

    while (left := [w for w in range(plan.workers) if done[w] < length[w] * steps]) and length.any():
        able = [w for w in left if can_start(w)]
        if not able:
            raise StuckError(f"workers {left} are stuck")
        worker = able[choose(len(able))]
        step, place = divmod(int(done[worker]), int(length[worker]))
        record = int(plan.queue_offsets[worker]) + place
        start(int(plan.field("task")[record]), step)
        _notify(plan, record, counters)
        done[worker] += 1


def _run_dynamic(plan: Plan, steps: int, choose: Callable[[int], int], start: Start, counters: np.ndarray) -> None:
    arrivals = np.zeros(plan.graph.tasks, np.int64)
    for step in range(steps):
        ready = plan.initial.tolist()
        for _ in range(plan.graph.tasks):
            if not ready:
                raise StuckError("the ready queue is empty")
            record = ready.pop(choose(len(ready)))
            start(int(plan.field("task")[record]), step)
            for event in _notify(plan, record, counters):
                if counters[event] == plan.graph.event_need[event] * (step + 1) and event != plan.graph.final_event:
                    for released in plan.triggers[plan.triggers_of[event] : plan.triggers_of[event + 1]]:
                        arrivals[released] += 1
                        if arrivals[released] == plan.wait_count[released] * (step + 1):
                            ready.append(int(released))
        assert not ready
