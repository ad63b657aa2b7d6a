"""Requests: reading prompts, greedy generation over launches of several steps, and sampling."""

from collections.abc import Sequence

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from megaflow.errors import CapacityError, InputError
from megaflow.models.decoder import Decoder
from megaflow.scheduler import Schedule
from megaflow.tasks.select import MAX_EOS

Prompts = torch.Tensor | Sequence[Sequence[int]] | Sequence[torch.Tensor]


class Sampler:
    """Draws tokens by transformers' logits processors. `top_k` 0 and `top_p` 1 leave the distribution whole.

    Raises:
        InputError: for values out of range.
    """

    def __init__(self, temperature: float, top_k: int, top_p: float, seed: int | None, device: torch.device) -> None:
        if not temperature > 0:
            raise InputError(f"temperature is {temperature}; it must be 0 (greedy) or above")
        if top_k < 0:
            raise InputError(f"top_k is {top_k}; it must be 0 (off) or above")
        if not 0 < top_p <= 1:
            raise InputError(f"top_p is {top_p}; it must be above 0 and at most 1 (off)")
        self._processors = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))])
        if top_k:
            self._processors.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            self._processors.append(TopPLogitsWarper(top_p))
        self._generator = None if seed is None else torch.Generator(device).manual_seed(seed)

    def choose(self, logits: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
        """The next tokens, int64 [B], from logits [B, vocab] and the sequences so far [B, T]."""
        weights = self._processors(sequences, logits).softmax(1)
        return torch.multinomial(weights, 1, generator=self._generator)[:, 0]


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


def check_length(prompts: Sequence[torch.Tensor], max_new_tokens: int, max_seq_len: int) -> None:
    """Raises InputError or CapacityError unless so many new tokens can follow the longest prompt."""
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens!r}; it must be an integer of at least 1")
    longest = max(len(p) for p in prompts)
    if longest + max_new_tokens > max_seq_len:
        raise CapacityError(
            f"prompt of {longest} tokens and {max_new_tokens} new ones need {longest + max_new_tokens} positions, "
            f"max_seq_len is {max_seq_len}; ask for fewer or create the model with a larger max_seq_len"
        )


def end_tokens(
    config: GenerationConfig, eos: int | list[int] | None = None, pad: int | None = None
) -> tuple[list[int], int]:
    """The eos ids and the pad id of a request, from its arguments or the generation configuration."""
    if eos is None:
        eos = config.eos_token_id
    ends = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    if len(ends) > MAX_EOS:
        raise InputError(f"{len(ends)} eos token ids; at most {MAX_EOS} are possible")
    if pad is None:
        pad = config.pad_token_id
    if pad is None:
        pad = ends[0] if ends else 0
    for token in (*ends, pad):
        if not isinstance(token, int) or not -(2**31) <= token < 2**31:
            raise InputError(f"eos or pad token id is {token!r}; it must be an integer of 32 bits")
    return ends, pad


def continue_prompts(
    decoder: Decoder,
    schedule: Schedule,
    prompts: Sequence[torch.Tensor],
    logits: torch.Tensor,
    max_new_tokens: int,
    ends: Sequence[int],
    pad: int,
    sampler: Sampler | None,
) -> torch.Tensor:
    """Generate after a prefill.

    Args:
        logits: float32 [B, vocab], of the prefill.
        sampler: None for greedy tokens, several steps a launch.
    Returns:
        int64 [B, longest prompt + new], prompts padded on the left.
    """
    longest = max(len(p) for p in prompts)
    sequences = torch.full((len(prompts), longest), pad, dtype=torch.int64, device=logits.device)
    for row, prompt in zip(sequences, prompts, strict=True):
        row[longest - len(prompt) :] = prompt.to(logits.device)
    end_ids = torch.tensor(ends, dtype=torch.int64, device=logits.device)

    tokens = sampler.choose(logits, sequences) if sampler else logits.argmax(1)
    finished = torch.isin(tokens, end_ids)
    decoder.finish(finished)
    sequences = torch.cat((sequences, tokens[:, None]), 1)
    left = max_new_tokens - 1
    while left and not finished.all():
        if sampler is None:
            new = decoder.run(tokens, min(left, decoder.steps_per_launch), schedule)
            finished = finished | torch.isin(new, end_ids).any(1)
        else:
            decoder.run(tokens, 1, schedule)
            new = sampler.choose(decoder.logits(), sequences)[:, None]
            new[finished] = pad
            finished = finished | torch.isin(new[:, 0], end_ids)
            decoder.finish(finished)  # the device has looked for an end among its own, greedy, choices
        sequences = torch.cat((sequences, new), 1)
        tokens = new[:, -1]
        left -= new.shape[1]
    return sequences
