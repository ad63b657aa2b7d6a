"""Cold and warm start: seconds from packed weights to the first token of a decode step.

    python bench/start.py [--models Qwen3-0.6B] [--schedules dynamic] [--json FILE]

Each model is started twice, each time in a new process (bench/first_token.py): with an empty cache of compiled kernels,
and with the one that the first process has left. Imports and the packing of weights come before and do not count.
Kernels of all batch sizes are compiled, or read, before the first token; "later" is the longest first step of another
batch size after it, planning included.

The last line printed is a JSON object with every number; the exit code is 1 if a start failed, a warm one compiled
something or took more than 5 s, or something was compiled after the first token.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from common import GEOMETRIES, attempt, begin, end, refuse_unknown
from first_token import Start

from megaflow.scheduler import SCHEDULES

MODELS = ["Qwen3-0.6B", "Qwen3-8B"]
DEFAULT_SCHEDULES = ["static"]
LONGEST_WARM_START_S = 5.0
COLD, WARM = "cold", "warm"


@dataclass(frozen=True)
class Setting:
    """What is measured. `prompt`: tokens of a prompt; `timeout_s`: most seconds of a process."""

    models: list[str]
    schedules: list[str]
    max_batch: int
    prompt: int
    timeout_s: int


@dataclass(frozen=True)
class Row:
    """A line of the table: which start, and what was found or what went wrong."""

    model: str
    schedule: str
    cache: str
    result: Start | None
    error: str | None

    @property
    def warnings(self) -> list[str]:
        """What is wrong with this start."""
        where = f"{self.model}, {self.schedule}, {self.cache}"
        if self.result is None:
            return [f"{where}: {self.error}"]
        found = []
        if self.cache == WARM and self.result.compiled:
            found.append(f"{where}: {self.result.compiled} kernels were compiled again")
        if self.cache == WARM and self.result.first_token_s > LONGEST_WARM_START_S:
            found.append(f"{where}: {self.result.first_token_s:.2f} s are more than {LONGEST_WARM_START_S:g}")
        if self.result.compiled_later:
            found.append(f"{where}: {self.result.compiled_later} kernels were compiled after the first token")
        return found


def in_new_process(model: str, schedule: str, setting: Setting, cache: str) -> Start:
    """Start a model in a process of its own, with Triton's cache in the directory `cache`.

    Raises:
        subprocess.SubprocessError: it failed (it has said why on stderr) or took too long; it has ended.
    """
    command = [
        sys.executable, str(Path(__file__).parent / "first_token.py"), model, "--schedule", schedule,
        "--max-batch", str(setting.max_batch), "--prompt", str(setting.prompt),
    ]  # fmt: skip
    environment = os.environ | {"TRITON_CACHE_DIR": cache}
    run = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=environment, timeout=setting.timeout_s, check=True
    )
    return Start(**json.loads(run.stdout.splitlines()[-1]))


COLUMNS = ("packing", "prefill", "compile", "planning", "step", "first token", "later", "compiled", "read")


def table_line(model: str, schedule: str, cache: str, *numbers: str) -> str:
    """A line of the table."""
    return f"{model:<13} {schedule:<9} {cache:<5}" + "".join(f" {number:>11}" for number in numbers)


def row_line(row: Row) -> str:
    """The line of a row."""
    if row.result is None:
        return table_line(row.model, row.schedule, row.cache) + f"  failed: {row.error}"
    found = row.result
    later = max(found.later_s.values(), default=0.0)
    times = (
        found.packing_s, found.prefill_s, found.compile_s, found.planning_s, found.step_s, found.first_token_s, later,
    )  # fmt: skip
    numbers = (*(f"{time:.3f}" for time in times), str(found.compiled), str(found.read))
    return table_line(row.model, row.schedule, row.cache, *numbers)


def main(
    models: Annotated[list[str], typer.Option(help="Geometry; may be given several times.")] = MODELS,
    schedules: Annotated[list[str], typer.Option(help="Of megaflow; likewise.")] = DEFAULT_SCHEDULES,
    max_batch: Annotated[int, typer.Option(min=1, max=128, help="max_batch_size.")] = 64,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    timeout: Annotated[int, typer.Option(min=1, help="Most seconds of a process.")] = 300,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the JSON object here too.")] = None,
) -> None:
    """Measure cold and warm start."""
    refuse_unknown("--models", models, GEOMETRIES)
    refuse_unknown("--schedules", schedules, SCHEDULES)
    setting = Setting(models, schedules, max_batch, prompt, timeout)
    record = begin()
    typer.echo(f"{'setting':<14} prompts of {prompt} tokens, max_batch_size {max_batch}; seconds\n")
    typer.echo(table_line("model", "schedule", "cache", *COLUMNS))
    rows = []
    for model in models:
        for schedule in schedules:
            with tempfile.TemporaryDirectory() as cache:
                for state in (COLD, WARM):
                    result, error = attempt(partial(in_new_process, model, schedule, setting, cache))
                    rows.append(Row(model, schedule, state, result, error))
                    typer.echo(row_line(rows[-1]))
    warnings = [warning for row in rows for warning in row.warnings]
    end(record | {"setting": asdict(setting), "starts": [asdict(row) for row in rows]}, warnings, json_file)


if __name__ == "__main__":
    typer.run(main)
