"""How TPOT depends on the length of the context and on the batch.

    python bench/sensitivity.py [--models Qwen3-8B] [--sweeps context] [--json FILE]

The sweep "context" goes over lengths of the prompts, in small batches; the sweep "batch" goes over batches, with short
prompts. Weights and prompts are random. How a time is taken and checked, and what the floor is, measuring.py says.
Prompts are read by the prefill, however long: with random keys and values the steps would take as long, but the experts
that tokens go to would be others.

A sweep has one MegaModel, which is made for its largest batch and its longest prompt. So a point that both have may
differ in time: where sequences may grow longer, attention is cut into more tiles. transformers, if it is measured,
needs a cache of its own beside megaflow's and reads all prompts at once, so it may lack the memory for long ones.

The last line printed is a JSON object with every number, of which plots.py draws plots; the exit code is 1 if megaflow
failed or is less accurate than it should be.
"""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from checking import Reference, float32_copy
from common import GEOMETRIES, Qwen3, attempt, begin, end, random_model, refuse_unknown, release
from engines import SPARE
from measuring import Method, Row, Subject, header, measure_point, row_line

from megaflow.models.mega_model import MegaModel
from megaflow.scheduler import SCHEDULES

MODELS = ["Qwen3-0.6B", "Qwen3-8B"]
AXES = {"context": "tokens of a prompt", "batch": "sequences"}
ALL_AXES = list(AXES)
CONTEXTS = [512, 4096, 16384, 32768]
CONTEXT_BATCHES = [1]
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128]
DEFAULT_SCHEDULES = ["static"]


@dataclass(frozen=True)
class Sweep:
    """Points along an axis: each batch with each context, which is the length of the prompts."""

    axis: str
    batches: list[int]
    contexts: list[int]

    @property
    def points(self) -> list[tuple[int, int]]:
        """(batch, context), by context."""
        return [(batch, context) for context in self.contexts for batch in self.batches]


@dataclass(frozen=True)
class Setting(Method):
    """What is measured."""

    models: list[str]
    sweeps: list[Sweep]


def measure_sweep(
    name: str, source: Qwen3, reference: Reference, sweep: Sweep, setting: Setting, bandwidth: float
) -> list[Row]:
    """Measure all points of a sweep and print a line for each. If there is no memory for a model, all have failed."""
    positions = max(sweep.contexts) + setting.new + SPARE
    make = partial(MegaModel.from_hf, source, max_batch_size=max(sweep.batches), max_seq_len=positions, progress=False)
    mega, error = attempt(make)
    if mega is None:
        engines = [f"megaflow {schedule}" for schedule in setting.schedules]
        failed = [Row(name, *point, engine, None, error) for point in sweep.points for engine in engines]
        typer.echo("\n".join(map(row_line, failed)))
        return failed
    subject = Subject(name, source, mega, reference)
    return [row for point in sweep.points for row in measure_point(subject, *point, setting, bandwidth)]


def measure_model(name: str, setting: Setting, bandwidth: float) -> dict[str, list[Row]]:
    """Measure one model: the rows of each sweep, by its axis."""
    source = random_model(name)
    reference = Reference(float32_copy(source), source)
    found = {}
    for sweep in setting.sweeps:
        found[sweep.axis] = measure_sweep(name, source, reference, sweep, setting, bandwidth)
        release()  # the KV cache of one goes before that of the next is made
    return found


def main(
    models: Annotated[list[str], typer.Option(help="Geometry; may be given several times.")] = MODELS,
    sweeps: Annotated[list[str], typer.Option(help="context or batch; likewise.")] = ALL_AXES,
    contexts: Annotated[
        list[int], typer.Option(min=1, max=32768, help="Tokens of each prompt, in the sweep context; likewise.")
    ] = CONTEXTS,
    context_batches: Annotated[
        list[int], typer.Option(min=1, max=128, help="Sequences, in the sweep context; likewise.")
    ] = CONTEXT_BATCHES,
    batches: Annotated[
        list[int], typer.Option(min=1, max=128, help="Sequences, in the sweep batch; likewise.")
    ] = BATCHES,
    prompt: Annotated[int, typer.Option(min=1, max=32768, help="Tokens of each prompt, in the sweep batch.")] = 512,
    new: Annotated[int, typer.Option(min=1, max=8000, help="Steps of a repeat.")] = 100,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repeats.")] = 3,
    schedules: Annotated[list[str], typer.Option(help="Of megaflow; likewise.")] = DEFAULT_SCHEDULES,
    baseline: Annotated[bool, typer.Option(help="Measure transformers, compiled, too.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the JSON object here too.")] = None,
) -> None:
    """Measure decode time per token over context and batch, and check the tokens of the measured runs."""
    refuse_unknown("--models", models, GEOMETRIES)
    refuse_unknown("--sweeps", sweeps, AXES)
    refuse_unknown("--schedules", schedules, SCHEDULES)
    known = {"context": Sweep("context", context_batches, contexts), "batch": Sweep("batch", batches, [prompt])}
    setting = Setting(new, repeats, schedules, baseline, models, [known[axis] for axis in dict.fromkeys(sweeps)])
    record = begin()
    typer.echo(f"{'setting':<14} {new} steps, median of {repeats} repeats\n")
    typer.echo(header())
    rows = []
    for name in models:
        found = measure_model(name, setting, record["copy_bytes_per_s"])
        rows += [(axis, row) for axis, some in found.items() for row in some]
        release()  # the model before goes before the next is made
    warnings = [f"{axis}: {row.warning}" for axis, row in rows if row.warning]
    record |= {
        "setting": asdict(setting),
        "rows": [asdict(row) | {"sweep": axis, "warning": row.warning} for axis, row in rows],
    }
    end(record, warnings, json_file)


if __name__ == "__main__":
    typer.run(main)
