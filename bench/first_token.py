"""Time to the first token of a decode step in a new process. bench/start.py runs it; alone, it says what is warm now.

    python bench/first_token.py Qwen3-0.6B [--schedule dynamic]

Weights and prompts are random. Time begins when the weights are packed, and imports are over by then, too. Beyond the
first token a step follows for the first and the last batch size of each kernel. The last line printed is a JSON object.
"""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

import torch
import typer
from common import GEOMETRIES, Qwen3, random_model, refuse_unknown, seconds
from engines import SPARE, Megaflow

from megaflow.backend import triton
from megaflow.models.mega_model import MegaModel
from megaflow.models.tiling import token_tiles
from megaflow.scheduler import SCHEDULES

PROMPT_SEED = 1


@dataclass(frozen=True)
class Start:
    """How a process came to its first token.

    Attributes:
        packing_s: seconds from the call of from_hf to packed weights; they are not part of first_token_s.
        prefill_s, compile_s, planning_s, step_s: of one prompt; of all kernels, read from Triton's cache or compiled;
            of the plan; of the first step.
        first_token_s: their sum.
        compiled, read: kernels until then, by Triton's compiler and from its cache.
        later_s: seconds of a first step, planning included, at other batch sizes, by their names.
        compiled_later: kernels in these.
    """

    packing_s: float
    prefill_s: float
    compile_s: float
    planning_s: float
    step_s: float
    first_token_s: float
    compiled: int
    read: int
    later_s: dict[str, float]
    compiled_later: int


def edges(tiles: tuple[int, ...], largest: int) -> list[int]:
    """Batch sizes from 2 to the largest: the first and the last of each token tile."""
    return sorted(batch for batch in {*tiles, *(tile + 1 for tile in tiles), largest} if 2 <= batch <= largest)


def start(source: Qwen3, schedule: str, max_batch: int, prompt: int) -> Start:
    """Start megaflow from a transformers model. Prompts have `prompt` tokens."""
    kernels: Counter[str] = Counter()
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: kernels.update(["read" if cache_hit else "compiled"])
    packing_s, mega = seconds(
        lambda: MegaModel.from_hf(source, max_batch_size=max_batch, max_seq_len=prompt + 1 + SPARE, progress=False)
    )
    prompts = torch.randint(
        mega.geometry.vocab, (max_batch, prompt), generator=torch.Generator().manual_seed(PROMPT_SEED)
    ).to(mega.device)
    engine = Megaflow(mega, schedule)

    prefill_s, first = seconds(lambda: engine.prefill(prompts[:1]))
    compile_s, _ = seconds(lambda: mega.decoder.compile(mega.schedule.modes))
    planning_s, _ = seconds(lambda: mega.decoder.plan(mega.schedule))
    step_s, _ = seconds(lambda: engine.decode(first, 1))
    compiled, read = kernels["compiled"], kernels["read"]

    later_s = {}
    for batch in edges(token_tiles(mega.geometry), max_batch):
        first = engine.prefill(prompts[:batch])
        later_s[str(batch)], _ = seconds(partial(engine.decode, first, 1))
    return Start(
        packing_s=packing_s,
        prefill_s=prefill_s,
        compile_s=compile_s,
        planning_s=planning_s,
        step_s=step_s,
        first_token_s=prefill_s + compile_s + planning_s + step_s,
        compiled=compiled,
        read=read,
        later_s=later_s,
        compiled_later=kernels["compiled"] - compiled,
    )


def main(
    model: Annotated[str, typer.Argument(help="Geometry.")],
    schedule: Annotated[str, typer.Option(help="Of megaflow.")] = "static",
    max_batch: Annotated[int, typer.Option(min=1, max=128, help="max_batch_size.")] = 64,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
) -> None:
    """Start one model and print how long that took."""
    refuse_unknown("MODEL", [model], GEOMETRIES)
    refuse_unknown("--schedule", [schedule], SCHEDULES)
    typer.echo(json.dumps(asdict(start(random_model(model), schedule, max_batch, prompt))))


if __name__ == "__main__":
    typer.run(main)
