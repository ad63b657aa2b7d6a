"""The task record: 16 int32 that tell a worker all about one task. Records hold no pointers.

A record of kind DRAIN is no task: a worker that meets it in its queue takes tiles of an operator for as long as there
are any, in turns with all other workers that have met one. c0 is then the first of the operator's records, c1 their
number, c2 the drain's number, need0 how often its counter is added to in a step, wait0 NONE.
"""

from megaflow.backend import tl

RECORD_WIDTH = 16
FIELDS = ("operator", "kind", "c0", "c1", "c2", "wait0", "need0", "wait1", "need1", "notify0", "notify1",
          "task")  # fmt: skip
# need: the event's count in one step. task: number in the task graph.
(OPERATOR, KIND, C0, C1, C2, WAIT0, NEED0, WAIT1, NEED1, NOTIFY0, NOTIFY1, TASK) = map(
    tl.constexpr, range(len(FIELDS))
)
DRAIN = -1
NOTHING = -2  # a task whose body is left out; it waits all the same, since later waits may have been dropped for it
