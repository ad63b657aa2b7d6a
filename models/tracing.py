"""A trace to look at, of a model that decodes random prompts."""

from pathlib import Path

import torch

from megaflow.models.mega_model import MegaModel
from megaflow.trace import Trace


def trace_random_prompts(
    model: MegaModel, batch: int, prompt_length: int, steps: int, path: str | Path | None = None
) -> Trace:
    """Trace `steps` greedy decode steps of `batch` sequences that begin with `prompt_length` random tokens each.

    One step before is traced for nothing: it compiles the kernel, and the first launch after that is slow.

    Args:
        path: of a file for ui.perfetto.dev.
    Raises:
        InputError, CapacityError: as MegaModel.trace and generate.
    """
    seed = torch.Generator().manual_seed(0)
    prompts = torch.randint(model.geometry.vocab, (batch, prompt_length), generator=seed)
    with model.trace():
        model.generate(prompts, 2, eos_token_id=[])
    with model.trace(path) as trace:
        model.generate(prompts, 1 + steps, eos_token_id=[])  # the prefill gives the first
    return trace
