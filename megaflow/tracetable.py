"""What the command trace prints: the time of a step by operator."""

from dataclasses import asdict
from typing import Any

import typer

from megaflow.trace import OperatorTime, Trace
from megaflow.tracedlaunch import PHASES


def trace_facts(trace: Trace) -> dict[str, Any]:
    """The table as plain data, for JSON: the rows of Trace.by_operator and what they are of."""
    return {
        "unit": trace.unit,
        "steps": trace.steps,
        "step_time": trace.step_time,
        "operators": [asdict(row) for row in trace.by_operator()],
    }


def print_trace(trace: Trace) -> None:
    """Print the table and the time of a step."""
    head = ("operator", "tiles", f"{trace.unit}/step", *PHASES, "active", "bytes read", "GB/s")
    rows = [head, *map(cells, trace.by_operator())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *numbers in rows:
        line = [name.ljust(widths[0]), *(n.rjust(width) for n, width in zip(numbers, widths[1:], strict=True))]
        typer.echo("  ".join(line))
    workers = trace.launches[-1].plan.workers
    typer.echo(
        f"\none step: {trace.step_time:,.1f} {trace.unit}, the mean of {trace.steps}; "
        f"the operators' times are means over {workers} worker{'s' * (workers != 1)}"
    )


def cells(row: OperatorTime) -> tuple[str, ...]:
    """A row in words; bounds are marked."""
    bound = "<= " if row.at_most else ""
    return (
        row.name,
        f"{row.tiles:,}",
        f"{row.time:,.1f}",
        *(f"{getattr(row, phase):.0%}" for phase in PHASES),
        f"{row.active:,.1f}",
        f"{bound}{row.bytes:,}",
        "-" if row.bandwidth is None else f"{bound}{row.bandwidth / 1e9:,.0f}",
    )
