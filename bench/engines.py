"""What the benchmarks of decode steps time: megaflow, and transformers with a static cache and torch.compile."""

from dataclasses import dataclass
from typing import Protocol

import torch
from common import Qwen3
from torch._dynamo.utils import counters
from transformers import StaticCache

from megaflow.models.mega_model import MegaModel
from megaflow.scheduler import Schedule

Past = list[tuple[torch.Tensor, torch.Tensor]]  # by layer: keys and values, [n, KV heads, length, head_dim]

SPARE = 1  # positions of the caches beyond those that are used


class Engine(Protocol):
    """Something that decodes greedily."""

    def prefill(self, prompts: torch.Tensor) -> torch.Tensor:
        """Start new sequences, int64 [B, T]. Returns their first tokens, int64 [B]."""

    def decode(self, first: torch.Tensor, steps: int) -> torch.Tensor:
        """Append `first`, then what each step chooses. Returns the choices, int64 [B, steps]."""

    def restart(self) -> None:
        """Forget what was decoded; the prompts stay in the cache."""

    def past(self, first: int, end: int) -> Past:
        """What the cache has of the prompts of sequences `first` to `end`, which is not among them."""

    def logits(self) -> torch.Tensor | None:
        """float32 [B, vocab]: logits of the latest step, if they are kept."""

    def compilation(self) -> dict[str, int]:
        """What torch.compile counted, by its own names."""


class Megaflow:
    """A MegaModel in one schedule; the steps are run as MegaModel.generate runs them."""

    def __init__(self, model: MegaModel, schedule: str | Schedule) -> None:
        self._model = model
        self._decoder = model.decoder
        self._lengths: list[int] = []
        model.set_schedule(schedule)

    def prefill(self, prompts: torch.Tensor) -> torch.Tensor:
        logits = self._model.prefill(prompts)
        self._lengths = [prompts.shape[1]] * len(prompts)
        self._decoder.set_ends([], 0)
        return logits.argmax(1)

    def decode(self, first: torch.Tensor, steps: int) -> torch.Tensor:
        decoder, tokens, launches, left = self._decoder, first, [], steps
        while left:
            new = decoder.run(tokens, min(left, decoder.steps_per_launch), self._model.schedule)
            launches.append(new)
            tokens = new[:, -1]
            left -= new.shape[1]
        return torch.cat(launches, 1)

    def restart(self) -> None:
        self._decoder.rewind(self._lengths)

    def past(self, first: int, end: int) -> Past:
        buffers, length = self._decoder.buffers, self._lengths[first]

        def cached(name: str) -> torch.Tensor:
            size = buffers[name].shape[2]
            pages = buffers["block_table"][first:end, : -(-length // size)]
            return buffers[name][pages].transpose(1, 2).flatten(2, 3)[:, :, :length]

        layers = range(self._model.geometry.layers)
        return [(cached(f"layers.{layer}.k_cache"), cached(f"layers.{layer}.v_cache")) for layer in layers]

    def logits(self) -> torch.Tensor:
        return self._decoder.logits()

    def compilation(self) -> dict[str, int]:
        return {}


def greedy_step(model: Qwen3, cache: StaticCache, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Append tokens [B, 1] at position [1, 1] and choose the next ones, [B, 1]; prompts [B, T] likewise."""
    logits = model(
        input_ids=tokens, position_ids=position, past_key_values=cache, use_cache=True, logits_to_keep=1
    ).logits
    return logits[:, -1].argmax(-1, keepdim=True)


class StaticCacheLoop:
    """transformers with a StaticCache: eager prefill, then one compiled function call a step.

    The cache, its length and the weights are tensors of fixed addresses to torch.compile, so a step replays
    one CUDA graph with two copied inputs. The mask is made inside it, from the cache's length; generate
    makes it outside.
    """

    def __init__(self, model: Qwen3, prompt: int, steps: int) -> None:
        counters.clear()
        self._model = model
        self._prompt = prompt
        self._cache = StaticCache(config=model.config, max_cache_len=prompt + steps + SPARE)
        # tensors of their own, not views of one: the compiled code relies on the alignment of the first
        self._positions = [torch.full((1, 1), prompt + step, device=model.device) for step in range(steps)]
        self._step = torch.compile(greedy_step, mode="reduce-overhead", fullgraph=True, dynamic=False)

    @torch.no_grad()
    def prefill(self, prompts: torch.Tensor) -> torch.Tensor:
        self._cache.reset()  # in place, the addresses stay
        positions = torch.arange(prompts.shape[1], device=prompts.device)[None]
        return greedy_step(self._model, self._cache, prompts, positions)[:, 0]

    @torch.no_grad()
    def decode(self, first: torch.Tensor, steps: int) -> torch.Tensor:
        tokens, chosen = first[:, None].contiguous(), []
        for position in self._positions[:steps]:
            torch.compiler.cudagraph_mark_step_begin()
            # the next replay overwrites the output
            tokens = self._step(self._model, self._cache, tokens, position).clone()
            chosen.append(tokens)
        return torch.cat(chosen, 1)

    def restart(self) -> None:
        for layer in self._cache.layers:
            layer.cumulative_length.fill_(self._prompt)

    def past(self, first: int, end: int) -> Past:
        kept = (slice(first, end), slice(None), slice(self._prompt))
        return [(layer.keys[kept], layer.values[kept]) for layer in self._cache.layers]

    def logits(self) -> None:
        return None

    def compilation(self) -> dict[str, int]:
        graphs = {name: n for name, n in counters["inductor"].items() if name.startswith("cudagraph")}
        return {"unique_graphs": counters["stats"]["unique_graphs"], **graphs}


@dataclass(frozen=True)
class Timed:
    """What a timed engine left behind.

    Attributes:
        first: int64 [B], the tokens that the prefill chose.
        tokens: int64 [B, steps], what the steps of the last repeat chose.
        logits: float32 [B, vocab] of its last step, if the engine keeps them.
        first_step_s: seconds of the very first step, compilation included.
        repeats_ms: milliseconds of a step, by repeat.
    """

    first: torch.Tensor
    tokens: torch.Tensor
    logits: torch.Tensor | None
    first_step_s: float
    repeats_ms: tuple[float, ...]
