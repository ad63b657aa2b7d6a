"""Traced launches as Chrome trace events, the JSON that ui.perfetto.dev and chrome://tracing open."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megaflow.tracedlaunch import TracedLaunch, kind_of

PROCESS = 0


def events(launches: Sequence[TracedLaunch], ticks_per_us: int) -> Iterator[dict[str, Any]]:
    """A track for each worker, and a slice for each phase of a task, its run named after the operator.

    Times are in us from the first start. A step's number counts the steps of all launches.
    """
    if not launches:
        return
    yield {"name": "process_name", "ph": "M", "pid": PROCESS, "args": {"name": "megaflow"}}
    yield from tracks(launches)
    origin, first_step = int(launches[0].start.min()), 0
    for launch in launches:
        yield from slices(launch, origin, first_step, ticks_per_us)
        first_step += launch.steps


def tracks(launches: Sequence[TracedLaunch]) -> Iterator[dict[str, Any]]:
    """The names of the workers' tracks; the SM is in it where it is the same in all launches."""
    sms: dict[int, set[int]] = defaultdict(set)
    for launch in launches:
        for worker, sm in np.unique(np.stack((launch.worker, launch.sm), 2).reshape(-1, 2), axis=0).tolist():
            sms[worker].add(sm)
    for worker in range(max(launch.plan.workers for launch in launches)):
        where = f", SM {min(sms[worker])}" if len(sms[worker]) == 1 else ""
        track = {"ph": "M", "pid": PROCESS, "tid": worker}
        yield {"name": "thread_name", **track, "args": {"name": f"worker {worker}{where}"}}
        yield {"name": "thread_sort_index", **track, "args": {"sort_index": worker}}


def slices(launch: TracedLaunch, origin: int, first_step: int, ticks_per_us: int) -> Iterator[dict[str, Any]]:
    """The phases of all tasks of a launch, those of no length left out."""
    graph = launch.plan.graph
    operators = [graph.operators[i] for i in graph.operator]
    tiles = [point[: len(op.grid)] for op, point in zip(operators, graph.coordinates.tolist(), strict=True)]
    kinds = {op.name: kind_of(op) for op in graph.operators}
    times = np.stack((launch.start, launch.wait_start, launch.run_start, launch.end), 2) - origin
    for step in range(launch.steps):
        where = zip(launch.worker[step].tolist(), launch.sm[step].tolist(), times[step].tolist(), strict=True)
        for task, (worker, sm, (start, wait_start, run_start, end)) in enumerate(where):
            op = operators[task].name
            args = {"operator": op, "tile": tiles[task], "task": task, "step": first_step + step, "sm": sm}
            for name, phase, begin, stop in (
                ("prepare", "prepare", start, wait_start),
                ("wait", "wait", wait_start, run_start),
                (kinds[op], "run", run_start, end),
            ):
                if stop > begin:
                    time = {"ts": begin / ticks_per_us, "dur": (stop - begin) / ticks_per_us}
                    yield {"name": name, "cat": phase, "ph": "X", "pid": PROCESS, "tid": worker, **time, "args": args}


def write_events(path: str | Path, launches: Sequence[TracedLaunch], ticks_per_us: int) -> None:
    """Write the events to a file, one a line; some 25 MB for 40,000 tasks."""
    with open(path, "w") as file:
        file.write('{"displayTimeUnit": "ns", "traceEvents": [')
        for i, event in enumerate(events(launches, ticks_per_us)):
            file.write(",\n" if i else "\n")
            file.write(json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")
