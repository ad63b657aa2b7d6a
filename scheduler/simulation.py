"""What a simulation found: the step's time, when each task ran and on which worker, and where the time goes."""

from dataclasses import dataclass

import numpy as np

from megaflow.plan import Plan


@dataclass(frozen=True)
class Simulation:
    """One simulated step. N tasks, numbered as in the task graph; times in seconds from the step's start.

    Attributes:
        plan: what was simulated.
        seconds: from the start of the step to the start of the next.
        worker: int64 [N], who ran each task.
        start, run, end: float64 [N], when the worker took it, had waited for its events, and had done it.
    """

    plan: Plan
    seconds: float
    worker: np.ndarray
    start: np.ndarray
    run: np.ndarray
    end: np.ndarray

    @property
    def bubble_share(self) -> float:
        """Share of all workers' time in which they neither load nor compute: they wait, or have nothing to do."""
        return 1 - float((self.end - self.run).sum()) / (self.plan.workers * self.seconds)
