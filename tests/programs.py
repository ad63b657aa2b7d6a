"""Random tiled programs, and the order that events give their tiles, for tests."""

import numpy as np
from hypothesis import strategies as st

from megaflow.errors import PlanError, ScheduleError
from megaflow.plan import Plan
from megaflow.regions import Access, Span, TiledOperator, overlap
from megaflow.scheduler import Program, Schedule
from megaflow.taskgraph import TaskGraph, build_task_graph

SHAPES = {"a": (6, 4), "b": (5, 3), "c": (8, 2)}


@st.composite
def accesses(draw, tensor: str, grid: tuple[int, ...]) -> Access:
    """An access to a tensor in tiles side by side, whole, or overlapping."""
    shape, free, spans = SHAPES[tensor], list(range(len(grid))), []
    for extent in shape:
        axis = draw(st.sampled_from([None, *free]))
        if axis is None:
            spans.append(draw(st.sampled_from([Span.whole(extent), Span(None, 1, 0, extent - 1)])))
            continue
        free.remove(axis)
        size = -(-extent // grid[axis])
        spans.append(draw(st.sampled_from([Span.tiles(axis, size), Span(axis, size + 1, size)])))
    return Access(tensor, shape, tuple(spans))


@st.composite
def programs(draw, kind: str = "kind", most: int = 6, largest: int = 4) -> list[TiledOperator]:
    """Up to `most` operators that read and write the same tensors, and a last one that reads them all.

    Grids are up to `largest` tiles long on each of one or two axes.
    """
    names = sorted(SHAPES)
    ops = []
    for i in range(draw(st.integers(1, most))):
        grid = tuple(draw(st.lists(st.integers(1, largest), min_size=1, max_size=2)))
        reads = draw(st.lists(st.sampled_from(names), max_size=2, unique=True))
        writes = draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True))
        ops.append(
            TiledOperator(
                f"op{i}",
                kind,
                grid,
                tuple(draw(accesses(t, grid)) for t in reads),
                tuple(draw(accesses(t, grid)) for t in writes),
                draw(st.integers(1, 100)),
                tile_flops=draw(st.sampled_from([0, 10**6])),
                irregular=draw(st.booleans()),
            )
        )
    everything = tuple(Access(t, s, tuple(Span.whole(e) for e in s)) for t, s in SHAPES.items())
    ops.append(TiledOperator("last", kind, (draw(st.integers(1, min(3, largest))),), everything, everything[:1], 1))
    return ops


def graph_or_none(ops: list[TiledOperator]) -> TaskGraph | None:
    """The graph; None where an operator would notify more events than a record holds."""
    try:
        return build_task_graph(ops)
    except PlanError as error:
        assert "would notify more than" in str(error)
        return None


def plan_or_none(ops: list[TiledOperator], schedule: Schedule, workers: int) -> Plan | None:
    """The plan; None where an operator would notify more events than a record holds."""
    try:
        return schedule.plan(Program.of(ops), workers, {op.kind: 0 for op in ops})
    except (PlanError, ScheduleError) as error:
        assert "would notify more than" in str(error)
        return None


def conflicting_tiles(graph: TaskGraph) -> np.ndarray:
    """bool [N, N]: tile i of an earlier operator touches what tile j of a later one touches, and one writes."""
    first = graph.first_task
    conflicts = np.zeros((graph.tasks, graph.tasks), bool)
    for p, early in enumerate(graph.operators):
        for c in range(p + 1, len(graph.operators)):
            late = graph.operators[c]
            pairs = [(a, b) for a in early.writes for b in late.reads + late.writes if a.tensor == b.tensor]
            pairs += [(a, b) for a in early.reads for b in late.writes if a.tensor == b.tensor]
            block = conflicts[first[p] : first[p + 1], first[c] : first[c + 1]]
            x, y = early.coordinates(), late.coordinates()
            for a, b in pairs:
                meets = np.ones_like(block)
                for m, s, t in zip(overlap(a, early.grid, b, late.grid), a.spans, b.spans, strict=True):
                    rows = np.zeros(len(x), int) if s.axis is None else x[:, s.axis]
                    columns = np.zeros(len(y), int) if t.axis is None else y[:, t.axis]
                    meets &= m[rows[:, None], columns[None]]
                block |= meets
    return conflicts


def ordered_tiles(graph: TaskGraph) -> np.ndarray:
    """bool [N, N]: the events of one step guarantee that task i has ended before task j starts."""
    before = np.zeros((graph.tasks, graph.tasks), bool)
    for notify in graph.notifies.T:
        for wait in graph.waits.T:
            before |= (notify[:, None] == wait[None, :]) & (notify >= 0)[:, None] & (wait >= 0)[None, :]
    for middle in range(graph.tasks):  # transitive closure
        before |= before[:, middle, None] & before[middle]
    return before
