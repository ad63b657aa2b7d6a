"""What the persistent kernel does with counters: wait, notify, and the ready queue of dynamic mode.

Counters only grow: in step number `epoch` (from 1) an event is complete at need x epoch, compared modulo 2^32,
so nothing is zeroed between steps. Thread 0 of a worker polls or adds; barriers around it order the other
threads' accesses (release and acquire at GPU scope, PTX memory model).

Every wait is bounded. A wait that runs out of time writes a report and sets the abort flag; from then on no
wait waits, and the kernel runs to its end with results that nobody will read.
"""

from megaflow.backend import interpreted, jit, tl
from megaflow.lanes import word
from megaflow.records import C0, C1, C2, NEED0, NEED1, TASK, WAIT0, WAIT1
from megaflow.stamps import RUN_START, WAIT_START, clock

INTERPRETED = tl.constexpr(interpreted())

# Words of the control block (int32); those that many workers touch have a 128-byte line of their own.
CONTROL_WORDS = 256
STOP_STEP = tl.constexpr(64)  # the step count at which all sequences have finished, 0 before that
CLOSED = tl.constexpr(65)  # dynamic: no more tasks will be pushed in this launch
ABORT = tl.constexpr(96)  # the report: task + 1 (N + 1: none), worker, event (-1: the queue), seen, wanted
REPORT_WORDS = 5
EPOCH = tl.constexpr(128)  # steps completed before this launch
LEFT = tl.constexpr(160)  # workers that have left this launch
STEPS_DONE = tl.constexpr(192)  # steps of the latest launch
TICKS = tl.constexpr(224)  # interpreter: what stands for the time in traces

# A ready queue is these words and then its slots.
QUEUE_HEADER_WORDS = 64
QUEUE_HEADER = tl.constexpr(QUEUE_HEADER_WORDS)
HEAD = tl.constexpr(0)  # tasks, or tickets for tasks, taken in this launch
TAIL = tl.constexpr(32)  # tasks pushed in this launch

# $1 event, $2 wanted, $3 abort flag, $4 timeout in ns, $5 task + 1, $6 event number
_WAIT = tl.constexpr("""{
.reg .pred p;
.reg .u32 tid, old, cta;
.reg .s32 seen, gap;
.reg .u64 start, now;
mov.u32 $0, 0;
mov.u32 tid, %tid.x;
setp.ne.u32 p, tid, 0;
@p bra DONE;
ld.acquire.gpu.global.s32 seen, [$1];
sub.s32 gap, seen, $2;
setp.ge.s32 p, gap, 0;
@p bra DONE;
mov.u64 start, %globaltimer;
POLL:
ld.relaxed.gpu.global.u32 old, [$3];
ld.acquire.gpu.global.s32 seen, [$1];
sub.s32 gap, seen, $2;
setp.ge.s32 p, gap, 0;
@p bra DONE;
setp.ne.u32 p, old, 0;
@p bra DONE;
mov.u64 now, %globaltimer;
sub.u64 now, now, start;
setp.lt.u64 p, now, $4;
@p bra POLL;
atom.relaxed.gpu.global.cas.b32 old, [$3], 0, $5;
setp.ne.u32 p, old, 0;
@p bra DONE;
mov.u32 cta, %ctaid.x;
st.global.u32 [$3+4], cta;
st.global.s32 [$3+8], $6;
st.global.s32 [$3+12], seen;
st.global.s32 [$3+16], $2;
DONE:
}""")

_ADD = tl.constexpr("""{
.reg .pred p;
.reg .u32 tid;
mov.u32 $0, 0;
mov.u32 tid, %tid.x;
setp.eq.u32 p, tid, 0;
@p red.release.gpu.global.add.s32 [$1], $2;
}""")

_PREFETCH = tl.constexpr("""{
.reg .pred p;
mov.u32 $0, 0;
setp.ne.u32 p, $2, 0;
@p prefetch.global.L2 [$1];
}""")


@jit
def report(control, task, event, seen, wanted):
    """Set the abort flag and say why, unless another worker has done so."""
    if tl.atomic_cas(control + ABORT, 0, task + 1, sem="relaxed", scope="gpu") == 0:
        tl.store(control + ABORT + 1, tl.program_id(0))
        tl.store(control + ABORT + 2, event)
        tl.store(control + ABORT + 3, seen)
        tl.store(control + ABORT + 4, wanted)


@jit
def wait(events, event, wanted, control, task, timeout_ns):
    """Wait until an event's counter has reached `wanted`, then make what its notifiers wrote visible."""
    if INTERPRETED:
        # one worker: what has not happened by now never will
        seen = tl.atomic_add(events + event * 32, 0)
        if seen - wanted < 0:
            report(control, task, event, seen, wanted)
    else:
        tl.inline_asm_elementwise(
            _WAIT,
            "=r,l,r,l,l,r,r",
            [events + event * 32, wanted, control + ABORT, tl.cast(timeout_ns, tl.int64), task + 1, event],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.debug_barrier()


@jit
def await_inputs(inputs):
    """Wait for a task's events, as its body does once before it reads what other tasks wrote.

    Tasks of the ready queue have nothing to wait for. `inputs` is what the kernel passed to the body; the stamp in it
    is None where the launch is not traced.
    """
    record, epoch, dynamic, events, control, timeout_ns, stamp = inputs
    if stamp is not None:
        tl.store(stamp + WAIT_START, clock(control + TICKS))
    if dynamic == 0:
        event0 = word(record, WAIT0)
        event1 = word(record, WAIT1)
        if event0 >= 0:
            wait(events, event0, word(record, NEED0) * epoch, control, word(record, TASK), timeout_ns)
        if event1 >= 0:
            wait(events, event1, word(record, NEED1) * epoch, control, word(record, TASK), timeout_ns)
    if stamp is not None:
        tl.store(stamp + RUN_START, clock(control + TICKS))


@jit
def prefetch(pointers, mask):
    """Start to bring the 128-byte lines at `pointers` into the L2 cache; nothing is waited for."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            _PREFETCH, "=r,l,r", [pointers, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
        )


@jit
def notify(events, event):
    """Add 1 to an event; everything this worker wrote before is visible to those who wait for it."""
    tl.debug_barrier()
    if INTERPRETED:
        tl.atomic_add(events + event * 32, 1)
    else:
        tl.inline_asm_elementwise(
            _ADD, "=r,l,r", [events + event * 32, 1], dtype=tl.int32, is_pure=False, pack=1
        )


@jit
def push(triggers, first, last, wait_count, arrivals, epoch, step, n_tasks, queues, n_queues, capacity):
    """Make the tasks triggers[first:last] that have no other wait left ready for `step`, spread over the queues."""
    WIDTH: tl.constexpr = 128
    for start in range(first, last, WIDTH):
        o = start + tl.arange(0, WIDTH)
        mask = o < last
        task = tl.load(triggers + o, mask=mask, other=0)
        waits = tl.load(wait_count + task, mask=mask, other=0)
        several = mask & (waits > 1)
        arrived = tl.atomic_add(arrivals + task, 1, mask=several, sem="acq_rel", scope="gpu") + 1
        ready = mask & ((waits == 1) | (arrived == waits * epoch))
        for index in range(0, n_queues):
            queue = queues + index * (QUEUE_HEADER + capacity)
            here = ready & (o % n_queues == index)
            place = tl.cumsum(here.to(tl.int32), 0) - 1
            base = tl.atomic_add(queue + TAIL, tl.sum(here.to(tl.int32), 0), sem="relaxed", scope="gpu")
            slot = queue + QUEUE_HEADER + (base + place) % capacity
            tl.atomic_xchg(slot, step * n_tasks + task + 1, mask=here, sem="release", scope="gpu")


@jit
def take_ticket(queue, capacity):
    """Take the next ticket of a ready queue. Returns the ticket's slot, which may be filled later."""
    ticket = tl.atomic_add(queue + HEAD, 1, sem="relaxed", scope="gpu")
    return queue + QUEUE_HEADER + ticket % capacity


@jit
def steal(queues, n_queues, capacity):
    """Take a task that lies in a ready queue, the worker's own first. Returns its code, 0 if there was none."""
    code = 0
    for i in range(0, n_queues):
        if code == 0:
            queue = queues + (tl.program_id(0) + i) % n_queues * (QUEUE_HEADER + capacity)
            head = tl.atomic_add(queue + HEAD, 0, sem="relaxed", scope="gpu")
            slot = queue + QUEUE_HEADER + head % capacity
            seen = tl.atomic_add(slot, 0, sem="acquire", scope="gpu")
            if seen != 0:
                # as long as the head stays, nobody has taken what was seen
                if tl.atomic_cas(queue + HEAD, head, head + 1, sem="acq_rel", scope="gpu") == head:
                    tl.store(slot, 0)
                    code = seen
    return code


@jit
def pop(queues, n_queues, capacity, n_tasks, control, timeout_ns):
    """The next ready task and its step, or task -1 when there is none left for this worker.

    A code in a queue is step * n_tasks + task + 1; 0 is an empty slot. With one queue the n-th task pushed in a launch
    goes to the holder of ticket n, through slot n % capacity. Tickets that are out at the same time must not share a
    slot, so capacity is n_tasks plus the number of workers. With several queues a worker looks into all of them.
    """
    code = 0
    slot = queues
    if n_queues == 1:
        slot = take_ticket(queues, capacity)
    # a poll takes at least half a microsecond on a GPU; in the interpreter nobody else can push
    polls = 1 if INTERPRETED else timeout_ns // 500
    waiting = True
    while waiting:
        if n_queues == 1:
            code = tl.atomic_add(slot, 0, sem="acquire", scope="gpu")
        else:
            code = steal(queues, n_queues, capacity)
        polls -= 1
        if code != 0:
            waiting = False
        elif tl.atomic_add(control + CLOSED, 0, sem="relaxed", scope="gpu") != 0:
            waiting = False
        elif tl.atomic_add(control + ABORT, 0, sem="relaxed", scope="gpu") != 0:
            waiting = False
        elif polls <= 0:
            report(control, n_tasks, -1, 0, 0)
            waiting = False
    if n_queues == 1:
        tl.store(slot, 0)
    task = tl.where(code == 0, -1, (code - 1) % n_tasks)
    return task, (code - 1) // n_tasks


@jit
def drain(tickets, record, epoch):
    """Take a tile from a drain. Returns the tile's record number, -1 if all have been taken in this step.

    Every worker that meets the drain takes one ticket too many, so a step hands out as many tickets as its last event
    makes sure of, and the next step's begin where they end.
    """
    used = word(record, NEED0) * (epoch - 1)
    ticket = tl.atomic_add(tickets + word(record, C2) * 32, 1, sem="relaxed", scope="gpu") - used
    return tl.where(ticket < word(record, C1), word(record, C0) + ticket, -1)
