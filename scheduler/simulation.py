"""What a simulation found: the step's time, when each task ran and on which worker, and where the time goes."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import typer

from megaflow.plan import Plan
from megaflow.regions import LAYER


@dataclass(frozen=True)
class Slice:
    """A task on a worker's timeline: taken at `start`, its events complete at `run`, done at `end`, in seconds."""

    operator: str
    tile: tuple[int, ...]
    start: float
    run: float
    end: float


@dataclass(frozen=True)
class OperatorTime:
    """Where time goes by operator.

    Attributes:
        operators: how many are taken together; tiles: of all of them.
        seconds: from the end of the operator that ended before to the end of this one. These add up to the time at
            which the last one ends.
        busy_s, waiting_s: worker-seconds in which tiles load and compute, and in which they wait for their events.
    """

    name: str
    operators: int
    tiles: int
    seconds: float
    busy_s: float
    waiting_s: float


@dataclass(frozen=True)
class Simulation:
    """One simulated step. N tasks, numbered as in the task graph; times in seconds from the step's start.

    Attributes:
        plan: what was simulated.
        seconds: from the start of the step to the start of the next.
        worker: int64 [N], who ran each task, -1 for those that are not created at run time.
        start, run, end: float64 [N], when the worker took it, had waited for its events, and had done it; 0 for those.
    """

    plan: Plan
    seconds: float
    worker: np.ndarray
    start: np.ndarray
    run: np.ndarray
    end: np.ndarray

    @property
    def bubble_share(self) -> float:
        """Share of all workers' time outside tasks or in tasks that wait: in which they neither load for a task that
        can go on nor compute."""
        return 1 - float((self.end - self.run).sum()) / (self.plan.workers * self.seconds)

    def timeline(self, worker: int) -> list[Slice]:
        """What a worker did, in order."""
        graph = self.plan.graph
        tasks = np.flatnonzero(self.worker == worker)
        return [
            Slice(
                graph.operators[graph.operator[task]].name,
                tuple(graph.coordinates[task].tolist()),
                float(self.start[task]),
                float(self.run[task]),
                float(self.end[task]),
            )
            for task in tasks[np.argsort(self.start[tasks], kind="stable")]
        ]

    def operator_times(self) -> list[OperatorTime]:
        """One for each operator, in program order."""
        graph = self.plan.graph
        count = len(graph.operators)
        done = np.zeros(count)
        np.maximum.at(done, graph.operator, self.end)
        order = np.argsort(done, kind="stable")
        seconds = np.empty(count)
        seconds[order] = np.diff(done[order], prepend=0.0)
        busy = np.bincount(graph.operator, self.end - self.run, count)
        waiting = np.bincount(graph.operator, self.run - self.start, count)
        return [
            OperatorTime(op.name, 1, op.tiles, float(seconds[i]), float(busy[i]), float(waiting[i]))
            for i, op in enumerate(graph.operators)
        ]


def folded(times: Iterable[OperatorTime]) -> list[OperatorTime]:
    """The same operator of all layers taken together."""
    found: dict[str, OperatorTime] = {}
    for time in times:
        name = LAYER.sub("layers.*.", time.name)
        known = found.get(name, OperatorTime(name, 0, 0, 0.0, 0.0, 0.0))
        found[name] = replace(
            known,
            operators=known.operators + time.operators,
            tiles=known.tiles + time.tiles,
            seconds=known.seconds + time.seconds,
            busy_s=known.busy_s + time.busy_s,
            waiting_s=known.waiting_s + time.waiting_s,
        )
    return list(found.values())


@dataclass(frozen=True)
class SimulationSummary:
    """What the command simulate prints.

    Attributes:
        step_ms: predicted time of a step; bubble_share: as in Simulation.
        operators: in program order, those of all layers taken together.
        between_steps_ms: the part of step_ms after the last operator.
    """

    step_ms: float
    bubble_share: float
    workers: int
    tasks: int
    operators: tuple[OperatorTime, ...]
    between_steps_ms: float


def summarise(simulation: Simulation) -> SimulationSummary:
    """The summary of a simulated step."""
    return SimulationSummary(
        step_ms=1e3 * simulation.seconds,
        bubble_share=simulation.bubble_share,
        workers=simulation.plan.workers,
        tasks=simulation.plan.graph.tasks,
        operators=tuple(folded(simulation.operator_times())),
        between_steps_ms=1e3 * (simulation.seconds - float(simulation.end.max())),
    )


def print_simulation(summary: SimulationSummary) -> None:
    """Print a summary as a table and totals."""
    typer.echo(f"{'operator':<24} {'tiles':>8} {'ms':>8} {'of step':>8} {'us a tile':>10} {'us waiting':>11}")
    for op in summary.operators:
        share = 1e3 * op.seconds / summary.step_ms
        busy, waiting = (1e6 * total / op.tiles for total in (op.busy_s, op.waiting_s))
        name = op.name + f" x{op.operators}" * (op.operators > 1)
        typer.echo(f"{name:<24} {op.tiles:>8,} {1e3 * op.seconds:>8.3f} {share:>8.1%} {busy:>10.2f} {waiting:>11.2f}")
    typer.echo(
        f"\npredicted step: {summary.step_ms:.3f} ms, {summary.between_steps_ms:.3f} of it between steps\n"
        f"bubble: {summary.bubble_share:.1%} of the time of {summary.workers} workers, {summary.tasks:,} tasks"
    )
