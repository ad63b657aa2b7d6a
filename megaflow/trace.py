"""A trace: what was recorded of some launches, as times by operator and as a file for Perfetto."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megaflow.backend import interpreted
from megaflow.errors import InputError
from megaflow.perfetto import write_events
from megaflow.plan import Plan
from megaflow.tracedlaunch import PHASES, TracedLaunch, kind_of


@dataclass(frozen=True)
class OperatorTime:
    """What one operator, in all its layers, took in a step: the average of the traced steps. Times are in Trace.unit.

    Attributes:
        name: of the operator, without its layer. tiles: its tasks in a step that ran, the mean of the steps.
        time: the workers' time for its tasks, from the end of the task before, divided by the number of workers.
        take, prepare, wait, run: what share of `time` went into each phase; together 1.
        active: from its first run_start to its last end, the layers' added up; other operators may overlap with it.
        bytes: what its tiles read from device memory; what several tiles read counts for each of them.
        at_most: whether that depends on data, such as lengths, and `bytes` and `bandwidth` are upper bounds.
        bandwidth: bytes / active, in bytes a second; None in the interpreter.
    """

    name: str
    tiles: int
    time: float
    take: float
    prepare: float
    wait: float
    run: float
    active: float
    bytes: int
    at_most: bool
    bandwidth: float | None


class Trace:
    """What launches left behind, in the order they ran. MegaModel.trace makes one.

    Attributes:
        unit: of times in tables and files: "us", in the interpreter "ticks", of which each plan has its own.
        launches: what was recorded.
    """

    def __init__(self) -> None:
        self.unit = "ticks" if interpreted() else "us"
        self.launches: list[TracedLaunch] = []
        self._scale = 1 if interpreted() else 1000

    def add(self, plan: Plan, stamps: np.ndarray) -> None:
        """Append a launch: int64 [S, N, STAMP_WIDTH], as the kernel wrote them; they are not copied."""
        self.launches.append(TracedLaunch.of(plan, stamps))

    @property
    def steps(self) -> int:
        return sum(launch.steps for launch in self.launches)

    @property
    def step_time(self) -> float:
        """Time of a step, from the first start of a launch to its last end, over its steps.

        Raises:
            InputError: nothing was traced.
        """
        self._require_launches()
        return sum(int(launch.end.max() - launch.start.min()) for launch in self.launches) / self._scale / self.steps

    def by_operator(self) -> list[OperatorTime]:
        """A row for each operator, layers and parts of the batch folded together, in program order.

        Raises:
            InputError: nothing was traced.
        """
        self._require_launches()
        sums: dict[str, dict[str, float]] = {}
        irregular = set()
        for launch in self.launches:
            graph = launch.plan.graph
            by_task = {name: length.sum(0) / launch.plan.workers for name, length in launch.phases().items()}
            found = {name: np.bincount(graph.operator, length) for name, length in by_task.items()}
            found["active"] = launch.active().sum(0)
            tiles = np.bincount(graph.operator, launch.ran.sum(0))
            for i, op in enumerate(graph.operators):
                row = sums.setdefault(kind_of(op), defaultdict(float))
                row["tiles"] += tiles[i]
                row["bytes"] += tiles[i] * op.tile_bytes
                for name, values in found.items():
                    row[name] += float(values[i]) / self._scale
                if op.irregular:
                    irregular.add(kind_of(op))
        return [self._row(name, row, name in irregular) for name, row in sums.items()]

    def _row(self, name: str, sums: dict[str, float], at_most: bool) -> OperatorTime:
        time = sum(sums[phase] for phase in PHASES)
        return OperatorTime(
            name,
            tiles=round(sums["tiles"] / self.steps),
            time=time / self.steps,
            **{phase: sums[phase] / time if time else 0.0 for phase in PHASES},
            active=sums["active"] / self.steps,
            bytes=round(sums["bytes"] / self.steps),
            at_most=at_most,
            bandwidth=sums["bytes"] / sums["active"] * 1e6 if self.unit == "us" and sums["active"] else None,
        )

    def write(self, path: str | Path) -> None:
        """Write a file for ui.perfetto.dev or chrome://tracing, with a track for each worker (megaflow.perfetto)."""
        write_events(path, self.launches, self._scale)

    def _require_launches(self) -> None:
        if not self.launches:
            raise InputError("no step was traced; inside the block call decode, or generate two new tokens or more")
