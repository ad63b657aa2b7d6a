"""What the benchmarks of decode steps share: timing an engine, checking what it did, the lines of the table.

A time is that of `new` greedy steps after the prefill, which is not timed, divided by `new`; the median of the repeats
counts. A repeat starts from the same prefill as the one before. The tokens of the last timed repeat are then checked
against transformers in float32 and in bfloat16. It reads prompts of up to MOST_READ tokens together itself. If there
are more, the engine reads them again, so that nothing has to be believed that its steps have left in the cache, and
transformers goes on from there.

Memory bandwidth utilisation (MBU) compares the time with the floor: that of a copy of the bytes that a step has to
read, which are the weights, and the keys and values halfway through the run. Of a layer with experts those weights
count that the run's tokens need. Which these are transformers says, as the bfloat16 model of the check routes the same
tokens: a mean over all steps and layers of the last timed repeat. (Rounding may move a token between experts that are
nearly tied; that hardly changes how many are active.)
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import typer
from checking import LARGEST_ERROR, Check, Reference
from common import Qwen3, attempt, release, seconds
from engines import Engine, Megaflow, StaticCacheLoop, Timed
from roofline import step_bytes

from megaflow.models.mega_model import MegaModel

PROMPT_SEED = 1
BASELINE = "transformers compiled"
MOST_READ = 8192  # tokens of prompts that the reference reads: in float32 more take longer than what is measured


@dataclass(frozen=True)
class Method:
    """How each point is measured. `new`: steps of a repeat; `schedules`: of megaflow; `baseline`: transformers too."""

    new: int
    repeats: int
    schedules: list[str]
    baseline: bool


@dataclass(frozen=True)
class Subject:
    """A model that is measured. `source`: the transformers model in bfloat16 whose weights `mega` has packed."""

    name: str
    source: Qwen3
    mega: MegaModel
    reference: Reference


@dataclass(frozen=True)
class Result:
    """What was found about an engine.

    Attributes:
        tpot_ms: median of repeats_ms; tokens_per_s: of the whole batch.
        bytes: that a step has to read; floor_ms: the time in which so many can be copied; mbu: its share of tpot_ms.
        first_step_s: seconds of the first step, compilation included.
        compilation: what torch.compile counted.
    """

    tpot_ms: float
    repeats_ms: tuple[float, ...]
    tokens_per_s: float
    bytes: int
    floor_ms: float
    mbu: float
    first_step_s: float
    check: Check
    compilation: dict[str, int]


@dataclass(frozen=True)
class Row:
    """A line of the table: what was measured, and the result or what went wrong. `context`: tokens of each prompt."""

    model: str
    batch: int
    context: int
    engine: str
    result: Result | None
    error: str | None

    @property
    def warning(self) -> str | None:
        """What is wrong with megaflow in this row."""
        if self.engine == BASELINE:
            return None
        where = f"{self.model}, batch {self.batch}, context {self.context}, {self.engine}"
        if self.result is None:
            return f"{where}: {self.error}"
        found = self.result.check
        if found.accurate:
            return None
        return (
            f"{where}: relative error {found.relative_error:.2e} is above {LARGEST_ERROR} times "
            f"that of transformers in bfloat16, {found.bf16_relative_error:.2e}"
        )


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


def table_line(model: str, batch: str, context: str, engine: str, numbers: tuple[str, ...], check: str) -> str:
    """A line of the table. `numbers`: TPOT, tokens/s, GB, floor, MBU."""
    tpot, rate, size, floor, mbu = numbers
    return (
        f"{model:<13} {batch:>5} {context:>7}  {engine:<21} {tpot:>8} {rate:>9} {size:>6} {floor:>8} {mbu:>6}  {check}"
    )


def header() -> str:
    """The first line of the table."""
    return table_line("model", "batch", "context", "engine", ("TPOT ms", "tokens/s", "GB", "floor ms", "MBU"), "check")


def row_line(row: Row) -> str:
    """The line of a row."""
    found = row.result
    if found is None:
        numbers, check = ("-",) * 5, f"failed: {row.error}"
    else:
        numbers = (
            f"{found.tpot_ms:.3f}",
            f"{found.tokens_per_s:,.0f}",
            f"{found.bytes / 1e9:.2f}",
            f"{found.floor_ms:.3f}",
            f"{found.mbu:.1%}",
        )
        check = describe_check(found)
    return table_line(row.model, str(row.batch), str(row.context), row.engine, numbers, check)


def random_prompts(vocab: int, batch: int, length: int, device: torch.device) -> torch.Tensor:
    """Random token ids, int64 [batch, length]."""
    generator = torch.Generator().manual_seed(PROMPT_SEED)
    return torch.randint(vocab, (batch, length), generator=generator).to(device)


def measure(engine: Engine, prompts: torch.Tensor, steps: int, repeats: int) -> Timed:
    """Time `steps` steps, each repeat from the same prefill, which is not timed, after a warm-up of as many."""
    first = engine.prefill(prompts)
    first_step_s, _ = seconds(partial(engine.decode, first, 1))
    engine.restart()
    engine.decode(first, steps)
    repeats_ms = []
    for _ in range(repeats):
        engine.restart()
        taken, tokens = seconds(partial(engine.decode, first, steps))
        repeats_ms.append(1e3 * taken / steps)
    return Timed(first, tokens, engine.logits(), first_step_s, tuple(repeats_ms))


def find(
    make: Callable[[], Engine],
    prompts: torch.Tensor,
    method: Method,
    reference: Reference,
    size: Callable[[float | None], int],
    bandwidth: float,
) -> Result:
    """Make an engine, time it and check what it did.

    Args:
        size: bytes that a step has to read, by the number of active experts.
    """
    engine = make()
    timed = measure(engine, prompts, method.new, method.repeats)
    if prompts.numel() <= MOST_READ:
        check = reference.check(prompts, timed)
    else:
        engine.prefill(prompts)
        check = reference.check(prompts, timed, engine.past)
    tpot_ms = statistics.median(timed.repeats_ms)
    read = size(check.active_experts)
    floor_ms = 1e3 * read / bandwidth
    return Result(
        tpot_ms=tpot_ms,
        repeats_ms=timed.repeats_ms,
        tokens_per_s=1e3 * len(prompts) / tpot_ms,
        bytes=read,
        floor_ms=floor_ms,
        mbu=floor_ms / tpot_ms,
        first_step_s=timed.first_step_s,
        check=check,
        compilation=engine.compilation(),
    )


def measure_point(subject: Subject, batch: int, context: int, method: Method, bandwidth: float) -> list[Row]:
    """Measure a model in all engines and print a line for each. `context`: tokens of each prompt."""
    mega = subject.mega
    engines: dict[str, Callable[[], Engine]] = {
        f"megaflow {schedule}": partial(Megaflow, mega, schedule) for schedule in method.schedules
    }
    if method.baseline:
        engines[BASELINE] = partial(StaticCacheLoop, subject.source, context, method.new)
    prompts = random_prompts(mega.geometry.vocab, batch, context, mega.device)
    size = partial(step_bytes, mega.geometry, batch, context + method.new // 2)
    rows = []
    for engine, make in engines.items():
        result, error = attempt(partial(find, make, prompts, method, subject.reference, size, bandwidth))
        release()
        rows.append(Row(subject.name, batch, context, engine, result, error))
        typer.echo(row_line(rows[-1]))
    return rows
