"""What a schedule works with: which operators are ready, and where and in which order they run.

The verbs are those of DynaFlow (MLSys 2026): ready, execute, split, merge. The model's graph is not touched; what a
schedule decides is kept as a list of placements, from which queues are made (megaflow.scheduler.queues).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megaflow.errors import ScheduleError
from megaflow.regions import MicroBatch, TiledOperator
from megaflow.scheduler.program import Program
from megaflow.taskgraph import program_conflicts

Workers = slice | float | Literal["any"]


@dataclass(frozen=True)
class Placement:
    """Operators that were executed together.

    Attributes:
        operators: their names, in the order they were given.
        workers: the workers that share the tiles; None: tiles go to whichever worker comes first.
        priority: among placements that do not depend on each other, the higher one comes first.
        barrier: whether all that was placed up to here ends before anything later starts.
    """

    operators: tuple[str, ...]
    workers: range | None
    priority: int
    barrier: bool


class Context:
    """The operators of a program and what has been decided about them.

    Attributes:
        workers: number of workers; batch: number of sequences.
        placements: in the order of the calls of execute.
    """

    def __init__(self, program: Program, workers: int, schedule: str) -> None:
        self.workers = workers
        self.batch = program.batch
        self.placements: list[Placement] = []
        self._program = program
        self._schedule = schedule
        self._parts: list[tuple[MicroBatch | None, ...]] = [(None,)] * len(program.operators)
        self._placed: set[str] = set()
        self._cuts: dict[tuple[int, MicroBatch], TiledOperator] = {}
        self._renew()

    @property
    def operators(self) -> tuple[TiledOperator, ...]:
        """All operators as they are cut now, in program order."""
        return self._operators

    def inputs(self, op: TiledOperator) -> tuple[TiledOperator, ...]:
        """The earlier operators that `op` must come after."""
        return tuple(self._operators[i] for i in self._before[self._index[op.name]])

    def ready(self) -> list[TiledOperator]:
        """The operators that are not placed yet and whose inputs are, in program order."""
        return [self._operators[i] for i in sorted(self._ready)]

    def execute(
        self,
        ops: TiledOperator | Sequence[TiledOperator],
        *,
        workers: Workers = 1.0,
        priority: int = 0,
        fuse: bool = True,
    ) -> None:
        """Place operators: their tiles go to the ends of the workers' queues.

        Args:
            ops: from ready(). The tiles of several are mixed evenly, unless one depends on another.
            workers: which workers share the tiles: a slice of them, a fraction from the first on, or "any", with which
                tiles are not dealt out but go to whichever worker comes to them first.
            priority: operators with a higher one go ahead of others in all queues, as far as their inputs allow.
            fuse: False puts a barrier behind: all that was placed up to here ends before anything later starts.
        Raises:
            ScheduleError: an operator was placed before or comes before its inputs, or there are no such workers.
        """
        given = (ops,) if isinstance(ops, TiledOperator) else tuple(ops)
        for op in given:
            self._place(op)
        chosen = None if workers == "any" else self._workers(workers)
        if given:
            self.placements.append(Placement(tuple(op.name for op in given), chosen, priority, not fuse))

    def split(self, sizes: Sequence[int]) -> None:
        """Cut the batch into micro-batches of so many sequences each; ready() then has each operator once for each.

        Operators that are placed already stay whole. An operator's `part` is the micro-batch it is for.

        Raises:
            ScheduleError: the sizes do not add up to the batch, or it is split already.
        """
        if sum(sizes) != self.batch or min(sizes, default=0) < 1:
            raise self._error(f"split({list(sizes)}) does not cut the batch of {self.batch} into micro-batches")
        if any(parts != (None,) for parts in self._parts):
            raise self._error("the batch is split already; merge it first")
        if self._program.cut is None:
            raise self._error("this program's batch cannot be split")
        stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        parts = tuple(MicroBatch(i, stop - size, stop) for i, (size, stop) in enumerate(zip(sizes, stops, strict=True)))
        for index, op in enumerate(self._program.operators):
            if op.name not in self._placed:
                self._parts[index] = parts
        self._renew()

    def merge(self, op: str) -> None:
        """Join the micro-batches again: `op` and the operators after it in program order are for the whole batch.

        Raises:
            ScheduleError: no such operator, or a part of it or of a later one is placed already.
        """
        names = [whole.name for whole in self._program.operators]
        if op not in names:
            raise self._error(f"merge({op!r}): no such operator; there are {names[0]} to {names[-1]}")
        joined = set(names[names.index(op) :])
        late = [o.name for o in self._operators if o.part and o.source in joined and o.name in self._placed]
        if late:
            raise self._error(f"merge({op!r}): {late[0]} is placed already")
        for index in range(names.index(op), len(names)):
            self._parts[index] = (None,)
        self._renew()

    def finish(self) -> None:
        """Check that everything is placed. Raises ScheduleError."""
        missing = [op.name for op in self._operators if op.name not in self._placed]
        if missing:
            raise self._error(f"it left out {missing[0]}" + f" and {len(missing) - 1} more" * (len(missing) > 1))

    def _place(self, op: TiledOperator) -> None:
        index = self._index.get(op.name)
        if index is None:
            raise self._error(f"{op.name} is no operator of the batch as it is split now; take operators from ready()")
        if op.name in self._placed:
            raise self._error(f"{op.name} was executed twice")
        if self._waiting[index]:
            first = self._operators[min(self._waiting[index])].name
            raise self._error(f"{op.name} was executed before its input {first}")
        self._placed.add(op.name)
        self._ready.remove(index)
        for later in self._after[index]:
            self._waiting[later].discard(index)
            if not self._waiting[later]:
                self._ready.add(later)

    def _workers(self, workers: slice | float) -> range:
        if isinstance(workers, slice):
            chosen = range(self.workers)[workers]
        else:
            if not 0 < workers <= 1:
                raise self._error(f"workers={workers!r} is no share of the workers; it must be above 0 and at most 1")
            chosen = range(max(1, round(workers * self.workers)))
        if not chosen:
            raise self._error(f"workers={workers} leaves none of the {self.workers} workers")
        return chosen

    def _renew(self) -> None:
        """Find the operators, as they are cut now, and which come before which."""
        found = []
        for index, parts in enumerate(self._parts):
            found += [self._program.operators[index] if part is None else self._cut(index, part) for part in parts]
        self._operators = tuple(found)
        self._index = {op.name: i for i, op in enumerate(found)}
        self._before = [sorted(conflicts) for conflicts in program_conflicts(found)]
        self._after: list[list[int]] = [[] for _ in found]
        for index, before in enumerate(self._before):
            for earlier in before:
                self._after[earlier].append(index)
        self._waiting = [{i for i in before if found[i].name not in self._placed} for before in self._before]
        self._ready = {i for i, op in enumerate(found) if op.name not in self._placed and not self._waiting[i]}

    def _cut(self, index: int, part: MicroBatch) -> TiledOperator:
        assert self._program.cut is not None
        if (index, part) not in self._cuts:
            self._cuts[index, part] = self._program.cut(index, part)
        return self._cuts[index, part]

    def _error(self, what: str) -> ScheduleError:
        return ScheduleError(f"schedule {self._schedule}: {what}")
