"""Programs over the groups of run-time partitions, without experts, and what runs of them mean."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from megaflow.errors import PlanError
from megaflow.plan import Plan
from megaflow.regions import Access, Routing, Span, TiledOperator
from megaflow.scheduler import Program, Schedule
from megaflow.taskgraph import TaskGraph

WIDTH = 2  # of all tensors
KINDS = {"kind": 0, "make": 1}  # those that make partitions are of the second


@dataclass(frozen=True)
class Partition:
    """The items of each group that there is."""

    groups: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(keys: Sequence[int]) -> "Partition":
        """Items with the same key are a group."""
        return Partition(tuple(tuple(i for i, k in enumerate(keys) if k == key) for key in sorted(set(keys))))

    def tensors(self, routing: Routing) -> dict[str, list[int]]:
        ends = np.cumsum([0, *map(len, self.groups)]).tolist()
        return {
            routing.count: [len(self.groups)],
            routing.indptr: ends,
            routing.items: [i for g in self.groups for i in g],
        }


def whole(tensor: str, *shape: int) -> Access:
    return Access(tensor, shape, tuple(map(Span.whole, shape)))


@dataclass(frozen=True)
class Shape:
    """Of layers in which items are partitioned, handed through two operators over groups, and gathered.

    Attributes:
        first, second: tiles of a group along the width; gathered: items that a gathering tile reads.
        left_out: items at the end that are not gathered.
        aside: another operator reads all that the first one writes. flag: the second one reads something that all tiles
            of the first one touch. other: it reads something that an ordinary operator writes. open_end: the last layer
            gathers nothing. some: what comes after reads what was gathered first only. last_column: only that is.
    """

    layers: int = 2
    items: int = 4
    groups: int = 3
    first: int = 1
    second: int = 2
    gathered: int = 2
    left_out: int = 0
    aside: bool = False
    flag: bool = False
    other: bool = False
    open_end: bool = False
    some: bool = False
    last_column: bool = False

    @property
    def routing(self) -> Routing:
        return Routing("count", "indptr", "items", self.groups, self.items)

    def operators(self) -> list[TiledOperator]:
        routing, items = self.routing, self.items
        lists = (whole("count", 1), whole("indptr", self.groups + 1), whole("items", items))
        source = whole("source", 2)

        def routed(tensor: str, columns: Span) -> Access:
            return Access(tensor, (items, WIDTH), (Span.routed(routing), columns))

        def tiles(count: int) -> Span:
            return Span.tiles(1, -(-WIDTH // count))

        ops = []
        for layer in range(self.layers):
            name = f"layers.{layer}."
            ops.append(TiledOperator(name + "make", "make", (1,), (source,), lists, 1))
            if self.other:
                ops.append(TiledOperator(name + "other", "kind", (2,), (source,), (whole("other", 2),), 1))
            flags = (whole("flag", 1),) if self.flag else ()
            ops.append(
                TiledOperator(
                    name + "first", "kind", (self.groups, self.first), (*lists, source),
                    (routed("middle", tiles(self.first)), *flags), 1, routing=routing,
                )
            )  # fmt: skip
            others = (whole("other", 2),) if self.other else ()
            ops.append(
                TiledOperator(
                    name + "second", "kind", (self.groups, self.second),
                    (*lists, routed("middle", Span.whole(WIDTH)), *flags, *others),
                    (routed("out", tiles(self.second)),), 1, routing=routing,
                )
            )  # fmt: skip
            if self.aside:
                middle = whole("middle", items, WIDTH)
                ops.append(TiledOperator(name + "aside", "kind", (1,), (middle,), (whole("seen", 1),), 1))
            if self.open_end and layer == self.layers - 1:
                continue
            kept = items - self.left_out
            rows = -(-kept // self.gathered)
            columns = Span(None, 1, 0, WIDTH - 1) if self.last_column else Span.tiles(0, 1)
            out = Access("out", (items, WIDTH), (Span(1, self.gathered, self.gathered, 0, kept), columns))
            sums = Access("sums", (rows, WIDTH), (Span.tiles(1, 1), Span.tiles(0, 1)))
            ops.append(TiledOperator(name + "gather", "kind", (WIDTH, rows), (out,), (sums,), 1))
            read = Access("sums", (rows, WIDTH), (Span(None, 1 if self.some else rows), Span.whole(WIDTH)))
            ops.append(TiledOperator(name + "mix", "kind", (1,), (read,), (source,), 1))
        return ops

    def plan(self, schedule: Schedule, workers: int = 2) -> Plan:
        return schedule.plan(Program.of(self.operators()), workers, KINDS)

    def plan_or_none(self, schedule: Schedule, workers: int = 2) -> Plan | None:
        """The plan; None where an operator would notify more events than a record holds."""
        try:
            return self.plan(schedule, workers)
        except PlanError as error:
            assert "would notify more than" in str(error)
            return None


@st.composite
def shapes(draw, layers: int = 2, items: int = 6, groups: int = 4) -> Shape:
    """Of up to so many layers, items and groups."""
    number = draw(st.integers(1, items))
    return Shape(
        draw(st.integers(1, layers)), number, draw(st.integers(1, min(groups, number))),
        *(draw(st.integers(1, WIDTH)) for _ in range(2)), draw(st.integers(1, number)),
        draw(st.integers(0, number - 1)), *(draw(st.booleans()) for _ in range(6)),
    )  # fmt: skip


@st.composite
def partitions(draw, shape: Shape, steps: int) -> list[list[Partition]]:
    """For each step and layer: even ones, and ones in which many items are in one group."""

    def one() -> Partition:
        keys = st.integers(0, draw(st.integers(0, shape.groups - 1)))
        return Partition.of(draw(st.lists(keys, min_size=shape.items, max_size=shape.items)))

    return [[one() for _ in range(shape.layers)] for _ in range(steps)]


def touched(op: TiledOperator, access: Access, partition: Partition) -> list[np.ndarray]:
    """For each dimension, bool [tiles, elements]: what a tile touches; nothing if its group is not there."""
    found = []
    for dimension, (extent, span) in enumerate(zip(access.shape, access.spans, strict=True)):
        mask = np.zeros((op.tiles, extent), bool)
        for row, tile in enumerate(op.coordinates().tolist()):
            if op.routing and tile[0] >= len(partition.groups):
                continue
            at = list(partition.groups[tile[0]]) if span.routing else access.at(tuple(tile))[dimension]
            mask[row, at] = True
        found.append(mask)
    return found


@dataclass(frozen=True)
class Meaning:
    """What must hold in a step. N tasks.

    Attributes:
        present: bool [N], tasks whose group is there.
        conflicts: bool [N, N]: task i of an earlier operator touches an element that task j of a later one does.
    """

    present: np.ndarray
    conflicts: np.ndarray

    @staticmethod
    def of(graph: TaskGraph, partition: Sequence[Partition]) -> "Meaning":
        """With the partition of each layer."""
        first, ops = graph.first_task, graph.operators
        present = np.ones(graph.tasks, bool)
        conflicts = np.zeros((graph.tasks, graph.tasks), bool)
        parts = [partition[op.layer] for op in ops]
        for i, op in enumerate(ops):
            if op.routing:
                present[first[i] : first[i + 1]] = op.coordinates()[:, 0] < len(parts[i].groups)
        for p, early in enumerate(ops):
            for c in range(p + 1, len(ops)):
                late = ops[c]
                pairs = [(a, b) for a in early.writes for b in late.reads + late.writes if a.tensor == b.tensor]
                pairs += [(a, b) for a in early.reads for b in late.writes if a.tensor == b.tensor]
                for a, b in pairs:
                    x, y = touched(early, a, parts[p]), touched(late, b, parts[c])
                    meets = np.all([(m.astype(int) @ n.T) > 0 for m, n in zip(x, y, strict=True)], 0)
                    conflicts[first[p] : first[p + 1], first[c] : first[c + 1]] |= meets
        return Meaning(present, conflicts)


@dataclass
class Lists:
    """The tensors of the partitions: each layer's first task makes them."""

    graph: TaskGraph
    steps: Sequence[Sequence[Partition]]
    tensors: dict[str, list[int]] = field(default_factory=dict)

    def read(self, name: str) -> list[int]:
        return self.tensors.get(name, [])

    def ran(self, task: int, step: int) -> None:
        """Write the partition if the task does."""
        op = self.graph.operators[self.graph.operator[task]]
        if op.kind == "make":
            routing = next(o.routing for o in self.graph.operators if o.routing)
            self.tensors |= self.steps[step][op.layer].tensors(routing)
