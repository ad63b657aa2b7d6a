"""Operators alone: microseconds of each operator of a model, in megaflow's kernel and in torch.

    python bench/operators.py [--models Qwen3-8B] [--batches 1] [--contexts 512] [--json FILE]

A run goes through a chain of copies of one operator, each with weights (or keys and values) of its own: in all more
than four times what the L2 cache holds. Input and workspace are shared. megaflow does `runs` runs in a launch, with the
tiles of the whole model, in a kernel of that task kind alone; torch replays a CUDA graph of one run. An operator's time
is that of the runs, divided by runs and copies: the median of the repeats, with the smallest and the largest, after one
for warm-up. What lies between two runs is in both times: megaflow's wait for a whole step, the gap between two replays.
Both are in bfloat16. The bytes behind GB/s are those of the weight, or of the keys and values.

    operator           megaflow                                                      torch
    qkv, lm_head       the product, scaled by the RMSNorm's 1 / rms; in float32;     the product
                       lm_head: and the best logit of each tile
    o_proj, down       the product + h, in float32; that times the next norm's       the product; or product, add
                       weight; its sums of squares
    gate_up            the product, scaled; silu(gate) * up                          the product; or product, silu, mul
    attention          norm and rotation of q and k; appends to the paged cache;     scaled_dot_product_attention over
                       attention                                                     contiguous keys and values

torch's product is that of torch.nn.functional.linear (cuBLAS). Its input is normalised before, attention's queries and
keys are rotated before, and neither is timed. What follows the product are kernels of their own.

In a model an operator waits for all of the one before. Calls in a CUDA graph do so, too; so do copies with the schedule
"unfused", with a barrier behind each: that is the one to compare. With "static" a copy waits for the one before where
they share a workspace only (split K, split KV); else they overlap as operators of a model never can, which shows what
waiting costs. The ratio is to the first line of torch, the product or attention alone.

An error is that of what the timed repeats left in the copies' results, which were NaN before: the norm of the
difference from float32, over its norm, with that of torch doing the same in bfloat16 beside it. The last line printed
is a JSON object with every number; the exit code is 1 if megaflow failed or is less accurate than it should be.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from chains import Engine
from checking import LARGEST_ERROR, relative_error
from common import GEOMETRIES, attempt, begin, end, qwen3_config, refuse_unknown, release, seconds
from operator_chains import Chain, context_of, copies_for, make_chain, operator_bytes, operators_of

from megaflow.backend import interpreted, kernel_device
from megaflow.models.geometry import read_geometry
from megaflow.models.tiling import tiling
from megaflow.scheduler import SCHEDULES
from megaflow.target import current_device

MODELS = ["Qwen3-0.6B", "Qwen3-8B"]
BATCHES = [1, 8, 64]
CONTEXTS = [512, 4096]
DEFAULT_SCHEDULES = ["static", "unfused"]
MEGAFLOW = "megaflow"


@dataclass(frozen=True)
class Setting:
    """What is measured. `contexts`: positions that attention is over; `runs`: of a repeat."""

    models: list[str]
    batches: list[int]
    contexts: list[int]
    schedules: list[str]
    runs: int
    repeats: int


@dataclass(frozen=True)
class Result:
    """What was found about an engine.

    Attributes:
        us: microseconds of an operator, median of repeats_us.
        bytes_per_s: of those that it has to read.
        error: relative in norm, against float32.
    """

    us: float
    repeats_us: tuple[float, ...]
    bytes_per_s: float
    error: float


@dataclass(frozen=True)
class Case:
    """An operator of a model.

    Attributes:
        context: positions that attention is over; None for other operators.
        copies: of a run; bytes: that a copy has to read.
    """

    model: str
    batch: int
    operator: str
    context: int | None
    copies: int
    bytes: int

    @property
    def label(self) -> str:
        """The operator, and attention's context."""
        return self.operator if self.context is None else f"{self.operator} {self.context}"


@dataclass(frozen=True)
class Row:
    """A line of the table: an operator and an engine, and the result or what went wrong.

    Attributes:
        ratio: of the time to that of torch's product, or attention, alone; None if one of them failed.
        bf16_error: of torch where it does what the task does; None if it failed.
    """

    case: Case
    engine: str
    result: Result | None
    error: str | None
    ratio: float | None
    bf16_error: float | None

    @property
    def warning(self) -> str | None:
        """What is wrong with megaflow in this row."""
        if not self.engine.startswith(MEGAFLOW):
            return None
        where = f"{self.case.model}, batch {self.case.batch}, {self.case.label}, {self.engine}"
        if self.result is None:
            return f"{where}: {self.error}"
        if self.bf16_error is None:
            return f"{where}: relative error {self.result.error:.2e}, but torch failed to give one to compare it with"
        if self.result.error <= LARGEST_ERROR * self.bf16_error:
            return None
        return (
            f"{where}: relative error {self.result.error:.2e} is above {LARGEST_ERROR} times that of torch in "
            f"bfloat16, {self.bf16_error:.2e}"
        )


def table_line(
    batch: str, operator: str, engine: str, time: str, spread: str, rate: str, ratio: str, error: str
) -> str:
    """A line of the table."""
    return f"{batch:>5}  {operator:<15} {engine:<23} {time:>8} {spread:>17} {rate:>6} {ratio:>6}  {error}"


def row_line(row: Row) -> str:
    """The line of a row."""
    found, place = row.result, (str(row.case.batch), row.case.label, row.engine)
    if found is None:
        return table_line(*place, "-", "-", "-", "-", str(row.error))
    spread = f"{min(found.repeats_us):.1f} to {max(found.repeats_us):.1f}"
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    error = f"{found.error:.2e}"
    if row.engine.startswith(MEGAFLOW) and row.bf16_error is not None:
        error += f" (bf16 {row.bf16_error:.2e})"
    return table_line(*place, f"{found.us:.1f}", spread, f"{found.bytes_per_s / 1e9:,.0f}", ratio, error)


def find(
    make: Callable[[], Engine[list[torch.Tensor]]], setting: Setting, expected: list[torch.Tensor], size: int
) -> Result:
    """Make an engine, time it and check what the timed runs left. `size`: bytes that a copy has to read."""
    engine = make()
    engine.run(setting.runs)
    for result in engine.output():
        result.fill_(float("nan"))
    taken = [seconds(partial(engine.run, setting.runs))[0] for _ in range(setting.repeats)]
    each = [time / (setting.runs * len(expected)) for time in taken]
    found = torch.cat([result.flatten() for result in engine.output()]).float()
    return Result(
        us=1e6 * statistics.median(each),
        repeats_us=tuple(1e6 * time for time in each),
        bytes_per_s=size / statistics.median(each),
        error=relative_error(found, torch.cat([result.flatten() for result in expected])),
    )


def measure_case(case: Case, chain: Chain, setting: Setting) -> Iterator[Row]:
    """Measure one operator: the ways of torch first, then megaflow, whose errors are compared with the last of them."""
    engines: dict[str, tuple[Callable[[], Engine[list[torch.Tensor]]], list[torch.Tensor]]] = {
        f"torch {name}": (way.engine, way.expected) for name, way in chain.ways.items()
    }
    for schedule in setting.schedules:
        engines[f"{MEGAFLOW} {schedule}"] = (partial(chain.kernel, schedule), chain.expected)
    alone, bf16_error = None, None
    for number, (engine, (make, expected)) in enumerate(engines.items()):
        result, error = attempt(partial(find, make, setting, expected, case.bytes))
        if number == 0 and result is not None:
            alone = result.us
        if number < len(chain.ways):
            bf16_error = None if result is None else result.error
        ratio = None if result is None or alone is None else result.us / alone
        yield Row(case, engine, result, error, ratio, bf16_error)


def measure(setting: Setting, l2_bytes: int) -> list[Row]:
    """Measure all operators on a GPU with that L2 cache and print a line for each engine."""
    rows, device = [], kernel_device()
    for name in setting.models:
        typer.echo(f"\n{name}\n" + table_line("batch", "operator", "engine", "us", "spread", "GB/s", "ratio", "error"))
        model = read_geometry(qwen3_config(name, num_hidden_layers=1))
        for batch in setting.batches:
            cut = tiling(model, batch, current_device(device), "float32" if interpreted() else "bfloat16")
            for op in operators_of(model, batch, setting.contexts):
                size = operator_bytes(op, model, batch)
                case = Case(name, batch, op.name.split(".")[-1], context_of(op), copies_for(size, l2_bytes), size)
                for row in measure_case(case, make_chain(op, model, cut, case.copies, device), setting):
                    rows.append(row)
                    typer.echo(row_line(row))
                release()
    return rows


def main(
    models: Annotated[list[str], typer.Option(help="Geometries; may be given several times.")] = MODELS,
    batches: Annotated[list[int], typer.Option(min=1, max=128, help="Sequences; likewise.")] = BATCHES,
    contexts: Annotated[list[int], typer.Option(min=1, help="Positions that attention is over; likewise.")] = CONTEXTS,
    schedules: Annotated[list[str], typer.Option(help="Of megaflow; likewise.")] = DEFAULT_SCHEDULES,
    runs: Annotated[int, typer.Option(min=1, help="Runs of a repeat.")] = 100,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repeats.")] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the JSON object here too.")] = None,
) -> None:
    """Measure the time of each operator and check what the measured runs computed."""
    refuse_unknown("--models", models, GEOMETRIES)
    refuse_unknown("--schedules", schedules, SCHEDULES)
    setting = Setting(models, batches, contexts, schedules, runs, repeats)
    record = begin()
    typer.echo(f"{'setting':<14} {runs} runs, median of {repeats} repeats")
    rows = measure(setting, record["l2_bytes"])
    warnings = [row.warning for row in rows if row.warning]
    end(record | {"setting": asdict(setting), "rows": [asdict(row) for row in rows]}, warnings, json_file)


if __name__ == "__main__":
    typer.run(main)
