"""What the traced kernel writes down of each task: when it started, waited, ran and ended, and where.

A task's stamp is STAMP_WIDTH int64. It lies at step x N + task, so every kind of plan writes to the same places and
no two tasks share one. Times are those of the GPU's global timer, in ns, read by thread 0 of the worker. The
interpreter has no such timer; there a counter goes up by one with each time that is asked for.
"""

from megaflow.backend import interpreted, jit, tl
from megaflow.lanes import word
from megaflow.records import TASK

if not interpreted():
    from triton.language.extra.cuda import globaltimer, smid

INTERPRETED = tl.constexpr(interpreted())

# start: the worker has the task. wait_start: it has prefetched. run_start: the inputs are there. end: all is written.
STAMP_FIELDS = ("start", "wait_start", "run_start", "end", "place")
STAMP_WIDTH = len(STAMP_FIELDS)
(START, WAIT_START, RUN_START, END, PLACE) = map(tl.constexpr, range(STAMP_WIDTH))
SM_SHIFT = 32  # place: the worker's number in the lower bits, its SM's above
WIDTH = tl.constexpr(STAMP_WIDTH)
SHIFT = tl.constexpr(SM_SHIFT)


@jit
def task_stamp(stamps, record, step, n_tasks):
    """Where the stamp of a record's task in `step` of the launch lies."""
    return stamps + (word(record, TASK).to(tl.int64) + step * n_tasks) * WIDTH


@jit
def clock(ticks):
    """The time, int64; `ticks` is the counter that stands for it in the interpreter."""
    if INTERPRETED:
        return tl.atomic_add(ticks, 1).to(tl.int64)
    else:
        return globaltimer()


@jit
def place():
    """The worker and its SM, int64."""
    worker = tl.program_id(0).to(tl.int64)
    if INTERPRETED:
        return worker
    else:
        return worker | (smid().to(tl.int64) << SHIFT)
