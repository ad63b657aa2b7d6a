"""What the stamps of one launch say: when and where each task ran.

A worker's time is cut at its tasks' stamps: from the end of its task before it notifies and takes the next one
("take"), reads the task's row and prefetches ("prepare"), waits for the task's inputs ("wait") and computes ("run").
"""

from dataclasses import dataclass

import numpy as np

from megaflow.plan import Plan
from megaflow.regions import TiledOperator
from megaflow.stamps import SM_SHIFT, STAMP_FIELDS

PHASES = ("take", "prepare", "wait", "run")
NOWHERE = -1


@dataclass(frozen=True)
class TracedLaunch:
    """One launch of S steps of a plan with N tasks. All arrays are int64 [S, N].

    Attributes:
        start: when the worker had taken the task; wait_start: when it began to wait for the inputs; run_start: when
            they were there; end: when all was written. In ns of the GPU's global timer, in the interpreter in ticks.
        worker, sm: where the task ran. A task that was not created at run time has worker -1, and all its times are
            those of the launch's first start.
    """

    plan: Plan
    start: np.ndarray
    wait_start: np.ndarray
    run_start: np.ndarray
    end: np.ndarray
    worker: np.ndarray
    sm: np.ndarray

    @staticmethod
    def of(plan: Plan, stamps: np.ndarray) -> "TracedLaunch":
        """From the kernel's stamps, int64 [S, N, STAMP_WIDTH]."""
        field = {name: stamps[..., i] for i, name in enumerate(STAMP_FIELDS)}
        place = field.pop("place")
        ran = field["end"] > 0
        first = field["start"][ran].min()
        times = {name: np.where(ran, time, first) for name, time in field.items()}
        return TracedLaunch(
            plan, **times, worker=np.where(ran, place & (1 << SM_SHIFT) - 1, NOWHERE), sm=place >> SM_SHIFT
        )

    @property
    def ran(self) -> np.ndarray:
        """Which tasks ran, bool [S, N]."""
        return self.worker != NOWHERE

    @property
    def steps(self) -> int:
        return len(self.start)

    def phases(self) -> dict[str, np.ndarray]:
        """The length of each of PHASES of each task, int64 [S, N]."""
        return {
            "take": self.start - self.free_since(),
            "prepare": self.wait_start - self.start,
            "wait": self.run_start - self.wait_start,
            "run": self.end - self.run_start,
        }

    def free_since(self) -> np.ndarray:
        """When the worker's task before each task ended, int64 [S, N]; for its first the first start of the launch."""
        worker, start, end = (array.reshape(-1) for array in (self.worker, self.start, self.end))
        order = np.lexsort((end, start, worker))
        free = np.full(len(order), start.min())
        followed = worker[order[1:]] == worker[order[:-1]]
        free[order[1:][followed]] = end[order[:-1][followed]]
        return free.reshape(self.start.shape)

    def active(self) -> np.ndarray:
        """int64 [S, operators]: from the first run_start of an operator's tasks to their last end."""
        first = self.plan.graph.first_task[:-1]
        ended = np.maximum.reduceat(self.end, first, 1)
        began = np.minimum.reduceat(np.where(self.ran, self.run_start, self.end.max()), first, 1)
        return ended - np.minimum(began, ended)


def kind_of(op: TiledOperator) -> str:
    """An operator's name without its layer and its part of the batch: layers.3.qkv[0:4] is a qkv."""
    return (op.source or op.name).rpartition(".")[2]
