"""All interleavings of a small plan, by search over the states of the reference VM."""

import copy
from collections.abc import Sequence

import numpy as np
from programs import conflicting_tiles
from routed import Lists, Meaning, Partition

from megaflow.plan import Plan
from megaflow.scheduler.reference_vm import DynamicVM, QueueVM

STEPS = 2


class TooManyStates(Exception):
    """The search was given up."""


def wrong_in_some_interleaving(
    plan: Plan, limit: int = 4000, steps: Sequence[Sequence[Partition]] | None = None
) -> str | None:
    """What goes wrong in some interleaving of two steps; None if nothing does in any.

    Wrong is: a task does not run once a step, a conflict is out of order (within a step or over its end), or no
    worker can go on.

    Args:
        steps: the partition of each layer in each step, if the plan creates tasks by them.
    Raises:
        TooManyStates: there are more than `limit`.
    """
    if steps is None:
        conflicts = conflicting_tiles(plan.graph)
        meaning = [Meaning(np.ones(plan.graph.tasks, bool), conflicts)] * STEPS
        touches = conflicts | conflicts.T
    else:
        meaning = [Meaning.of(plan.graph, partition) for partition in steps]
        touches = np.ones_like(meaning[0].conflicts)
    lists = Lists(plan.graph, steps or [])
    start = DynamicVM(plan, STEPS, lists.read) if plan.dynamic else QueueVM(plan, STEPS)
    wanted = np.array([m.present for m in meaning])
    seen, stack = set(), [(start, lists, np.zeros((STEPS, plan.graph.tasks), np.int8))]
    while stack:
        vm, lists, done = stack.pop()
        able = vm.able()
        if not able and (done != wanted).any():
            return "it stops before the end"
        for choice in able:
            after, now = _fork(vm, lists)
            ran = done.copy()
            wrong: list[str] = []

            def execute(
                task: int, step: int, ran: np.ndarray = ran, wrong: list[str] = wrong, now: Lists = now
            ) -> None:
                ran[step, task] += 1
                if ran[step, task] > wanted[step, task]:
                    wrong.append(f"{task} runs twice, or though its group is not there")
                    return
                missing = wanted[step] & (ran[step] == 0)
                if (meaning[step].conflicts[:, task] & missing).any():
                    wrong.append(f"{task} runs before what it must come after")
                elif step and (touches[:, task] & wanted[step - 1] & (ran[step - 1] == 0)).any():
                    wrong.append(f"{task} runs before the step before has ended")
                now.ran(task, step)

            try:
                after.advance(choice, execute)
            except IndexError:
                return "a drain hands out what is no record"
            if wrong:
                return wrong[0]
            state = _state(after, now, ran)
            if state not in seen:
                seen.add(state)
                stack.append((after, now, ran))
                if len(seen) > limit:
                    raise TooManyStates
    return None


def _fork(vm: QueueVM | DynamicVM, lists: Lists) -> tuple[QueueVM | DynamicVM, Lists]:
    shared = [vm._plan, vm._counters.plan, vm._counters.need, vm._counters.records, lists.graph, lists.steps]
    if isinstance(vm, DynamicVM):
        created = vm._created
        shared += [vm._in_every_step, created._routings, created._triggers, created._first, created._bounds]
    return copy.deepcopy((vm, lists), {id(each): each for each in shared})


def _state(vm: QueueVM | DynamicVM, lists: Lists, ran: np.ndarray) -> tuple:
    counters = (tuple(vm._counters.seen), ran.tobytes(), repr(lists.tensors))
    if isinstance(vm, DynamicVM):
        return (*counters, tuple(sorted(vm._ready)), tuple(vm._arrivals))
    return (*counters, tuple(vm._place), tuple(vm._step), tuple(vm._held), tuple(vm._tickets))
