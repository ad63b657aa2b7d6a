"""A picture of one layer: which worker ran what when, from a file that `megaflow trace --out` wrote.

    python bench/timeline.py out.json --layer 3 --png layer.png

Workers go up, time goes to the right. Tasks are coloured by operator; prepare is dark, waiting is grey. Tasks of the
neighbouring layers that run at the same time are pale. Needs matplotlib: pip install '.[bench]'.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

PREPARE, WAIT = "prepare", "wait"
PHASE_COLOURS = {PREPARE: "#404040", WAIT: "#d0d0d0"}


@dataclass(frozen=True)
class Slice:
    """What a worker did from `start` on for `length`, both in us; `name` is an operator without its layer, or a phase.

    `inside` says whether the task is one of the layer.
    """

    worker: int
    start: float
    length: float
    name: str
    inside: bool


def layer_slices(path: Path, layer: int, step: int | None = None) -> list[Slice]:
    """The slices from the first run of a layer's tasks to their last end, all workers'; times from that first run.

    Args:
        step: the latest in the file by default.
    Raises:
        typer.BadParameter: the file has no such layer or step.
    """
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    if step is None:
        step = max((event["args"]["step"] for event in events), default=0)
    prefix = f"layers.{layer}."

    def inside(event: dict) -> bool:
        return event["args"]["step"] == step and event["args"]["operator"].startswith(prefix)

    runs = [event for event in events if event["cat"] == "run" and inside(event)]
    if not runs:
        raise typer.BadParameter(f"{path} has no tasks of layer {layer} in step {step}")
    first = min(event["ts"] for event in runs)
    last = max(event["ts"] + event["dur"] for event in runs)

    def clipped() -> Iterator[Slice]:
        for event in events:
            start, stop = max(event["ts"], first), min(event["ts"] + event["dur"], last)
            if stop > start:
                yield Slice(event["tid"], start - first, stop - start, event["name"], inside(event))

    return list(clipped())


def draw(slices: list[Slice], title: str, png: Path) -> None:
    """Draw slices and save the picture."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    by_start = sorted(slices, key=lambda s: s.start)
    operators = list(dict.fromkeys(s.name for s in by_start if s.inside and s.name not in PHASE_COLOURS))
    operators += [name for name in dict.fromkeys(s.name for s in by_start) if name not in (*operators, *PHASE_COLOURS)]
    colours = PHASE_COLOURS | {name: f"C{i}" for i, name in enumerate(operators)}
    figure, axes = pyplot.subplots(figsize=(12, 6), layout="constrained")
    for name in (*operators, PREPARE, WAIT):
        for here in (True, False):
            chosen = [s for s in slices if s.name == name and s.inside == here]
            axes.barh(
                [s.worker for s in chosen],
                [s.length for s in chosen],
                height=1.0,
                left=[s.start for s in chosen],
                color=colours[name],
                linewidth=0,
                alpha=1.0 if here else 0.3,
                label=name if here else None,
            )
    axes.set(xlabel="time in us", ylabel="worker", title=title)
    axes.margins(0)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(png, dpi=120)
    pyplot.close(figure)


def main(
    trace: Annotated[Path, typer.Argument(help="What `megaflow trace --out` wrote.", exists=True, dir_okay=False)],
    layer: Annotated[int, typer.Option(min=0)] = 0,
    step: Annotated[int | None, typer.Option(min=0, show_default="the last")] = None,
    png: Annotated[Path, typer.Option(help="The picture to write.")] = Path("layer.png"),
    title: Annotated[str | None, typer.Option(show_default="the layer")] = None,
) -> None:
    """Draw one layer's timeline."""
    draw(layer_slices(trace, layer, step), title or f"layer {layer}", png)


if __name__ == "__main__":
    typer.run(main)
