"""Schedules: from a program of tiled operators to a plan."""

from collections.abc import Mapping

from megaflow.errors import ScheduleError
from megaflow.scheduler.auto import Auto
from megaflow.scheduler.context import Context
from megaflow.scheduler.dynamic import Dynamic
from megaflow.scheduler.policies import Hybrid, Static, Unfused
from megaflow.scheduler.program import Program
from megaflow.scheduler.schedule import Schedule

SCHEDULES: Mapping[str, Schedule] = {
    "static": Static(),
    "dynamic": Dynamic(),
    "hybrid": Hybrid(),
    "unfused": Unfused(),
    "auto": Auto(),
}


def find_schedule(schedule: str | Schedule) -> Schedule:
    """A schedule by its name; one that is given is returned. Raises ScheduleError, which lists the names there are."""
    if isinstance(schedule, Schedule):
        return schedule
    if schedule not in SCHEDULES:
        raise ScheduleError(
            f"schedule {schedule!r} is unknown; choose one of {', '.join(SCHEDULES)}, or give a Schedule"
        )
    return SCHEDULES[schedule]


__all__ = [
    "SCHEDULES",
    "Auto",
    "Context",
    "Dynamic",
    "Hybrid",
    "Program",
    "Schedule",
    "Static",
    "Unfused",
    "find_schedule",
]
