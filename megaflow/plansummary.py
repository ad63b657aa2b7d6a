"""What the command plan prints: how a decode step is cut, what waits for what, and how even the workers' loads are."""

import time
from dataclasses import dataclass

import numpy as np
import typer

from megaflow.events import NONE
from megaflow.plan import Plan
from megaflow.taskgraph import TaskGraph


@dataclass(frozen=True)
class Wait:
    """An event tensor that an operator's tiles wait for: producers, shape, the notifies that events need."""

    producers: str
    events: tuple[int, ...]
    least_need: int
    most_need: int

    def __str__(self) -> str:
        shape = "x".join(map(str, self.events)) or "1"
        most = f"-{self.most_need}" if self.most_need > self.least_need else ""
        return f"{self.producers} {shape} need {self.least_need}{most}"


@dataclass(frozen=True)
class OperatorLine:
    """One operator of a plan. `bytes` is what all its tiles together read from device memory."""

    name: str
    grid: tuple[int, ...]
    tiles: int
    bytes: int
    waits: tuple[Wait, ...]


@dataclass(frozen=True)
class Range:
    """Least, mean and most of something that each worker has."""

    least: int
    mean: float
    most: int

    @staticmethod
    def of(values: np.ndarray) -> "Range":
        return Range(int(values.min()), float(values.mean()), int(values.max()))

    def __str__(self) -> str:
        return f"min {self.least:,}  mean {self.mean:,.1f}  max {self.most:,}"


@dataclass(frozen=True)
class PlanSummary:
    """What `plan` prints.

    Attributes:
        lines: the operators outside layers and those of layer 0.
        layers: number of layers, all of which are cut alike.
        next_layer: the first operator of layer 1, which waits for layer 0; None if there is one layer.
        operators, tasks, events, edges: how many there are in all.
        waits, waits_left: waits of all tasks, and those that the schedule did not drop.
        queue_length, worker_bytes: by worker, tasks and bytes; None if dynamic: decided at run time.
        conflicts: pairs of tiles that touch the same elements, whose order was proved.
        planning_ms, verifying_ms: time that making the plan and the proof took, in ms.
    """

    lines: tuple[OperatorLine, ...]
    layers: int
    next_layer: OperatorLine | None
    operators: int
    tasks: int
    events: int
    edges: int
    waits: int
    waits_left: int
    queue_length: Range | None
    worker_bytes: Range | None
    conflicts: int
    planning_ms: float
    verifying_ms: float


def operator_line(graph: TaskGraph, number: int) -> OperatorLine:
    """The line of one operator."""
    op = graph.operators[number]
    events = np.unique(graph.waits[graph.operator == number])
    waits = []
    for tensor in graph.event_tensors:
        need = graph.event_need[events[(tensor.first <= events) & (events < tensor.first + tensor.size)]]
        if len(need):
            producers = "+".join(graph.operators[p].name for p in tensor.producers)
            waits.append(Wait(producers, tensor.shape, int(need.min()), int(need.max())))
    return OperatorLine(op.name, op.grid, op.tiles, op.tiles * op.tile_bytes, tuple(waits))


def summarise(plan: Plan, layers: int, planning_ms: float) -> PlanSummary:
    """The summary of a plan for a model of `layers` layers. Raises VerificationError if the plan is not right."""
    graph = plan.graph
    start = time.perf_counter()
    verdict = plan.verify()
    verifying_ms = 1e3 * (time.perf_counter() - start)
    names = [op.name for op in graph.operators]
    layered = [i for i, name in enumerate(names) if name.startswith("layers.")]
    later = [i for i in layered if not names[i].startswith("layers.0.")]
    queue_length = worker_bytes = None
    if not plan.dynamic:
        tasks = np.diff(plan.queue_offsets)
        worker = np.repeat(np.arange(plan.workers), tasks)
        queued = np.where(plan.is_task, graph.task_bytes()[plan.column("task")], 0)[: len(worker)]
        loads = np.bincount(worker, queued, plan.workers).astype(np.int64)
        queue_length, worker_bytes = Range.of(tasks), Range.of(loads)
    return PlanSummary(
        lines=tuple(operator_line(graph, i) for i in range(len(names)) if i not in later),
        layers=layers,
        next_layer=operator_line(graph, later[0]) if later else None,
        operators=len(names),
        tasks=graph.tasks,
        events=len(graph.event_need),
        edges=len(graph.edges),
        waits=int((graph.waits != NONE).sum()),
        waits_left=sum(int((plan.column(column) != NONE).sum()) for column in ("wait0", "wait1")),
        queue_length=queue_length,
        worker_bytes=worker_bytes,
        conflicts=verdict.conflicts,
        planning_ms=planning_ms,
        verifying_ms=verifying_ms,
    )


def print_summary(summary: PlanSummary) -> None:
    """Print a summary as a table and totals."""
    rows = [("operator", "grid", "tiles", "bytes read", "waits for: operator, events, notifies for each")]
    for line in summary.lines:
        grid = "x".join(map(str, line.grid))
        rows.append((line.name, grid, f"{line.tiles:,}", f"{line.bytes:,}", ", ".join(map(str, line.waits))))
    last_of_layer = max(i for i, row in enumerate(rows) if row[0].startswith("layers."))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for i, row in enumerate(rows):
        name, grid, tiles, size, waits = (
            cell.rjust(width) if column in (2, 3) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        typer.echo(f"{name}  {grid}  {tiles}  {size}  {waits}".rstrip())
        if i == last_of_layer and summary.next_layer is not None:
            layers = "layer 1" if summary.layers == 2 else f"layers 1-{summary.layers - 1}"
            first = summary.next_layer
            typer.echo(f"{layers}: as layer 0; {first.name} waits for {', '.join(map(str, first.waits))}")
    run_time = "decided at run time"
    typer.echo(
        f"\n{summary.operators:,} operators, {summary.tasks:,} tasks, {summary.events:,} events, "
        f"{summary.edges:,} edges\n"
        f"waits: {summary.waits_left:,} of {summary.waits:,} left after pruning\n"
        f"queue length: {summary.queue_length or run_time}\n"
        f"bytes per worker: {summary.worker_bytes or run_time}\n"
        f"planning time: {summary.planning_ms:.0f} ms\n"
        f"proved in {summary.verifying_ms:.0f} ms: each task runs once a step, "
        f"{summary.conflicts:,} pairs of tiles that touch the same elements are in order, the step ends"
    )
