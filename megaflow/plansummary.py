"""What the command plan prints: how a decode step is cut, what waits for what, and how even the workers' loads are."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import typer

from megaflow.events import NONE
from megaflow.plan import Plan
from megaflow.regions import LAYER, TiledOperator
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
    """One operator of a plan. `bytes` is what all its tiles together read; of experts, as many as are likely active."""

    name: str
    grid: tuple[int, ...]
    tiles: int
    bytes: int
    waits: tuple[Wait, ...]


@dataclass(frozen=True)
class CoarseWait:
    """An operator that waits for all tiles of another, though each of its tiles needs some: which, a partition says."""

    consumer: str
    producer: str

    def __str__(self) -> str:
        which = "which of its tiles a tile needs is known on the device only"
        return f"{self.consumer} waits for all of {self.producer}: {which}"


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
        lines: the operators outside layers and those of the first layer of each sort.
        layers: number of layers.
        alike: the layers of each sort, which are cut alike.
        next_layer: the first operator of the first layer that is not in `lines`; None if all are.
        operators, tasks, events, edges: how many there are in all.
        coarse: those waits of the operators in `lines` for which more ends than is needed.
        created: which operators in `lines` have tasks that are created at run time.
        waits, waits_left: waits of all tasks, and those that the schedule did not drop.
        queue_length, worker_bytes: by worker, tasks and bytes; None if dynamic: decided at run time.
        conflicts: pairs of tiles that touch the same elements, whose order was proved.
        planning_ms, verifying_ms: time that making the plan and the proof took, in ms.
    """

    lines: tuple[OperatorLine, ...]
    layers: int
    alike: tuple[tuple[int, ...], ...]
    next_layer: OperatorLine | None
    coarse: tuple[CoarseWait, ...]
    created: tuple[str, ...]
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
    full = op.tiles if op.expected is None else op.tiles * op.expected / op.grid[0]
    return OperatorLine(op.name, op.grid, op.tiles, round(full * op.tile_bytes), tuple(waits))


def coarse_waits(graph: TaskGraph) -> list[CoarseWait]:
    """The waits for operators with a routing that are not item by item, where it could matter."""
    found = []
    for edge in graph.edges:
        producer = graph.operators[edge.producer]
        plain = producer.routing is not None and not graph.created[edge.producer]
        if plain and producer.grid[0] > edge.axes[0].count == 1:
            found.append(CoarseWait(graph.operators[edge.consumer].name, producer.name))
    return found


def layer_sorts(operators: Sequence[TiledOperator]) -> tuple[tuple[int, ...], ...]:
    """The numbers of layers whose operators are cut alike, sort by sort."""
    layers: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
    for op in operators:
        if op.layer is not None:
            layers.setdefault(op.layer, []).append((LAYER.sub("", op.name), op.grid))
    sorts: dict[tuple[tuple[str, tuple[int, ...]], ...], list[int]] = {}
    for number, parts in sorted(layers.items()):
        sorts.setdefault(tuple(parts), []).append(number)
    return tuple(map(tuple, sorts.values()))


def in_words(layers: Sequence[int]) -> str:
    """Layers by their numbers: "layer 1", "layers 1-27", "layers 3, 5"."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]}-{layers[-1]}"
    return f"layers {', '.join(map(str, layers))}"


def summarise(plan: Plan, layers: int, planning_ms: float) -> PlanSummary:
    """The summary of a plan for a model of `layers` layers. Raises VerificationError if the plan is not right."""
    graph = plan.graph
    start = time.perf_counter()
    verdict = plan.verify()
    verifying_ms = 1e3 * (time.perf_counter() - start)
    names = [op.name for op in graph.operators]
    alike = layer_sorts(graph.operators)
    shown = {sort[0] for sort in alike}
    later = [i for i, op in enumerate(graph.operators) if op.layer is not None and op.layer not in shown]
    queue_length = worker_bytes = None
    if not plan.dynamic:
        tasks = np.diff(plan.queue_offsets)
        worker = np.repeat(np.arange(plan.workers), tasks)
        queued = np.where(plan.is_task, graph.task_bytes()[plan.column("task")], 0)[: len(worker)]
        loads = np.bincount(worker, queued, plan.workers).astype(np.int64)
        queue_length, worker_bytes = Range.of(tasks), Range.of(loads)
    lines = tuple(operator_line(graph, i) for i in range(len(names)) if i not in later)
    listed = {line.name for line in lines}
    return PlanSummary(
        lines=lines,
        layers=layers,
        alike=alike,
        next_layer=operator_line(graph, later[0]) if later else None,
        coarse=tuple(wait for wait in coarse_waits(graph) if wait.consumer in listed),
        created=tuple(names[i] for i in np.flatnonzero(graph.created) if names[i] in listed),
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


def next_waits(summary: PlanSummary, layers: Sequence[int]) -> str:
    """What the first operator that is not in the table waits for, if it is one of these layers'."""
    first = summary.next_layer
    if first is None or not first.name.startswith(f"layers.{layers[0]}."):
        return ""
    return f"; {first.name} waits for {', '.join(map(str, first.waits))}"


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
        if i == last_of_layer:
            for first, *others in summary.alike:
                if others:
                    typer.echo(f"{in_words(others)}: as layer {first}{next_waits(summary, others)}")
    typer.echo()
    for wait in summary.coarse:
        typer.echo(f"coarsened: {wait}")
    if summary.created:
        typer.echo(f"created at run time, for the groups that a step has: tasks of {', '.join(summary.created)}")
    run_time = "decided at run time"
    typer.echo(
        f"{summary.operators:,} operators, {summary.tasks:,} tasks, {summary.events:,} events, "
        f"{summary.edges:,} edges\n"
        f"waits: {summary.waits_left:,} of {summary.waits:,} left after pruning\n"
        f"queue length: {summary.queue_length or run_time}\n"
        f"bytes per worker: {summary.worker_bytes or run_time}\n"
        f"planning time: {summary.planning_ms:.0f} ms\n"
        f"proved in {summary.verifying_ms:.0f} ms: each task runs once a step, "
        f"{summary.conflicts:,} pairs of tiles that touch the same elements are in order, the step ends"
    )
