"""Schedules: from a task graph to a plan."""

from collections.abc import Callable, Mapping

from megaflow.errors import ScheduleError
from megaflow.plan import Plan
from megaflow.scheduler.dynamic import dynamic_plan
from megaflow.scheduler.static import static_plan
from megaflow.taskgraph import TaskGraph

Scheduler = Callable[[TaskGraph, int, Mapping[str, int]], Plan]
SCHEDULES: Mapping[str, Scheduler] = {"static": static_plan, "dynamic": dynamic_plan}


def scheduler(name: str) -> Scheduler:
    """The schedule of that name. Raises ScheduleError, which lists the names there are."""
    if name not in SCHEDULES:
        raise ScheduleError(f"schedule {name!r} is unknown; choose one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


__all__ = ["SCHEDULES", "Scheduler", "dynamic_plan", "scheduler", "static_plan"]
