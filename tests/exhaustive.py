"""All interleavings of a small plan, by search over the states of the reference VM."""

import copy

import numpy as np
from programs import conflicting_tiles

from megaflow.plan import Plan
from megaflow.scheduler.reference_vm import DynamicVM, QueueVM

STEPS = 2


class TooManyStates(Exception):
    """The search was given up."""


def wrong_in_some_interleaving(plan: Plan, limit: int = 4000) -> str | None:
    """What goes wrong in some interleaving of two steps; None if nothing does in any.

    Wrong is: a task does not run once a step, a conflict is out of order (within a step or over its end), or no
    worker can go on.

    Raises:
        TooManyStates: there are more than `limit`.
    """
    conflicts = conflicting_tiles(plan.graph)
    touches = conflicts | conflicts.T
    start = (DynamicVM if plan.dynamic else QueueVM)(plan, STEPS)
    seen, stack = set(), [(start, np.zeros((STEPS, plan.graph.tasks), np.int8))]
    while stack:
        vm, done = stack.pop()
        able = vm.able()
        if not able and (done != 1).any():
            return "it stops before the end"
        for choice in able:
            after, ran = _fork(vm), done.copy()
            wrong: list[str] = []

            def execute(task: int, step: int, ran: np.ndarray = ran, wrong: list[str] = wrong) -> None:
                ran[step, task] += 1
                if ran[step, task] > 1:
                    wrong.append(f"{task} runs twice")
                elif (conflicts[:, task] & (ran[step] == 0)).any():
                    wrong.append(f"{task} runs before what it must come after")
                elif step and (touches[:, task] & (ran[step - 1] == 0)).any():
                    wrong.append(f"{task} runs before the step before has ended")

            try:
                after.advance(choice, execute)
            except IndexError:
                return "a drain hands out what is no record"
            if wrong:
                return wrong[0]
            state = _state(after, ran)
            if state not in seen:
                seen.add(state)
                stack.append((after, ran))
                if len(seen) > limit:
                    raise TooManyStates
    return None


def _fork(vm: QueueVM | DynamicVM) -> QueueVM | DynamicVM:
    shared = (vm._plan, vm._counters.plan, vm._counters.need, vm._counters.records)
    return copy.deepcopy(vm, {id(each): each for each in shared})


def _state(vm: QueueVM | DynamicVM, ran: np.ndarray) -> tuple:
    counters = (tuple(vm._counters.seen), ran.tobytes())
    if isinstance(vm, DynamicVM):
        return (*counters, tuple(sorted(vm._ready)), tuple(vm._arrivals))
    return (*counters, tuple(vm._place), tuple(vm._step), tuple(vm._held), tuple(vm._tickets))
