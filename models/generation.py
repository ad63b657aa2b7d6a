"""Requests: reading prompts, greedy generation over launches of several steps, and sampling."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from megaflow.errors import CapacityError, InputError
from megaflow.models.decoder import Decoder
from megaflow.tasks.select import MAX_EOS

if TYPE_CHECKING:
    from megaflow.models.mega_model import MegaModel

Prompts = torch.Tensor | Sequence[Sequence[int]] | Sequence[torch.Tensor]


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn. `top_k` 0 and `top_p` 1 leave the distribution whole."""

    temperature: float
    top_k: int
    top_p: float
    seed: int | None

    def processors(self) -> LogitsProcessorList:
        """transformers' processors for these settings. Raises InputError for values out of range."""
        if not self.temperature > 0:
            raise InputError(f"temperature is {self.temperature}; it must be 0 (greedy) or above")
        if self.top_k < 0:
            raise InputError(f"top_k is {self.top_k}; it must be 0 (off) or above")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}; it must be above 0 and at most 1 (off)")
        found = LogitsProcessorList([TemperatureLogitsWarper(float(self.temperature))])
        if self.top_k:
            found.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            found.append(TopPLogitsWarper(self.top_p))
        return found


def read_prompts(input_ids: Prompts, attention_mask: torch.Tensor | None, vocab: int) -> list[torch.Tensor]:
    """The prompts as int64 [length] each, padding removed.

    Raises:
        InputError: no sequences, an empty prompt, a token id out of range, a mask of another shape.
    """
    if attention_mask is not None:
        if not isinstance(input_ids, torch.Tensor) or getattr(attention_mask, "shape", None) != input_ids.shape:
            raise InputError("attention_mask needs to be a tensor, and input_ids one of the same shape [B, T]")
        prompts = [row[keep.bool()] for row, keep in zip(input_ids, attention_mask, strict=True)]
    else:
        if isinstance(input_ids, torch.Tensor) and input_ids.dim() != 2:
            raise InputError(f"input_ids has shape {list(input_ids.shape)}; it must be [B, T]")
        prompts = [torch.as_tensor(row) for row in input_ids]
    if not prompts:
        raise InputError("input_ids has no sequences; give at least one prompt")
    for i, prompt in enumerate(prompts):
        if prompt.numel() == 0:
            raise InputError(f"prompt {i} is empty; give at least one token (a begin-of-text token, for instance)")
        if prompt.dim() != 1:
            raise InputError(f"prompt {i} has shape {list(prompt.shape)}; it must be [length]")
        check_ids(prompt, f"prompt {i}", vocab)
    return [prompt.long() for prompt in prompts]


def check_ids(ids: torch.Tensor, what: str, vocab: int) -> None:
    """Raises InputError unless all of `ids` (one at least) are integers from 0 to vocab - 1."""
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise InputError(f"{what}: token ids are {ids.dtype}; give integers")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab:
        bad = low if low < 0 else high
        raise InputError(f"{what}: token id {bad} is out of range; the vocabulary has ids 0 to {vocab - 1}")


def end_tokens(model: "MegaModel", eos: int | list[int] | None, pad: int | None) -> tuple[list[int], int]:
    """The eos ids and the pad id of a request, from its arguments or the generation configuration."""
    if eos is None:
        eos = model.generation_config.eos_token_id
    ends = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    if len(ends) > MAX_EOS:
        raise InputError(f"{len(ends)} eos token ids; at most {MAX_EOS} are possible")
    if pad is None:
        pad = model.generation_config.pad_token_id
    if pad is None:
        pad = ends[0] if ends else 0
    for token in (*ends, pad):
        if not isinstance(token, int) or not -(2**31) <= token < 2**31:
            raise InputError(f"eos or pad token id is {token!r}; it must be an integer of 32 bits")
    return ends, pad


def generate(
    model: "MegaModel",
    decoder: Decoder,
    input_ids: Prompts,
    max_new_tokens: int,
    attention_mask: torch.Tensor | None,
    eos_token_id: int | list[int] | None,
    pad_token_id: int | None,
    sampling: Sampling | None,
) -> torch.Tensor:
    """See MegaModel.generate."""
    prompts = read_prompts(input_ids, attention_mask, model.geometry.vocab)
    longest = max(len(p) for p in prompts)
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens!r}; it must be an integer of at least 1")
    if longest + max_new_tokens > model.max_seq_len:
        raise CapacityError(
            f"prompt of {longest} tokens and {max_new_tokens} new ones need {longest + max_new_tokens} positions, "
            f"max_seq_len is {model.max_seq_len}; ask for fewer or create the model with a larger max_seq_len"
        )
    ends, pad = end_tokens(model, eos_token_id, pad_token_id)
    processors = sampling.processors() if sampling else None
    logits = model.prefill(prompts)
    decoder.set_ends(ends, pad)

    sequences = torch.full((len(prompts), longest), pad, dtype=torch.int64, device=logits.device)
    for row, prompt in zip(sequences, prompts, strict=True):
        row[longest - len(prompt) :] = prompt.to(logits.device)

    end_ids = torch.tensor(ends, dtype=torch.int64, device=logits.device)
    generator = None
    if sampling is not None and sampling.seed is not None:
        generator = torch.Generator(logits.device).manual_seed(sampling.seed)

    def choose(logits: torch.Tensor, so_far: torch.Tensor) -> torch.Tensor:
        if processors is None:
            return logits.argmax(1)
        weights = processors(so_far, logits).softmax(1)
        return torch.multinomial(weights, 1, generator=generator)[:, 0]

    tokens = choose(logits, sequences)
    finished = torch.isin(tokens, end_ids)
    decoder.finish(finished)
    sequences = torch.cat((sequences, tokens[:, None]), 1)
    left = max_new_tokens - 1
    while left and not finished.all():
        if processors is None:
            new = decoder.run(tokens, min(left, decoder.steps_per_launch), model.schedule)
        else:
            decoder.run(tokens, 1, model.schedule)
            new = choose(decoder.logits(), sequences)[:, None]
            new[finished] = pad
        finished = finished | torch.isin(new, end_ids).any(1)
        decoder.finish(finished)
        sequences = torch.cat((sequences, new), 1)
        tokens = new[:, -1]
        left -= new.shape[1]
    return sequences
