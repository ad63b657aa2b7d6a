"""The persistent kernel against torch, operator by operator: which tile is the first that differs?

The kernel runs a step again and again from the same state, stopped after one operator more each time. Each operator's
tiles are computed in torch from what the kernel had made of the operators before, so rounding does not add up over
the layers, and a difference is where it first shows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megaflow.graph import Operator
from megaflow.kinds import Tile
from megaflow.models.mega_model import MegaModel
from megaflow.models.reference import WORKSPACE, poison, run_tile, stop_point
from megaflow.runtime import LoadedPlan
from megaflow.scheduler import Schedule, find_schedule

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Difference:
    """The first tile whose result differs.

    Attributes:
        operator: its name, that of a part where the batch is split.
        tile: the grid point; None if the difference is where no tile of the operator should write.
        tensor, place: the element with the largest difference of that tile.
        kernel, reference: its values.
        relative: their difference over the largest absolute value of the tensor.
    """

    operator: str
    tile: tuple[int, ...] | None
    tensor: str
    place: tuple[int, ...]
    kernel: float
    reference: float
    relative: float

    def __str__(self) -> str:
        where = f"{self.operator}{list(self.tile)}" if self.tile else f"{self.operator} (outside of its tiles)"
        return (
            f"{where} differs: {self.tensor}{list(self.place)} is {self.kernel:g}, the reference has "
            f"{self.reference:g}, a difference of {self.relative:.2g} of the largest value"
        )


@dataclass(frozen=True)
class Comparison:
    """What was compared.

    Attributes:
        operators, tiles: how many, those of the differing operator included.
        largest: the largest difference of each task kind, over the largest absolute value of its tensor.
        difference: the first one beyond the tolerance, None if there is none.
    """

    operators: int
    tiles: int
    largest: Mapping[str, float]
    difference: Difference | None


@torch.no_grad()
def compare(
    model: MegaModel,
    tokens: torch.Tensor,
    *,
    schedule: str | Schedule | None = None,
    stop_after: str | None = None,
    layers: int | None = None,
    tolerance: float | None = None,
) -> Comparison:
    """Run one decode step in the kernel and in torch, and compare every tile until one differs.

    The model continues afterwards as if this had not been: its state and activations are put back. (The new position
    of the KV cache, which the next step overwrites, is not.)

    Args:
        model: after a prefill.
        tokens: integers [B], the token to append to each sequence.
        schedule: by default the model's.
        stop_after, layers: as in ReferenceVM.
        tolerance: largest difference over the largest absolute value of the tensor; default 1e-4 in float32, 2e-2 in
            bfloat16, of which one rounding is up to 8e-3. Integers must be equal, but for the index of a maximum,
            which may be that of a value as large.
    Raises:
        InputError, CapacityError: as in MegaModel.decode, and as in ReferenceVM.
        PlanError, ScheduleError: as in ReferenceVM.
        DeadlockError: a wait of the kernel ran out of time.
    """
    decoder, tokens = model.decoder, model.read_next(tokens)
    decoder.reserve(1)
    loaded = decoder.load(model.schedule if schedule is None else find_schedule(schedule))
    operators = loaded.plan.graph.operators
    last = stop_point(model.geometry, stop_after, layers)
    stop = len(operators) if last is None else loaded.plan.last_of(last) + 1
    if tolerance is None:
        tolerance = TOLERANCE[decoder.tiling().config.torch_dtype]

    kept = copies(decoder.working)
    try:
        decoder.working["tokens"][: decoder.batch] = tokens.to(decoder.working["tokens"].device)
        poison(operators, decoder.working)
        return Comparing(model, loaded, tolerance).run(stop)
    finally:
        restore(decoder.working, kept)


class Comparing:
    """One comparison. The model's working buffers are those that the step starts from."""

    def __init__(self, model: MegaModel, loaded: LoadedPlan, tolerance: float) -> None:
        decoder = model.decoder
        self._loaded = loaded
        self._tolerance = tolerance
        self._config = decoder.tiling().config
        self._graph = {op.name: op for op in decoder.graph.operators}
        self._caches = decoder.caches
        self._kernel = decoder.working
        self._start = copies(decoder.working)
        stop_step = torch.zeros_like(decoder.working["unfinished"])
        self._reference = {**decoder.constants, **copies(decoder.working), "stop_step": stop_step}

    def run(self, stop: int) -> Comparison:
        """Compare operators 0 to stop, in program order."""
        graph = self._loaded.plan.graph
        largest: dict[str, float] = {}
        tiles = 0
        for number, tiled in enumerate(graph.operators[:stop]):
            op = self._graph[tiled.source]
            names = {tensor.name for tensor in (*op.inputs.values(), *op.outputs.values())}
            caches = {name: cache for name, cache in self._caches.items() if name in names}
            reference = self._reference | copies(caches)
            done = [
                run_tile(Tile(op, tiled, tuple(at), 0, self._config, reference))
                for at in graph.coordinates[graph.operator == number].tolist()
            ]
            tiles += len(done)
            self._run_kernel(tiled.name)
            kernel = self._kernel | caches
            found = relative_differences(op, kernel, reference)
            worst = max(float(values.max()) for values in found.values())
            largest[op.kind] = max(largest.get(op.kind, 0.0), worst)
            if worst > self._tolerance:
                return Comparison(number + 1, tiles, largest, self._first(done, found, kernel, reference))
            restore(self._reference, self._kernel)
        return Comparison(stop, tiles, largest, None)

    def _run_kernel(self, operator: str) -> None:
        restore(self._kernel, self._start)
        self._loaded.stop_after(operator)
        self._loaded.launch(1)
        self._loaded.finish()

    def _first(
        self,
        tiles: Sequence[Tile],
        found: Mapping[str, torch.Tensor],
        kernel: Mapping[str, torch.Tensor],
        reference: Mapping[str, torch.Tensor],
    ) -> Difference:
        """The first tile that differs; the element that differs most if no tile wrote it."""
        for tile in tiles:
            for name, place in tile.written:
                if name in found and float(found[name][place].max()) > self._tolerance:
                    own = torch.full_like(found[name], -1)
                    own[place] = found[name][place]
                    return difference(tile.tiled.name, tile.at, name, own, kernel[name], reference[name])
        name = max(found, key=lambda name: float(found[name].max()))
        return difference(tiles[0].tiled.name, None, name, found[name], kernel[name], reference[name])


def difference(
    operator: str,
    tile: tuple[int, ...] | None,
    name: str,
    relative: torch.Tensor,
    kernel: torch.Tensor,
    reference: torch.Tensor,
) -> Difference:
    """At the largest of the `relative` differences of a tensor."""
    place = tuple(int(i) for i in torch.unravel_index(relative.argmax(), relative.shape))
    return Difference(
        operator, tile, name, place, float(kernel[place]), float(reference[place]), float(relative[place])
    )


def relative_differences(
    op: Operator, kernel: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Of all of the kernel's tensors, |kernel - reference| over the largest |reference| of the tensor, by element.

    Where one of them is NaN and the other is not, or integers are not equal, it is infinite. The workspace of
    attention is left out: its statistics are to another base.
    """
    found = {name: relative_difference(kernel[name], reference[name]) for name in kernel if name not in WORKSPACE}
    if "best_index" in op.outputs:
        name, logits = op.tensor("best_index").name, reference[op.tensor("out").name]
        wanted = reference[op.tensor("best_value").name]
        index = kernel[name].long()
        chosen = logits.gather(1, index.clamp(0, logits.shape[1] - 1))
        gap = (wanted - chosen).abs() / logits.nan_to_num().abs().max()
        valid = (index >= 0) & (index < logits.shape[1])
        found[name] = torch.where(valid, torch.minimum(found[name], gap.nan_to_num(torch.inf)), found[name])
    return found


def relative_difference(kernel: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """relative_differences of one tensor, in float32."""
    if not kernel.is_floating_point():
        return torch.where(kernel == reference, 0.0, torch.inf)
    got, wanted = kernel.float(), reference.float()
    scale = wanted.nan_to_num().abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    gap = ((got - wanted).abs() / scale).nan_to_num(torch.inf)
    return torch.where(got.isnan() & wanted.isnan(), 0.0, gap)


def copies(buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in buffers.items()}


def restore(buffers: Mapping[str, torch.Tensor], kept: Mapping[str, torch.Tensor]) -> None:
    """Copy the contents of `kept` into the buffers of the same names."""
    for name, buffer in kept.items():
        buffers[name].copy_(buffer)
