"""Plots of what sensitivity.py has measured, from its JSON object.

    python bench/plots.py FILE DIR

Rows that have failed, or whose check has, are left out. Needs matplotlib, which the extra `bench` has.
"""

import json
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

import typer

TITLES = {"context": "TPOT over context", "batch": "TPOT and throughput over batch"}
LABELS = {"context": "tokens of each prompt", "batch": "sequences"}
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")  # colour-blind people see them
STYLES = tuple(zip(COLORS, "osD^vPX", strict=True))  # colour, marker
FAR_APART = 10  # times the smallest value: a scale from zero would hide the small ones


@dataclass(frozen=True)
class Series:
    """A line of a plot, from left to right.

    Attributes:
        at: places on the axis.
        tpot_ms, floor_ms, tokens_per_s: at each of them.
    """

    label: str
    at: tuple[int, ...]
    tpot_ms: tuple[float, ...]
    floor_ms: tuple[float, ...]
    tokens_per_s: tuple[float, ...]


def series(rows: list[dict[str, Any]], axis: str) -> list[Series]:
    """The lines over an axis: one for each model, engine and other place, of what was measured and is right."""
    other = {"context": "batch", "batch": "context"}[axis]
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["sweep"] == axis and row["result"] is not None and row["warning"] is None:
            lines.setdefault(f"{row['model']}, {row['engine']}, {other} {row[other]}", []).append(row)
    found = []
    for label, points in lines.items():
        points.sort(key=lambda row: row[axis])
        columns = (tuple(row["result"][name] for row in points) for name in ("tpot_ms", "floor_ms", "tokens_per_s"))
        found.append(Series(label, tuple(row[axis] for row in points), *columns))
    return found


def caption(record: dict[str, Any]) -> str:
    """Where and how the record's times were measured."""
    where, setting = record["environment"], record["setting"]
    return (
        f"{where['device']}, commit {where['commit'][:9]}, bfloat16, "
        f"{setting['new']} greedy steps, median of {setting['repeats']}"
    )


def draw(record: dict[str, Any], directory: Path) -> list[Path]:
    """Write tpot_over_context.png and tpot_over_batch.png, if there is something to show in them.

    Args:
        record: sensitivity.py's JSON object.
        directory: is made if there is none.
    Returns:
        The files that were written.
    """
    from matplotlib.figure import Figure  # optional: who only measures needs none

    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for axis, panels in (("context", 1), ("batch", 2)):
        lines = series(record["rows"], axis)
        if not lines:
            continue
        figure = Figure(figsize=(7.2 * panels, 5.4), layout="constrained")
        time, *rate = figure.subplots(1, panels, squeeze=False)[0]
        draw_lines(time, lines, axis, "TPOT in ms", [line.tpot_ms for line in lines])
        draw_floors(time, lines)
        for panel in rate:
            draw_lines(panel, lines, axis, "tokens/s of all sequences", [line.tokens_per_s for line in lines])
        figure.suptitle(f"{TITLES[axis]}\n{caption(record)}", fontsize=11)
        for panel in (time, *rate):
            panel.legend(fontsize=8)
        written.append(directory / f"tpot_over_{axis}.png")
        figure.savefig(written[-1], dpi=150)
    return written


def draw_lines(panel: Any, lines: list[Series], axis: str, quantity: str, values: list[tuple[float, ...]]) -> None:
    """Draw a quantity of each series, with ticks at the places that were measured.

    The scale across is logarithmic; that upwards begins at zero, or is logarithmic too where values are far apart.
    """
    for line, heights, (color, marker) in zip(lines, values, cycle(STYLES)):
        panel.plot(line.at, heights, color=color, marker=marker, linewidth=1.8, label=line.label)
    places = sorted({place for line in lines for place in line.at})
    panel.set_xscale("log", base=2)
    panel.set_xticks(places, [f"{place:,}" for place in places])
    panel.set_xticks([], minor=True)
    if max(map(max, values)) < FAR_APART * min(map(min, values)):
        panel.set_ylim(bottom=0)
    else:
        panel.set_yscale("log")
        for each in (panel.yaxis.set_major_formatter, panel.yaxis.set_minor_formatter):
            each(lambda value, _: f"{value:,g}" if f"{value:e}"[0] in "125" else "")
    panel.grid(which="both", color="#dddddd", linewidth=0.6)
    panel.set_xlabel(LABELS[axis])
    panel.set_ylabel(quantity)


def draw_floors(panel: Any, lines: list[Series]) -> None:
    """Draw the floor of each series in its colour; the first is on top, where several have the same."""
    for line, (color, _) in reversed(list(zip(lines, cycle(STYLES)))):
        panel.plot(line.at, line.floor_ms, color=color, linestyle="--", linewidth=1.2)
    panel.plot([], [], color="#555555", linestyle="--", linewidth=1.2, label="floors: bytes to read / copy bandwidth")


def main(
    file: Annotated[Path, typer.Argument(help="What sensitivity.py --json has written.")],
    directory: Annotated[Path, typer.Argument(help="For the plots.")],
) -> None:
    """Draw the plots of a record."""
    for path in draw(json.loads(file.read_text()), directory):
        typer.echo(path)


if __name__ == "__main__":
    typer.run(main)
