"""Tuning: the candidates of a schedule are timed on the device, and the fastest is remembered in a file."""

import json
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import megaflow
from megaflow.errors import PlanError, ScheduleError
from megaflow.scheduler import Auto, Schedule
from megaflow.scheduler.auto import first_of_best

REPEATS = 5


def tuned(auto: Auto, setting: str, seconds: Callable[[Schedule], float]) -> Schedule:
    """The fastest candidate, as remembered or as timed now.

    Args:
        setting: device, model and batch, in words; timings are remembered under it, the candidates' fields and
            megaflow's version.
        seconds: times one launch of a candidate.
    Raises:
        ScheduleError, PlanError: no candidate can plan the program.
    """
    path = auto.file or default_file()
    by_name = {repr(candidate): candidate for candidate in auto.candidates}
    key = f"megaflow {megaflow.__version__}, {setting}, {', '.join(by_name)}"
    entry = read_entries(path).get(key)
    remembered = entry.get("schedule") if isinstance(entry, dict) else None
    if isinstance(remembered, str) and remembered in by_name:
        return by_name[remembered]
    times = median_seconds(auto.candidates, seconds)
    fastest = first_of_best(times)
    milliseconds = {repr(candidate): round(1e3 * time, 4) for candidate, time in times.items()}
    remember(path, key, {"schedule": repr(fastest), "milliseconds_per_step": milliseconds})
    return fastest


def median_seconds(
    candidates: tuple[Schedule, ...], seconds: Callable[[Schedule], float]
) -> dict[Schedule, float]:
    """The median time of each candidate that can plan the program, after a launch that warms up.

    They take turns, so that a clock that drifts favours none.
    """
    able: list[Schedule] = []
    failure: ScheduleError | PlanError | None = None
    for candidate in candidates:
        try:
            seconds(candidate)
            able.append(candidate)
        except (ScheduleError, PlanError) as error:
            failure = error
    if failure is not None and not able:
        raise failure
    rounds = [[seconds(candidate) for candidate in able] for _ in range(REPEATS)]
    return {candidate: statistics.median(times) for candidate, *times in zip(able, *rounds, strict=True)}


def default_file() -> Path:
    """megaflow/tuning.json in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megaflow" / "tuning.json"


def read_entries(path: Path) -> dict[str, Any]:
    """What the file says; nothing if it is missing, damaged or something else."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def remember(path: Path, key: str, entry: Mapping[str, Any]) -> None:
    """Add an entry to the file, which readers find as it was or as it will be. Warns if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(read_entries(path) | {key: entry}, indent=1)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            new = Path(folder) / path.name
            new.write_text(text + "\n", encoding="utf-8")
            os.replace(new, path)
    except OSError as error:
        warnings.warn(f"{path}: the fastest schedule cannot be remembered ({error})", stacklevel=2)
