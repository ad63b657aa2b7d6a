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
from typing import Annotated, Any, Protocol

import torch
import triton
import typer
from common import GEOMETRIES, copy_bandwidth, environment, random_model
from torch._dynamo.utils import counters
from transformers import Qwen3ForCausalLM, StaticCache

from megaflow.models.geometry import Geometry
from megaflow.models.mega_model import MegaModel
from megaflow.scheduler import SCHEDULES
from megaflow.tasks.packing import padded

LARGEST_ERROR = 1.5  # of megaflow's logits, as a multiple of transformers' in bfloat16
SPARE = 1  # positions of the caches beyond those that are used
PROMPT_SEED = 1
VECTOR_BYTES = 4  # norm weights are float32
MODELS = ["Qwen3-0.6B", "Qwen3-8B"]
BATCHES = [1, 8]
ALL_SCHEDULES = list(SCHEDULES)
BASELINE = "transformers compiled"


class Engine(Protocol):
    """Something that decodes greedily."""

    def prefill(self, prompts: torch.Tensor) -> torch.Tensor:
        """Start new sequences, int64 [B, T]. Returns their first tokens, int64 [B]."""

    def decode(self, first: torch.Tensor, steps: int) -> torch.Tensor:
        """Append `first`, then what each step chooses. Returns the choices, int64 [B, steps]."""

    def logits(self) -> torch.Tensor | None:
        """float32 [B, vocab]: logits of the latest step, if they are kept."""

    def compilation(self) -> dict[str, int]:
        """What torch.compile counted, by its own names."""


class Megaflow:
    """A MegaModel in one schedule; the steps are run as MegaModel.generate runs them."""

    def __init__(self, model: MegaModel, schedule: str) -> None:
        self._model = model
        self._decoder = model._decoder
        model.set_schedule(schedule)

    def prefill(self, prompts: torch.Tensor) -> torch.Tensor:
        logits = self._model.prefill(prompts)
        self._decoder.set_ends([], 0)
        return logits.argmax(1)

    def decode(self, first: torch.Tensor, steps: int) -> torch.Tensor:
        decoder, tokens, launches, left = self._decoder, first, [], steps
        while left:
            new = decoder.run(tokens, min(left, decoder.steps_per_launch), self._model.schedule)
            launches.append(new)
            tokens = new[:, -1]
            left -= new.shape[1]
        return torch.cat(launches, 1)

    def logits(self) -> torch.Tensor:
        return self._decoder.logits()

    def compilation(self) -> dict[str, int]:
        return {}


def greedy_step(
    model: Qwen3ForCausalLM, cache: StaticCache, tokens: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """Append tokens [B, 1] at position [1, 1] and choose the next ones, [B, 1]; prompts [B, T] likewise."""
    logits = model(
        input_ids=tokens, position_ids=position, past_key_values=cache, use_cache=True, logits_to_keep=1
    ).logits
    return logits[:, -1].argmax(-1, keepdim=True)


class StaticCacheLoop:
    """transformers with a StaticCache: eager prefill, then one compiled function call a step.

    The cache, its length and the weights are tensors of fixed addresses to torch.compile, so a step replays
    one CUDA graph with two copied inputs. The mask is made inside it, from the cache's length; generate
    makes it outside.
    """

    def __init__(self, model: Qwen3ForCausalLM, prompt: int, steps: int, compiled: bool = True) -> None:
        counters.clear()
        self._model = model
        self._cache = StaticCache(config=model.config, max_cache_len=prompt + steps + SPARE)
        # tensors of their own, not views of one: the compiled code relies on the alignment of the first
        self._positions = [torch.full((1, 1), prompt + step, device=model.device) for step in range(steps)]
        self._step = greedy_step
        if compiled:
            self._step = torch.compile(greedy_step, mode="reduce-overhead", fullgraph=True, dynamic=False)

    @torch.no_grad()
    def prefill(self, prompts: torch.Tensor) -> torch.Tensor:
        self._cache.reset()  # in place, the addresses stay
        positions = torch.arange(prompts.shape[1], device=prompts.device)[None]
        return greedy_step(self._model, self._cache, prompts, positions)[:, 0]

    @torch.no_grad()
    def decode(self, first: torch.Tensor, steps: int) -> torch.Tensor:
        tokens, chosen = first[:, None].contiguous(), []
        for position in self._positions[:steps]:
            torch.compiler.cudagraph_mark_step_begin()
            # the next replay overwrites the output
            tokens = self._step(self._model, self._cache, tokens, position).clone()
            chosen.append(tokens)
        return torch.cat(chosen, 1)

    def logits(self) -> None:
        return None

    def compilation(self) -> dict[str, int]:
        graphs = {name: n for name, n in counters["inductor"].items() if name.startswith("cudagraph")}
        return {"unique_graphs": counters["stats"]["unique_graphs"], **graphs}


@dataclass(frozen=True)
class Timed:
    """What a timed engine left behind.

    Attributes:
        first: int64 [B], the tokens that the prefill chose.
        tokens: int64 [B, steps], what the steps of the last repeat chose.
        logits: float32 [B, vocab] of its last step, if the engine keeps them.
        first_step_s: seconds of the very first step, compilation included.
        repeats_ms: milliseconds of a step, by repeat.
    """

    first: torch.Tensor
    tokens: torch.Tensor
    logits: torch.Tensor | None
    first_step_s: float
    repeats_ms: tuple[float, ...]


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(run: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
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
class Check:
    """How a run compares with transformers in float32, with transformers in bfloat16 beside it.

    Attributes:
        agreement: share of steps whose token is the float32 choice.
        largest_gap: largest float32 logit less that of the token, at most over the steps.
        relative_error: L2, of the last step's logits; None if they were not kept.
        bf16_*: the same of transformers in bfloat16.
    """

    agreement: float
    bf16_agreement: float
    largest_gap: float
    bf16_largest_gap: float
    relative_error: float | None
    bf16_relative_error: float

    @property
    def accurate(self) -> bool:
        """Whether the logits are about as close to float32 as bfloat16 allows; a NaN is not."""
        return self.relative_error is None or self.relative_error <= LARGEST_ERROR * self.bf16_relative_error


def judge(tokens: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Share of tokens [steps] that are the choice of logits [steps, vocab], and the largest gap to it."""
    best, best_token = exact.max(1)
    gaps = best - exact.gather(1, tokens[:, None])[:, 0]
    return float((tokens == best_token).float().mean()), float(gaps.max())


@torch.no_grad()
def check(reference: Qwen3ForCausalLM, rounded: Qwen3ForCausalLM, prompts: torch.Tensor, run: Timed) -> Check:
    """Feed prompts and the run's tokens to transformers, one sequence at a time.

    Args:
        reference, rounded: the model in float32 and in bfloat16.
        prompts: int64 [B, T].
    """
    steps = run.tokens.shape[1]
    fed = torch.cat((prompts, run.first[:, None], run.tokens[:, :-1]), 1)
    choices, bf16_choices, errors, bf16_errors, norms = [], [], [], [], []
    for sequence, tokens in enumerate(run.tokens):
        ids = fed[sequence : sequence + 1]
        exact, near = (
            model(input_ids=ids, use_cache=False, logits_to_keep=steps).logits[0].float()
            for model in (reference, rounded)
        )
        choices.append(judge(tokens, exact))
        bf16_choices.append(judge(near.argmax(1), exact))
        norms.append(exact[-1].norm())
        bf16_errors.append((near[-1] - exact[-1]).norm())
        if run.logits is not None:
            errors.append((run.logits[sequence] - exact[-1]).norm())

    def relative(parts: list[torch.Tensor]) -> float:
        return float(torch.stack(parts).norm() / torch.stack(norms).norm())

    agreement, gap = zip(*choices, strict=True)
    bf16_agreement, bf16_gap = zip(*bf16_choices, strict=True)
    return Check(
        agreement=statistics.mean(agreement),
        bf16_agreement=statistics.mean(bf16_agreement),
        largest_gap=max(gap),
        bf16_largest_gap=max(bf16_gap),
        relative_error=relative(errors) if errors else None,
        bf16_relative_error=relative(bf16_errors),
    )


def float32_copy(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """The same weights in a float32 model on the same device."""
    with torch.device(model.device):
        copy = Qwen3ForCausalLM(model.config).float().eval()
    copy.load_state_dict(model.state_dict())
    return copy


def step_bytes(model: Geometry, batch: int, context: int, element_bytes: int = 2) -> int:
    """Bytes that a decode step has to read: all weights once, and the keys and values of each sequence.

    Weights count as packed, in whole blocks. An embedding that is not the LM head too is read by the row,
    one for each sequence.

    Args:
        context: positions of each sequence that are in the cache.
        element_bytes: of an element of a weight matrix and of the cache.
    """

    def matrix(rows: int, columns: int) -> int:
        return padded(rows) * padded(columns) * element_bytes

    layer = (
        matrix(model.qkv_rows, model.hidden)
        + matrix(model.hidden, model.attention_width)
        + matrix(2 * model.intermediate, model.hidden)
        + matrix(model.hidden, model.intermediate)
        + VECTOR_BYTES * 2 * (model.hidden + model.head_dim)
    )
    head = matrix(model.vocab, model.hidden) + VECTOR_BYTES * model.hidden
    embedding = 0 if model.tied else batch * padded(model.hidden) * element_bytes
    position = 2 * model.layers * model.kv_heads * model.head_dim * element_bytes
    return model.layers * layer + head + embedding + batch * context * position


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

    @property
    def mean_context(self) -> int:
        """Positions in the cache, on average over the steps."""
        return self.prompt + self.new // 2

    @property
    def positions(self) -> int:
        """Positions that the caches have room for."""
        return self.prompt + self.new + SPARE


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
    found = result.check
    parts = [
        f"float32 choice {found.agreement:.1%} (bf16 {found.bf16_agreement:.1%})",
        f"gap {found.largest_gap:.2g} (bf16 {found.bf16_largest_gap:.2g})",
    ]
    if found.relative_error is not None:
        parts.append(f"error {found.relative_error:.2e} (bf16 {found.bf16_relative_error:.2e})")
    if result.compilation:
        counted = result.compilation
        recorded = counted.get("cudagraph_recorded_non_static_inputs", 0) > 0
        whole = recorded and not counted.get("cudagraph_skips", 0)
        parts.append("CUDA graphs" if whole else "CUDA GRAPHS NOT USED")
        if counted["unique_graphs"] != 1:
            parts.append(f"COMPILED {counted['unique_graphs']} TIMES")
    return ", ".join(parts)


def table_line(model: str, batch: str, engine: str, tpot: str, rate: str, mbu: str, check: str) -> str:
    """A line of the table."""
    return f"{model:<11} {batch:>5}  {engine:<21} {tpot:>8} {rate:>9} {mbu:>6}  {check}"


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
    compilation = engine.compilation()
    tpot_ms = statistics.median(timed.repeats_ms)
    return Result(
        tpot_ms=tpot_ms,
        repeats_ms=timed.repeats_ms,
        tokens_per_s=1e3 * len(prompts) / tpot_ms,
        mbu=floor_ms / tpot_ms,
        first_step_s=timed.first_step_s,
        check=inspect(prompts, timed),
        compilation=compilation,
    )


def random_prompts(vocab: int, batch: int, length: int, device: torch.device) -> torch.Tensor:
    """Random token ids, int64 [batch, length]."""
    generator = torch.Generator().manual_seed(PROMPT_SEED)
    return torch.randint(vocab, (batch, length), generator=generator).to(device)


def measure_model(name: str, setting: Setting, bandwidth: float) -> ModelReport:
    """Measure one model in all engines and print a line for each."""
    source = random_model(name)
    synchronize()
    start = time.perf_counter()
    mega = MegaModel.from_hf(
        source, max_batch_size=max(setting.batches), max_seq_len=setting.positions, progress=False
    )
    synchronize()
    packing_s = time.perf_counter() - start
    engines: dict[str, Callable[[], Engine]] = {
        f"megaflow {schedule}": partial(Megaflow, mega, schedule) for schedule in setting.schedules
    }
    if setting.baseline:
        engines[BASELINE] = partial(StaticCacheLoop, source, setting.prompt, setting.new)
    inspect = partial(check, float32_copy(source), source)
    rows = []
    for batch in setting.batches:
        prompts = random_prompts(mega.geometry.vocab, batch, setting.prompt, mega.device)
        size = step_bytes(mega.geometry, batch, setting.mean_context)
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
    record: dict[str, Any] = {
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
