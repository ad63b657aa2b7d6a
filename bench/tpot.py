"""TPOT: milliseconds of a decode step, of megaflow and of transformers with a static cache and torch.compile.

    python bench/tpot.py [--models Qwen3-0.6B] [--batches 1 --batches 8] [--json FILE]

Weights and prompts are random. A time is that of `new` greedy steps after the prefill, which is not timed,
divided by `new`; the median of the repeats counts. The tokens of the last timed repeat are then checked:
prompt and tokens go through transformers in float32 and in bfloat16, which gives both choices at each step.
Memory bandwidth utilisation (MBU) compares the time with that of a copy of the bytes that a step has to
read. The last line printed is a JSON object with every number; the exit code is 1 if megaflow failed or is
less accurate than it should be.
"""

import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import torch
import triton
import typer
from checking import LARGEST_ERROR, Check, check, float32_copy
from common import GEOMETRIES, copy_bandwidth, environment, random_model
from engines import SPARE, Engine, Megaflow, StaticCacheLoop, Timed
from roofline import step_bytes

from megaflow.models.mega_model import MegaModel
from megaflow.scheduler import SCHEDULES

PROMPT_SEED = 1
MODELS = ["Qwen3-0.6B", "Qwen3-8B"]
BATCHES = [1, 8]
ALL_SCHEDULES = list(SCHEDULES)
BASELINE = "transformers compiled"

T = TypeVar("T")


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(run: Callable[[], T]) -> tuple[float, T]:
    """Wall-clock seconds of `run`, synchronised, and what it returned."""
    synchronize()
    start = time.perf_counter()
    result = run()
    synchronize()
    return time.perf_counter() - start, result


def measure(engine: Engine, prompts: torch.Tensor, steps: int, repeats: int) -> Timed:
    """Time `steps` steps, each repeat from a prefill that is not timed, after a warm-up of as many."""
    first = engine.prefill(prompts)
    first_step_s, _ = seconds(partial(engine.decode, first, 1))
    engine.decode(engine.prefill(prompts), steps)
    repeats_ms = []
    for _ in range(repeats):
        first = engine.prefill(prompts)
        taken, tokens = seconds(partial(engine.decode, first, steps))
        repeats_ms.append(1e3 * taken / steps)
    return Timed(first, tokens, engine.logits(), first_step_s, tuple(repeats_ms))


@dataclass(frozen=True)
class Setting:
    """What is measured. `prompt`: tokens of a prompt; `new`: steps of a repeat."""

    models: list[str]
    batches: list[int]
    prompt: int
    new: int
    repeats: int
    schedules: list[str]
    baseline: bool


@dataclass(frozen=True)
class Result:
    """What was found about an engine.

    Attributes:
        tpot_ms: median of repeats_ms; tokens_per_s: of the whole batch.
        mbu: the time in which the bytes of a step can be copied, as a share of tpot_ms.
        first_step_s: seconds of the first step, compilation included.
        compilation: what torch.compile counted.
    """

    tpot_ms: float
    repeats_ms: tuple[float, ...]
    tokens_per_s: float
    mbu: float
    first_step_s: float
    check: Check
    compilation: dict[str, int]


@dataclass(frozen=True)
class Row:
    """A line of the table: what was measured, and the result or what went wrong.

    Attributes:
        bytes: that a step has to read; floor_ms: in which so many bytes can be copied.
    """

    model: str
    batch: int
    engine: str
    bytes: int
    floor_ms: float
    result: Result | None
    error: str | None

    @property
    def warning(self) -> str | None:
        """What is wrong with megaflow in this row."""
        if self.engine == BASELINE:
            return None
        where = f"{self.model}, batch {self.batch}, {self.engine}"
        if self.result is None:
            return f"{where}: {self.error}"
        found = self.result.check
        if found.accurate:
            return None
        return (
            f"{where}: relative error {found.relative_error:.2e} is above {LARGEST_ERROR} times "
            f"that of transformers in bfloat16, {found.bf16_relative_error:.2e}"
        )


@dataclass(frozen=True)
class ModelReport:
    """All about one model. `packing_s`: seconds from the call of from_hf to packed weights."""

    model: str
    packing_s: float
    first_step_s: float | None
    rows: list[Row]


def describe_check(result: Result) -> str:
    """The last column of the table."""
    parts = [str(result.check)]
    if counted := result.compilation:
        recorded = counted.get("cudagraph_recorded_non_static_inputs", 0) > 0
        whole = recorded and not counted.get("cudagraph_skips", 0)
        parts.append("CUDA graphs" if whole else "CUDA GRAPHS NOT USED")
        if counted["unique_graphs"] != 1:
            parts.append(f"COMPILED {counted['unique_graphs']} TIMES")
    return ", ".join(parts)


def table_line(model: str, batch: str, engine: str, tpot: str, rate: str, mbu: str, check: str) -> str:
    """A line of the table."""
    return f"{model:<13} {batch:>5}  {engine:<21} {tpot:>8} {rate:>9} {mbu:>6}  {check}"


def row_line(row: Row) -> str:
    """The line of a row."""
    if row.result is None:
        return table_line(row.model, str(row.batch), row.engine, "-", "-", "-", f"failed: {row.error}")
    numbers = (f"{row.result.tpot_ms:.3f}", f"{row.result.tokens_per_s:,.0f}", f"{row.result.mbu:.1%}")
    return table_line(row.model, str(row.batch), row.engine, *numbers, describe_check(row.result))


def release() -> None:
    """Give back what an engine held: compiled code, CUDA graphs, memory."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def find(
    make: Callable[[], Engine],
    prompts: torch.Tensor,
    setting: Setting,
    floor_ms: float,
    inspect: Callable[[torch.Tensor, Timed], Check],
) -> Result:
    """Make an engine, time it and check what it did."""
    engine = make()
    timed = measure(engine, prompts, setting.new, setting.repeats)
    tpot_ms = statistics.median(timed.repeats_ms)
    return Result(
        tpot_ms=tpot_ms,
        repeats_ms=timed.repeats_ms,
        tokens_per_s=1e3 * len(prompts) / tpot_ms,
        mbu=floor_ms / tpot_ms,
        first_step_s=timed.first_step_s,
        check=inspect(prompts, timed),
        compilation=engine.compilation(),
    )


def random_prompts(vocab: int, batch: int, length: int, device: torch.device) -> torch.Tensor:
    """Random token ids, int64 [batch, length]."""
    generator = torch.Generator().manual_seed(PROMPT_SEED)
    return torch.randint(vocab, (batch, length), generator=generator).to(device)


def measure_model(name: str, setting: Setting, bandwidth: float) -> ModelReport:
    """Measure one model in all engines and print a line for each."""
    source = random_model(name)
    positions = setting.prompt + setting.new + SPARE
    packing_s, mega = seconds(
        lambda: MegaModel.from_hf(
            source, max_batch_size=max(setting.batches), max_seq_len=positions, progress=False
        )
    )
    engines: dict[str, Callable[[], Engine]] = {
        f"megaflow {schedule}": partial(Megaflow, mega, schedule) for schedule in setting.schedules
    }
    if setting.baseline:
        engines[BASELINE] = partial(StaticCacheLoop, source, setting.prompt, setting.new)
    inspect = partial(check, float32_copy(source), source)
    mean_context = setting.prompt + setting.new // 2
    rows = []
    for batch in setting.batches:
        prompts = random_prompts(mega.geometry.vocab, batch, setting.prompt, mega.device)
        size = step_bytes(mega.geometry, batch, mean_context)
        floor_ms = 1e3 * size / bandwidth
        for engine, make in engines.items():
            result = error = None
            try:
                result = find(make, prompts, setting, floor_ms, inspect)
            except Exception as failure:
                traceback.print_exc()
                error = f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0]}"
            release()
            rows.append(Row(name, batch, engine, size, floor_ms, result, error))
            typer.echo(row_line(rows[-1]))
    first = next((row.result for row in rows if row.engine != BASELINE and row.result), None)
    return ModelReport(name, packing_s, first.first_step_s if first else None, rows)


def cold_start_line(report: ModelReport) -> str:
    """How long it took until the first token."""
    step = "failed" if report.first_step_s is None else f"{report.first_step_s:.2f} s"
    return f"{report.model} cold start: weights packed in {report.packing_s:.2f} s, first decode step {step}"


def refuse_unknown(option: str, names: list[str], known: Mapping[str, object]) -> None:
    """Raises typer.BadParameter for a name that is not known."""
    for name in names:
        if name not in known:
            message = f"{name!r} is unknown; choose among {', '.join(known)}"
            raise typer.BadParameter(message, param_hint=option)


def main(
    models: Annotated[list[str], typer.Option(help="Geometry; may be given several times.")] = MODELS,
    batches: Annotated[list[int], typer.Option(min=1, max=128, help="Sequences; likewise.")] = BATCHES,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    new: Annotated[int, typer.Option(min=1, help="Steps of a repeat.")] = 100,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repeats.")] = 5,
    schedules: Annotated[list[str], typer.Option(help="Of megaflow; likewise.")] = ALL_SCHEDULES,
    baseline: Annotated[bool, typer.Option(help="Measure transformers too.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the JSON object here too.")] = None,
) -> None:
    """Measure decode time per token and check the tokens of the measured runs."""
    refuse_unknown("--models", models, GEOMETRIES)
    refuse_unknown("--schedules", schedules, SCHEDULES)
    if not torch.cuda.is_available():
        typer.echo("error: no CUDA device was found; this benchmark needs one", err=True)
        raise typer.Exit(2)
    torch.set_float32_matmul_precision("highest")  # no TF32 in the reference
    setting = Setting(models, batches, prompt, new, repeats, schedules, baseline)
    facts = environment()
    kernels_cached = any(Path(triton.knobs.cache.dir).glob("*"))
    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    for fact, value in facts.items():
        typer.echo(f"{fact:<14} {value}")
    typer.echo(f"{'copy bandwidth':<14} {bandwidth / 1e12:.3f} TB/s")
    typer.echo(f"{'Triton cache':<14} {'in use' if kernels_cached else 'empty'} at the start")
    typer.echo(f"{'setting':<14} prompts of {prompt} tokens, {new} steps, median of {repeats} repeats\n")
    typer.echo(table_line("model", "batch", "engine", "TPOT ms", "tokens/s", "MBU", "check"))
    reports = []
    for name in models:
        reports.append(measure_model(name, setting, bandwidth))
        release()  # the model before goes before the next is made
    typer.echo()
    for report in reports:
        typer.echo(cold_start_line(report))
    warnings = [row.warning for report in reports for row in report.rows if row.warning]
    for warning in warnings:
        typer.echo(f"warning: {warning}")
    record = {
        "environment": facts,
        "copy_bytes_per_s": bandwidth,
        "kernels_cached_at_start": kernels_cached,
        "setting": asdict(setting),
        "models": [asdict(report) for report in reports],
        "warnings": warnings,
    }
    line = json.dumps(record)
    if json_file is not None:
        json_file.write_text(line + "\n")
    typer.echo(line)
    if warnings:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
