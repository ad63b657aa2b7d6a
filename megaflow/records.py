"""The task record: 16 int32 that tell a worker all about one task. Records hold no pointers."""

from megaflow.backend import tl

RECORD_WIDTH = 16
FIELDS = ("operator", "kind", "c0", "c1", "c2", "wait0", "need0", "previous", "wait1", "need1", "notify0", "notify1",
          "task")  # fmt: skip
# previous: 1 if wait0 is for the step before. need: the event's count in one step. task: number in the task graph.
(OPERATOR, KIND, C0, C1, C2, WAIT0, NEED0, PREVIOUS, WAIT1, NEED1, NOTIFY0, NOTIFY1, TASK) = map(
    tl.constexpr, range(len(FIELDS))
)
