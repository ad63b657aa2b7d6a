"""TPOT: milliseconds of a decode step, of megaflow and of transformers with a static cache and torch.compile.

    python bench/tpot.py [--models Qwen3-0.6B] [--batches 1 --batches 8] [--json FILE]

Weights and prompts are random. How a time is taken and checked, measuring.py says.

The last line printed is a JSON object with every number; the exit code is 1 if megaflow failed or is less accurate than
it should be.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from checking import Reference, float32_copy
from common import GEOMETRIES, begin, end, random_model, refuse_unknown, release, seconds
from engines import SPARE
from measuring import BASELINE, Method, Row, Subject, header, measure_point

from megaflow.models.mega_model import MegaModel
from megaflow.scheduler import SCHEDULES

MODELS = ["Qwen3-0.6B", "Qwen3-8B"]
BATCHES = [1, 8]
ALL_SCHEDULES = list(SCHEDULES)


@dataclass(frozen=True)
class Setting(Method):
    """What is measured. `prompt`: tokens of a prompt."""

    models: list[str]
    batches: list[int]
    prompt: int


@dataclass(frozen=True)
class ModelReport:
    """All about one model. `packing_s`: seconds from the call of from_hf to packed weights."""

    model: str
    packing_s: float
    first_step_s: float | None
    rows: list[Row]


def measure_model(name: str, setting: Setting, bandwidth: float) -> ModelReport:
    """Measure one model in all engines and print a line for each."""
    source = random_model(name)
    positions = setting.prompt + setting.new + SPARE
    packing_s, mega = seconds(
        lambda: MegaModel.from_hf(source, max_batch_size=max(setting.batches), max_seq_len=positions, progress=False)
    )
    subject = Subject(name, source, mega, Reference(float32_copy(source), source))
    rows = []
    for batch in setting.batches:
        rows += measure_point(subject, batch, setting.prompt, setting, bandwidth)
    first = next((row.result for row in rows if row.engine != BASELINE and row.result), None)
    return ModelReport(name, packing_s, first.first_step_s if first else None, rows)


def cold_start_line(report: ModelReport) -> str:
    """How long it took until the first token."""
    step = "failed" if report.first_step_s is None else f"{report.first_step_s:.2f} s"
    return f"{report.model} cold start: weights packed in {report.packing_s:.2f} s, first decode step {step}"


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
    setting = Setting(new, repeats, schedules, baseline, models, batches, prompt)
    record = begin()
    typer.echo(f"{'setting':<14} prompts of {prompt} tokens, {new} steps, median of {repeats} repeats\n")
    typer.echo(header())
    reports = []
    for name in models:
        reports.append(measure_model(name, setting, record["copy_bytes_per_s"]))
        release()  # the model before goes before the next is made
    typer.echo()
    for report in reports:
        typer.echo(cold_start_line(report))
    warnings = [row.warning for report in reports for row in report.rows if row.warning]
    end(record | {"setting": asdict(setting), "models": [asdict(report) for report in reports]}, warnings, json_file)


if __name__ == "__main__":
    typer.run(main)
