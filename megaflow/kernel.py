"""The persistent kernel: one resident program per worker, from the first task of a launch to the last.

Workers take tasks from their own queues, in which drains may stand for tiles that go to whoever comes first; a task's
body waits for its events when it needs what they stand for, so that it can fetch what does not depend on them before
(device.await_inputs). Record and row of the queue's next task are loaded meanwhile (megaflow.lanes). In dynamic mode
workers take ready tasks from queues on the device; the worker whose notify completes an event pushes the tasks that
waited for it. The source is one, but each is compiled by itself: what the other one needs would cost registers. What
tasks compute comes in as a constexpr tuple of bodies. A traced launch passes an array for the tasks' stamps
(megaflow.stamps); without one, None is a constexpr, and nothing of tracing is compiled. Likewise the bounds of a plan
that creates tasks at run time (plan.Plan.bounds).
"""

from collections.abc import Sequence
from typing import Any

from megaflow.backend import interpreted, jit, tl, triton
from megaflow.device import (
    ABORT,
    CLOSED,
    EPOCH,
    HEAD,
    LEFT,
    QUEUE_HEADER,
    STEPS_DONE,
    STOP_STEP,
    TAIL,
    TICKS,
    await_inputs,
    drain,
    notify,
    pop,
    push,
    wait,
)
from megaflow.kinds import ROUTING_FIELDS
from megaflow.lanes import RECORD, ROW, hold_record, hold_row, word
from megaflow.records import (
    C0,
    C1,
    C2,
    CLASSES,
    DRAIN,
    KIND,
    MOST_ITEM_CLASSES,
    NOTHING,
    NOTIFY0,
    NOTIFY1,
    OF_GROUP,
    OPERATOR,
    PLAIN,
    SPREAD,
    STRIDE0,
)
from megaflow.stamps import END, PLACE, START, clock, place, task_stamp

DRAIN_KIND = tl.constexpr(DRAIN)
NOTHING_KIND = tl.constexpr(NOTHING)
PLAIN_NOTIFY = tl.constexpr(PLAIN)
OF_GROUP_EVENT = tl.constexpr(OF_GROUP)
ROUTING_LISTS = tl.constexpr(ROUTING_FIELDS)
LANES = tl.constexpr(MOST_ITEM_CLASSES)
ITEMS = tl.constexpr(8)  # looked at at a time


def fingerprint(bodies: Sequence[Any]) -> str:
    """What the compiled kernel depends on besides its own source: the sources of the task bodies."""
    return "" if interpreted() else "-".join(body.cache_key for body in bodies)


@jit
def signal(
    event, times, step, steps, final_event, events, event_need, triggers_of, triggers, wait_count, arrivals, epoch,
    n_tasks, queues, n_queues, capacity, control, bounds, table,
):  # fmt: skip
    """Notify `times` times in dynamic mode: the worker that completes the event pushes what waited for it.

    The final event starts the next step; that of the launch's last step pushes nothing and closes the queues.
    """
    seen = tl.atomic_add(events + event * 32, times, sem="acq_rel", scope="gpu") + times
    wanted = tl.load(event_need + event) * epoch
    if bounds is not None:
        sort = tl.load(bounds + event * 3)
        wanted = tl.where(sort == OF_GROUP_EVENT, tl.load(event_need + event), wanted)
    if seen == wanted:
        stop = tl.load(control + STOP_STEP, volatile=True)
        if (event == final_event) & ((step + 1 == steps) | (stop != 0)):
            tl.atomic_xchg(control + CLOSED, 1, sem="release", scope="gpu")
        else:
            begin = tl.load(triggers_of + event)
            end = tl.load(triggers_of + event + 1)
            if bounds is not None:
                if sort == OF_GROUP_EVENT:
                    tl.atomic_xchg(events + event * 32, 0, sem="relaxed", scope="gpu")
                if sort >= 0:
                    # an atomic is done by one thread for all: after an abort the lists may change
                    count = tl.atomic_add(routing_list(table + sort * ROW, 0), 0, sem="relaxed", scope="gpu")
                    bounded = tl.load(bounds + event * 3 + 1) + count * tl.load(bounds + event * 3 + 2)
                    end = tl.minimum(begin + bounded, end)
            released = step + (event == final_event).to(tl.int32)
            push(triggers, begin, end, wait_count, arrivals, epoch, released, n_tasks, queues, n_queues, capacity)


@jit
def routing_list(row, index: tl.constexpr):
    """The pointer to a routing's count, indptr or items, by its index among them."""
    return tl.load(row + ROW - ROUTING_LISTS + index).to(tl.pointer_type(tl.int32))


@jit
def items_by_class(record, row):
    """int32 [LANES]: how many of the items of a task's group lie in each class.

    A loop depends on it, so all threads need the same bounds, but after an abort the lists may change while they are
    read: what thread 0 has seen goes to all.
    """
    spread = tl.load(record + SPREAD)
    classes = tl.load(record + CLASSES)
    bound = routing_list(row, 1) + tl.load(record + C0)
    items = routing_list(row, 2)
    lane = tl.arange(0, LANES)
    packed = (tl.load(bound + 1).to(tl.int64) << 32) | tl.load(bound).to(tl.int64)
    packed = tl.sum(tl.where(lane == 0, packed, 0), 0)
    begin = tl.maximum((packed & 0xFFFFFFFF).to(tl.int32), 0)
    end = tl.minimum((packed >> 32).to(tl.int32), spread * classes)
    # in one class are all: nothing is looked up
    counts = tl.where((lane == 0) & (classes == 1), end - begin, 0)
    for first in range(begin, tl.where(classes == 1, begin, end), ITEMS):
        o = first + tl.arange(0, ITEMS)
        item = tl.load(items + o, mask=o < end, other=0)
        number = tl.where(o < end, item // spread, -1)
        counts += tl.sum((number[:, None] == lane[None, :]).to(tl.int32), 0)
    return counts


@jit
def stopped(events, event_need, final_event, step, control, n_tasks, timeout_ns):
    """Whether all sequences have finished before `step`; waits for the step before to end."""
    wanted = tl.load(event_need + final_event) * (tl.load(control + EPOCH) + step)
    wait(events, final_event, wanted, control, n_tasks, timeout_ns)
    stop = tl.load(control + STOP_STEP, volatile=True)
    # an atomic is done by one thread for all: warps that saw different flags would part for good
    abort = tl.atomic_add(control + ABORT, 0, sem="relaxed", scope="gpu")
    return ((stop != 0) & (step >= stop)) | (abort != 0)


@triton.jit(do_not_specialize=["n_tasks", "n_initial", "final_event", "steps", "n_queues", "timeout_ns"])
def megakernel(
    records,  # int32 [N + drains, RECORD_WIDTH]
    queue_offsets,  # int32 [workers + 1], static: worker w runs records[queue_offsets[w] : queue_offsets[w + 1]]
    table,  # int64 [operators, ROW]
    events,  # int32 [E, 32], the counter in column 0
    event_need,  # int32 [E]
    triggers_of,  # int32 [E + 1], dynamic: event e releases triggers[triggers_of[e] : triggers_of[e + 1]]
    triggers,  # int32, task numbers
    wait_count,  # int32 [N]
    arrivals,  # int32 [N]
    initial,  # int32 [n_initial], tasks that are ready at a launch's start
    queues,  # int32 [n_queues, header + N + workers], the ready queues, the initial tasks in them
    tickets,  # int32 [drains, 32], tiles taken from each drain, in column 0
    control,  # int32 [CONTROL_WORDS]
    stamps,  # int64 [steps, N, STAMP_WIDTH], or None: not traced
    bounds,  # int32 [E, 3], or None: no tasks are created at run time
    n_tasks,
    n_initial,
    final_event,
    steps,
    n_queues,
    timeout_ns,
    DYNAMIC: tl.constexpr,  # whether tasks come from the ready queues
    BODIES: tl.constexpr,
    CONFIG: tl.constexpr,
    FINGERPRINT: tl.constexpr,  # of the bodies: Triton's cache knows constexpr functions by name only
):
    worker = tl.program_id(0)
    capacity = n_tasks + tl.num_programs(0)
    first_epoch = tl.load(control + EPOCH) + 1
    step = 0
    if DYNAMIC:
        task, step = pop(queues, n_queues, capacity, n_tasks, control, timeout_ns)
    else:
        task = tl.load(queue_offsets + worker)
        queue_end = tl.load(queue_offsets + worker + 1)
        task = tl.where(task < queue_end, task, -1)
        following = hold_record(records, task + 1)
    record = hold_record(records, tl.maximum(task, 0))
    row = hold_row(table, word(record, OPERATOR))

    while task >= 0:
        epoch = first_epoch + step
        drained = -1
        if not DYNAMIC:
            # on their way while this task runs; past the queue's end they are of no use
            next_row = hold_row(table, word(following, OPERATOR))
            beyond = hold_record(records, task + 2)
            if word(record, KIND) == DRAIN_KIND:
                drained = drain(tickets, record, epoch)
                if drained >= 0:
                    record = hold_record(records, drained)
        kind = word(record, KIND)
        stamp: tl.constexpr = None  # as a variable it could not go into the tuple
        if stamps is not None:
            stamp = task_stamp(stamps, record, step, n_tasks)
            if kind != DRAIN_KIND:
                tl.store(stamp + START, clock(control + TICKS))
                tl.store(stamp + PLACE, place())
        inputs = (record, epoch, DYNAMIC, events, control, timeout_ns, stamp)
        for index in tl.static_range(len(BODIES)):
            if kind == index:
                BODIES[index](row, word(record, C0), word(record, C1), word(record, C2), step, inputs, CONFIG)
        if kind == NOTHING_KIND:
            await_inputs(inputs)
        if stamps is not None:
            tl.debug_barrier()  # all threads have written their results
            if kind != DRAIN_KIND:
                tl.store(task_stamp(stamps, record, step, n_tasks) + END, clock(control + TICKS))

        if DYNAMIC:
            if bounds is None:
                tl.debug_barrier()
                if word(record, NOTIFY0) >= 0:
                    signal(word(record, NOTIFY0), 1, step, steps, final_event, events, event_need, triggers_of,
                           triggers, wait_count, arrivals, epoch, n_tasks, queues, n_queues, capacity, control,
                           None, table)  # fmt: skip
                if word(record, NOTIFY1) >= 0:
                    signal(word(record, NOTIFY1), 1, step, steps, final_event, events, event_need, triggers_of,
                           triggers, wait_count, arrivals, epoch, n_tasks, queues, n_queues, capacity, control,
                           None, table)  # fmt: skip
            else:
                # who is told of a result may let the lists be overwritten, so they are read before
                counts = tl.full([LANES], 1, tl.int32)
                own = records + task * RECORD
                if tl.load(own + SPREAD) > 0:
                    counts = items_by_class(own, table + tl.load(own + OPERATOR) * ROW)
                tl.debug_barrier()
                for column in range(0, 2):
                    event = tl.load(own + NOTIFY0 + column)
                    stride = tl.load(own + STRIDE0 + column)
                    by_item = (tl.load(own + SPREAD) > 0) & (stride != PLAIN_NOTIFY)
                    last = tl.where(by_item, tl.load(own + CLASSES), 1)
                    for number in range(0, tl.where(event >= 0, last, 0)):
                        times = tl.sum(tl.where(tl.arange(0, LANES) == number, counts, 0), 0)
                        times = tl.where(by_item, times, 1)
                        if times > 0:
                            signal(event + number * stride, times, step, steps, final_event, events, event_need,
                                   triggers_of, triggers, wait_count, arrivals, epoch, n_tasks, queues, n_queues,
                                   capacity, control, bounds, table)  # fmt: skip
            task, step = pop(queues, n_queues, capacity, n_tasks, control, timeout_ns)
            record = hold_record(records, tl.maximum(task, 0))
            row = hold_row(table, word(record, OPERATOR))
        else:
            if word(record, NOTIFY0) >= 0:
                notify(events, word(record, NOTIFY0))
            if word(record, NOTIFY1) >= 0:
                notify(events, word(record, NOTIFY1))
            if drained >= 0:
                record = hold_record(records, task)
            elif task + 1 < queue_end:
                task += 1
                record = following
                row = next_row
                following = beyond
            else:
                task = tl.load(queue_offsets + worker)
                record = hold_record(records, task)
                row = hold_row(table, word(record, OPERATOR))
                following = hold_record(records, task + 1)
                step += 1
                if step == steps:
                    task = -1
                elif stopped(events, event_need, final_event, step, control, n_tasks, timeout_ns):
                    task = -1

    # the last worker to leave prepares the next launch
    tl.debug_barrier()
    if tl.atomic_add(control + LEFT, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        stop = tl.load(control + STOP_STEP, volatile=True)
        done = tl.where(stop != 0, stop, steps)
        tl.store(control + STEPS_DONE, done)
        epoch = tl.load(control + EPOCH) + done
        tl.debug_barrier()  # all threads have read it
        tl.store(control + EPOCH, epoch)
        tl.store(control + CLOSED, 0)
        tl.store(control + STOP_STEP, 0)
        tl.store(control + LEFT, 0)
        if DYNAMIC:
            for index in range(0, n_queues):
                tl.store(queues + index * (QUEUE_HEADER + capacity) + HEAD, 0)
                tl.store(queues + index * (QUEUE_HEADER + capacity) + TAIL, 0)
            tl.debug_barrier()
            push(initial, 0, n_initial, wait_count, arrivals, epoch, 0, n_tasks, queues, n_queues, capacity)
