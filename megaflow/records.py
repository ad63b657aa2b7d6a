"""The task record: 16 int32 that tell a worker all about one task. Records hold no pointers.

A record of kind DRAIN is no task: a worker that meets it in its queue takes tiles of an operator for as long as there
are any, in turns with all other workers that have met one. c0 is then the first of the operator's records, c1 their
number, c2 the drain's number, need0 how often its counter is added to in a step, wait0 NONE.

A task that is created at run time may notify by item (megaflow.events): for each item of its group, which c0 names, the
event of the item's class, which is the item's number divided by `spread`. Notify i then names the event of class 0, and
stride i says how many events on that of the next class is.
"""

from megaflow.backend import tl

RECORD_WIDTH = 16
FIELDS = ("operator", "kind", "c0", "c1", "c2", "wait0", "need0", "wait1", "need1", "notify0", "notify1",
          "task", "spread", "classes", "stride0", "stride1")  # fmt: skip
# need: the event's count in one step. task: number in the task graph. spread: 0 where no notify is by item; then the
# last two are 0, too, else they are PLAIN where a notify is not. classes: number of classes of items.
(OPERATOR, KIND, C0, C1, C2, WAIT0, NEED0, WAIT1, NEED1, NOTIFY0, NOTIFY1,
 TASK, SPREAD, CLASSES, STRIDE0, STRIDE1) = map(tl.constexpr, range(len(FIELDS)))  # fmt: skip
PLAIN = -1
UNBOUNDED, OF_GROUP = -1, -2  # sorts of events: plan.Plan.bounds
MOST_ITEM_CLASSES = 128  # a task counts its items in the threads' registers
DRAIN = -1
NOTHING = -2  # a task whose body is left out; it waits all the same, since later waits may have been dropped for it
