"""Sparse layers alone: microseconds of a layer of Qwen3-30B-A3B's experts, in megaflow and in other ways.

    python bench/sparse_layers.py [--batches 1 --batches 64] [--json FILE]

A layer is h + experts(norm(h)): RMSNorm, router, top-k, experts, weighted sum, residual. A run goes through `layers` of
them, which have weights of their own: many times what the L2 cache holds, even for one token. megaflow does `runs` runs
in a launch, each of which begins with a look-up of h; the others replay a CUDA graph. A layer's time is that of the
runs, divided by runs and layers: the median of the repeats, with the smallest and the largest, after one for warm-up.

Bytes are those of the router and of the active experts: as many as are active in transformers in bfloat16, on average.
MBU compares the time with that of a copy of so many bytes. An error is that of what the layers have added to h: the
norm of the difference from float32, over its norm, with that of transformers in bfloat16 beside it. (Tokens whose
router has a near-tie may go to other experts after any rounding; that is a part of all errors.)

The last line printed is a JSON object with every number; the exit code is 1 if megaflow failed or is less accurate than
it should be.
"""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from chains import Engine
from checking import LARGEST_ERROR, in_float32, mean_active, recorded_choices, relative_error
from common import attempt, begin, end, random_model, refuse_unknown, release, seconds
from roofline import sparse_mlp_bytes
from sparse_engines import chain, compiled, gathered, grouped, kernel, start_of, transformers, vllm
from transformers import Qwen3MoeForCausalLM

from megaflow.backend import interpreted
from megaflow.models.geometry import read_geometry
from megaflow.models.weights import load_weights
from megaflow.scheduler import SCHEDULES

MODEL = "Qwen3-30B-A3B"
BATCHES = [1, 8, 64, 128]
DEFAULT_SCHEDULES = ["static"]
MEGAFLOW = "megaflow"


@dataclass(frozen=True)
class Setting:
    """What is measured. `layers`: of a run; `runs`: of a repeat."""

    batches: list[int]
    layers: int
    runs: int
    repeats: int
    schedules: list[str]


@dataclass(frozen=True)
class Reference:
    """What a chain is compared with.

    Attributes:
        start, added: float32 [B, hidden], h before the layers and what they add to it.
        bf16_error: of transformers in bfloat16.
        active_experts: of a layer, on average.
    """

    start: torch.Tensor
    added: torch.Tensor
    bf16_error: float
    active_experts: float

    def error(self, h: torch.Tensor) -> float:
        """Of what a chain's layers have added, h [B, hidden]."""
        return relative_error(h.float() - self.start, self.added)


@dataclass(frozen=True)
class Result:
    """What was found about an engine.

    Attributes:
        layer_us: microseconds of a layer, median of repeats_us.
        bytes_per_s: of those that the layer has to read; mbu: as a share of a copy's.
        error: relative in norm, against float32.
    """

    layer_us: float
    repeats_us: tuple[float, ...]
    bytes_per_s: float
    mbu: float
    error: float


@dataclass(frozen=True)
class Row:
    """A line of the table: an engine, and the result or what went wrong.

    Attributes:
        bytes: that a layer has to read; active_experts: of a layer, on average.
        bf16_error: of transformers in bfloat16.
    """

    batch: int
    engine: str
    active_experts: float
    bytes: float
    bf16_error: float
    result: Result | None
    error: str | None

    @property
    def warning(self) -> str | None:
        """What is wrong with megaflow in this row."""
        if not self.engine.startswith(MEGAFLOW):
            return None
        if self.result is None:
            return f"batch {self.batch}, {self.engine}: {self.error}"
        if self.result.error <= LARGEST_ERROR * self.bf16_error:
            return None
        return (
            f"batch {self.batch}, {self.engine}: relative error {self.result.error:.2e} is above {LARGEST_ERROR} times "
            f"that of transformers in bfloat16, {self.bf16_error:.2e}"
        )


def table_line(batch: str, engine: str, time: str, spread: str, rate: str, mbu: str, error: str) -> str:
    """A line of the table."""
    return f"{batch:>5}  {engine:<23} {time:>9} {spread:>17} {rate:>7} {mbu:>6}  {error}"


def row_line(row: Row) -> str:
    """The line of a row."""
    found = row.result
    if found is None:
        return table_line(str(row.batch), row.engine, "-", "-", "-", "-", str(row.error))
    spread = f"{min(found.repeats_us):.1f} to {max(found.repeats_us):.1f}"
    numbers = (f"{found.layer_us:.1f}", spread, f"{found.bytes_per_s / 1e9:,.0f}", f"{found.mbu:.1%}")
    return table_line(str(row.batch), row.engine, *numbers, f"{found.error:.2e} (bf16 {row.bf16_error:.2e})")


@torch.no_grad()
def ask(model: Qwen3MoeForCausalLM, batch: int) -> Reference:
    """What the layers do to `batch` tokens, in float32 and in bfloat16."""
    h, layers = start_of(model, batch), model.model.layers
    start = h.float()
    added = chain(map(in_float32, layers), start) - start
    model.set_experts_implementation("grouped_mm")  # an engine before may have chosen another
    with recorded_choices(model) as chosen:
        rounded = chain(layers, h).float() - start
    active = mean_active(torch.stack(chosen, 1)[:, :, None])
    return Reference(start, added, relative_error(rounded, added), active)


def find(
    make: Callable[[], Engine[torch.Tensor]], setting: Setting, reference: Reference, size: float, bandwidth: float
) -> Result:
    """Make an engine, time it and check what it did. `size`: bytes that a layer has to read."""
    engine = make()
    engine.run(setting.runs)
    taken = [seconds(partial(engine.run, setting.runs))[0] for _ in range(setting.repeats)]
    layer_s = [time / (setting.runs * setting.layers) for time in taken]
    rate = size / statistics.median(layer_s)
    return Result(
        layer_us=1e6 * statistics.median(layer_s),
        repeats_us=tuple(1e6 * time for time in layer_s),
        bytes_per_s=rate,
        mbu=rate / bandwidth,
        error=reference.error(engine.output()),
    )


def measure(setting: Setting, bandwidth: float) -> list[Row]:
    """Measure all engines and print a line for each."""
    model = random_model(MODEL, num_hidden_layers=setting.layers, vocab_size=max(setting.batches))
    torch.nn.init.normal_(model.model.embed_tokens.weight)  # beside it, what a layer adds is small, as in a real model
    geometry = read_geometry(model.config)
    dtype = torch.float32 if interpreted() else torch.bfloat16
    weights = load_weights(model, geometry, dtype, model.device, progress=False)
    rows = []
    for batch in setting.batches:
        engines: dict[str, Callable[[], Engine[torch.Tensor]]] = {
            f"{MEGAFLOW} {schedule}": partial(kernel, geometry, weights, batch, schedule)
            for schedule in setting.schedules
        }
        engines |= {
            "transformers grouped_mm": partial(transformers, model, batch, "grouped_mm"),
            "transformers batched_mm": partial(transformers, model, batch, "batched_mm"),
            "compiled grouped_mm": partial(compiled, model, batch, grouped),
            "compiled gather": partial(compiled, model, batch, gathered),
            "vllm fused_experts": partial(vllm, model, batch),
        }
        reference = ask(model, batch)
        size = sparse_mlp_bytes(geometry, reference.active_experts)
        typer.echo(f"batch {batch}: {reference.active_experts:.1f} experts active, {size / 1e6:.1f} MB a layer")
        for engine, make in engines.items():
            result, error = attempt(partial(find, make, setting, reference, size, bandwidth))
            release()
            rows.append(Row(batch, engine, reference.active_experts, size, reference.bf16_error, result, error))
            typer.echo(row_line(rows[-1]))
    return rows


def main(
    batches: Annotated[list[int], typer.Option(min=1, max=128, help="Tokens; may be given several times.")] = BATCHES,
    layers: Annotated[int, typer.Option(min=1, help="Layers of a run.")] = 16,
    runs: Annotated[int, typer.Option(min=1, help="Runs of a repeat.")] = 20,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repeats.")] = 5,
    schedules: Annotated[list[str], typer.Option(help="Of megaflow; likewise.")] = DEFAULT_SCHEDULES,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the JSON object here too.")] = None,
) -> None:
    """Measure the time of a sparse layer and check what the measured runs computed."""
    refuse_unknown("--schedules", schedules, SCHEDULES)
    setting = Setting(batches, layers, runs, repeats, schedules)
    record = begin()
    typer.echo(f"{'setting':<14} {layers} layers, {runs} runs, median of {repeats} repeats\n")
    typer.echo(table_line("batch", "engine", "us/layer", "spread", "GB/s", "MBU", "error"))
    rows = measure(setting, record["copy_bytes_per_s"])
    warnings = [row.warning for row in rows if row.warning]
    end(record | {"setting": asdict(setting), "rows": [asdict(row) for row in rows]}, warnings, json_file)


if __name__ == "__main__":
    typer.run(main)
