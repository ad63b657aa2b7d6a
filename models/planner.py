"""From a model's graph to a plan for one batch size and schedule."""

from dataclasses import replace
from typing import Any

import torch

from megaflow.compilation import Mode
from megaflow.graph import Graph
from megaflow.kinds import Buffers, TaskKind, Tiling
from megaflow.plan import Plan
from megaflow.regions import MicroBatch, TiledOperator
from megaflow.scheduler import Program, Schedule
from megaflow.tasks import KINDS

KINDS_BY_NAME = {kind.name: kind for kind in KINDS}


def kinds_of(graph: Graph) -> tuple[TaskKind, ...]:
    """The task kinds that a graph uses. The kernel is compiled with no others; a kind's number is its place here."""
    used = {op.kind for op in graph.operators}
    return tuple(kind for kind in KINDS if kind.name in used)


def bodies_of(graph: Graph) -> list[Any]:
    """The Triton functions of the kinds that a graph uses, in the order of their numbers."""
    return [kind.body for kind in kinds_of(graph)]


def kind_numbers(graph: Graph) -> dict[str, int]:
    """The number of each task kind that a graph uses, by name."""
    return {kind.name: number for number, kind in enumerate(kinds_of(graph))}


def groups_tokens(graph: Graph) -> bool:
    """Whether a graph groups the tokens of the whole batch by expert. Dynamic plans of it create tasks at run time."""
    return any(op.kind == "group" for op in graph.operators)


def mode_of(graph: Graph, dynamic: bool) -> Mode:
    """The mode of the kernel that plans of a graph take."""
    if not dynamic:
        return "static"
    return "creating" if groups_tokens(graph) else "dynamic"


def program_of(graph: Graph, tiling: Tiling) -> Program:
    """The graph's operators, cut into tiles. Raises PlanError if one cannot be."""

    def cut(index: int, part: MicroBatch | None) -> TiledOperator:
        op = graph.operators[index]
        return KINDS_BY_NAME[op.kind].cut(op, replace(tiling, part=part))

    operators = tuple(cut(index, None) for index in range(len(graph.operators)))
    return Program(operators, tiling.batch, None if groups_tokens(graph) else cut)


def make_plan(graph: Graph, tiling: Tiling, schedule: Schedule, workers: int) -> Plan:
    """Cut a graph into tiles, schedule the tasks and derive their events.

    Raises:
        PlanError: if the graph cannot be planned.
        ScheduleError: if the schedule is not valid for it.
    """
    return schedule.plan(program_of(graph, tiling), workers, kind_numbers(graph))


def operator_table(graph: Graph, plan: Plan, buffers: Buffers) -> torch.Tensor:
    """int64 [operators, ROW_WIDTH]: the rows of the plan's operators, which may be parts of the graph's."""
    by_name = {op.name: op for op in graph.operators}
    rows = []
    for tiled in plan.graph.operators:
        op = by_name[tiled.source]
        rows.append(KINDS_BY_NAME[op.kind].packed_row(op, tiled, buffers))
    return torch.tensor(rows, dtype=torch.int64)
