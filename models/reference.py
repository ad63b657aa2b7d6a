"""A model's decode steps in torch, tile by tile, in any order that a plan allows.

The reference VM (megaflow.scheduler.reference_vm) follows the plan with as many workers as one likes; tiles are
computed by the oracles of their kinds on copies of the model's buffers. Before each step everything that tiles will
write is poisoned, so that a tile which runs before its inputs are there does not go unnoticed.
"""

import random
from collections.abc import Mapping, Sequence

import torch

from megaflow.errors import HazardError, InputError
from megaflow.kinds import Tile
from megaflow.models.geometry import Geometry
from megaflow.models.mega_model import MegaModel
from megaflow.models.planner import KINDS_BY_NAME, make_plan
from megaflow.regions import TiledOperator
from megaflow.scheduler import Schedule, find_schedule
from megaflow.scheduler.reference_vm import Choose, run_plan
from megaflow.scheduler.versions import Versions

WORKSPACE = ("partial", "statistics")  # of attention; no tile's region says how it is laid out


class ReferenceVM:
    """Decode steps of the sequences that a model has, without touching the model.

    Arithmetic is in float32, and each buffer has the dtype that it has in the model, so values are rounded where the
    kernel stores them.

    Args:
        model: after a prefill.
        schedule: by default the model's.
        workers: how many workers the plan is for.
        stop_after: run only up to this operator in program order ("layers.0.qkv").
        layers: run only that many layers; what comes after the last of them is left out too.
    Attributes:
        buffers: after run, all tensors by name.
    Raises:
        InputError: both stop_after and layers are given, or the model has no such layers or no sequences.
        PlanError: no such operator.
        ScheduleError: the schedule is unknown or not valid.
    """

    def __init__(
        self,
        model: MegaModel,
        *,
        schedule: str | Schedule | None = None,
        workers: int = 3,
        stop_after: str | None = None,
        layers: int | None = None,
    ) -> None:
        decoder = model.decoder
        if decoder.batch == 0:
            raise InputError("the model has no sequences to continue; call prefill first")
        self.buffers: dict[str, torch.Tensor] = {}
        self._model = model
        self._tiling = decoder.tiling()
        chosen = model.schedule if schedule is None else find_schedule(schedule)
        plan = make_plan(decoder.graph, self._tiling, chosen, workers)
        last = stop_point(model.geometry, stop_after, layers)
        self._plan = plan if last is None else plan.stopped_after(last)
        self._operators = plan.graph.operators
        self._by_name = {op.name: op for op in decoder.graph.operators}
        self._versions = Versions(self._operators)
        self._step = -1

    def run(self, tokens: torch.Tensor, steps: int = 1, choose: Choose | None = None) -> torch.Tensor:
        """Run decode steps from where the model is now.

        Args:
            tokens: integers [B], the token to append to each sequence first.
            steps: at most the model's steps_per_launch.
            choose: picks which of n workers (or ready tasks) goes on; by default at random, the same way each time.
        Returns:
            int64 [B, steps that were run]: the greedy choice after each step; fewer if all sequences finished. [B, 0]
            where the choice was left out.
        Raises:
            HazardError: a tile read what was not there yet or not there any more.
            DeadlockError: the plan cannot finish.
            InputError, CapacityError: as in MegaModel.decode.
        """
        decoder, tokens = self._model.decoder, self._model.read_next(tokens)
        if not 1 <= steps <= decoder.steps_per_launch:
            raise InputError(f"steps is {steps}; it must be 1 to {decoder.steps_per_launch}, the model's launch")
        decoder.reserve(steps)
        self.buffers = dict(decoder.constants)
        self.buffers |= {name: buffer.clone() for name, buffer in {**decoder.caches, **decoder.working}.items()}
        self.buffers["tokens"][: decoder.batch] = tokens
        self.buffers["generated"].fill_(poison_of(torch.int32))
        self.buffers["stop_step"] = torch.zeros_like(self.buffers["unfinished"])
        self._step = -1
        run_plan(self._plan, steps, choose or random.Random(0).randrange, self._execute, self._read)
        done = int(self.buffers["stop_step"]) or steps
        chosen = self.buffers["generated"][: decoder.batch, :done].long()
        return chosen[:, :0] if (chosen == poison_of(torch.int32)).any() else chosen

    def _execute(self, task: int, step: int) -> None:
        if step != self._step:  # the plan keeps steps apart
            self._step = step
            poison(self._operators, self.buffers)
            self._versions.start_step()
        graph = self._plan.graph
        number, at = int(graph.operator[task]), tuple(graph.coordinates[task].tolist())
        items = self._items(number, at[0])
        self._versions.read(number, at, items)
        tile = run_tile(self._tile(number, at))
        self._versions.written(number, at, items)
        for name, place in tile.written:
            values = self.buffers[name][place]
            if (~values.isfinite() if values.is_floating_point() else values == poison_of(values.dtype)).any():
                raise HazardError(
                    f"{graph.task_name(task)} left a value in {name} that is not finite: it read what no tile had "
                    "written, or the weights are not finite"
                )

    def _read(self, name: str) -> list[int]:
        return self.buffers[name].tolist()

    def _items(self, number: int, group: int) -> list[int]:
        """The items of a group, none where the operator has no routing or the partition no such group."""
        routing = self._operators[number].routing
        if routing is None or group >= self._read(routing.count)[0]:
            return []
        begin, end = self._read(routing.indptr)[group : group + 2]
        return self._read(routing.items)[begin:end]

    def _tile(self, number: int, at: tuple[int, int, int]) -> Tile:
        tiled = self._operators[number]
        return Tile(self._by_name[tiled.source], tiled, at, self._step, self._tiling.config, self.buffers)


def run_tile(tile: Tile) -> Tile:
    """Compute a tile in torch. Returns it; `written` says what changed."""
    KINDS_BY_NAME[tile.op.kind].run_tile(tile)
    return tile


def poison_of(dtype: torch.dtype) -> float | int:
    """A value that no tile writes: NaN, or the most negative integer."""
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min


def poison(operators: Sequence[TiledOperator], buffers: Mapping[str, torch.Tensor]) -> None:
    """Overwrite all that the operators' tiles will write before it is read.

    Padding stays zero, since linear layers read it, and so does what one step hands to the next. A partition must be
    one, since tasks are created by it even where those that make it are left out: it gets one group of all items.
    """
    written: set[str] = set()
    handed_on = set()  # read before it is written: by the step before
    for op in operators:
        handed_on |= {access.tensor for access in op.reads} - written
        written |= {access.tensor for access in op.writes}
    for name in WORKSPACE:
        buffers[name].fill_(poison_of(buffers[name].dtype))
    for op in operators:
        for access in op.writes:
            if access.tensor not in handed_on and access.tensor not in WORKSPACE:
                buffer = buffers[access.tensor]
                buffer[access.box(op.grid).slices] = poison_of(buffer.dtype)
    for routing in {op.routing for op in operators if op.routing}:
        buffers[routing.count][0] = 1
        buffers[routing.indptr][:2] = torch.tensor([0, routing.number])
        buffers[routing.items][: routing.number] = torch.arange(routing.number)


def stop_point(model: Geometry, stop_after: str | None, layers: int | None) -> str | None:
    """What Plan.stopped_after is to be told, None for nothing. Raises InputError."""
    if layers is None:
        return stop_after
    if stop_after is not None:
        raise InputError(f"stop_after is {stop_after!r} and layers is {layers}; give one of them")
    if not 1 <= layers <= model.layers:
        raise InputError(f"layers is {layers}; the model has 1 to {model.layers}")
    return f"layers.{layers - 1}."
