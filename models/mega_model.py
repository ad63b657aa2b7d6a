"""MegaModel: a Hugging Face checkpoint, decoded by one persistent kernel."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from megaflow.backend import interpreted, kernel_device
from megaflow.errors import CapacityError, CheckpointError, ConfigError, InputError
from megaflow.models.decoder import Decoder
from megaflow.models.generation import (
    Prompts,
    Sampler,
    check_ids,
    check_length,
    continue_prompts,
    end_tokens,
    read_prompts,
)
from megaflow.models.geometry import read_geometry
from megaflow.models.kv_cache import PagedKVCache
from megaflow.models.prefill import prefill
from megaflow.models.weights import load_weights
from megaflow.scheduler import Schedule, find_schedule
from megaflow.target import current_device
from megaflow.trace import Trace

LARGEST_BATCH = 128
STEPS_PER_LAUNCH = 32
MOST_STEPS = 4096  # a launch's tasks are counted in int32


class MegaModel:
    """A decoder-only model whose decode steps run in one persistent kernel. Use from_hf to make one.

    Attributes:
        config, generation_config: the transformers configurations.
        geometry: the sizes that follow from it.
        device: where it runs.
        schedule: the schedule in use.
        max_batch_size, max_seq_len: what the KV cache was made for.
    """

    @classmethod
    def from_hf(
        cls,
        source: str | Path | Any,
        *,
        schedule: str | Schedule = "static",
        max_batch_size: int = 1,
        max_seq_len: int | None = None,
        page_size: int = 64,
        steps_per_launch: int = STEPS_PER_LAUNCH,
        device: str | torch.device | None = None,
        progress: bool = True,
    ) -> "MegaModel":
        """Load a Qwen3 checkpoint, dense or with experts, or a Qwen2-MoE checkpoint.

        Args:
            source: a local checkpoint directory, a hub id, or a transformers Qwen3ForCausalLM, Qwen3MoeForCausalLM or
                Qwen2MoeForCausalLM in memory.
            schedule: "static", "dynamic", "hybrid", "unfused" or "auto", or a Schedule (megaflow.scheduler), which may
                be one's own.
            max_batch_size: most sequences at once, 1 to 128.
            max_seq_len: most tokens of a sequence, prompt and generated together; default 2048, or what the
                configuration allows if that is less.
            page_size: positions in a page of the KV cache, a power of two of at least 16.
            steps_per_launch: most decode steps that generate runs in one launch.
            device: a CUDA device, or "cpu" for Triton's interpreter; chosen automatically by default.
            progress: whether to show a progress bar while weights load.
        Raises:
            ConfigError: the model or an option is not supported.
            CheckpointError: files or tensors are missing or do not fit.
            BackendError: the device cannot run the kernel.
            ScheduleError: no such schedule.
        """
        return cls(
            source, schedule, max_batch_size, max_seq_len, page_size, steps_per_launch, kernel_device(device), progress
        )

    def __init__(
        self,
        source: str | Path | Any,
        schedule: str | Schedule,
        max_batch_size: int,
        max_seq_len: int | None,
        page_size: int,
        steps_per_launch: int,
        device: torch.device,
        progress: bool,
    ) -> None:
        self.config, self.generation_config = read_configs(source)
        self.geometry = read_geometry(self.config)
        max_seq_len = self.geometry.sequence_limit(max_seq_len)
        if not 1 <= max_batch_size <= LARGEST_BATCH:
            raise ConfigError(f"max_batch_size is {max_batch_size}; it must be 1 to {LARGEST_BATCH}")
        if not 1 <= steps_per_launch <= MOST_STEPS:
            raise ConfigError(f"steps_per_launch is {steps_per_launch}; it must be 1 to {MOST_STEPS}")
        self.set_schedule(schedule)
        self.device = device
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len
        dtype = torch.float32 if interpreted() else torch.bfloat16
        self._weights = load_weights(source, self.geometry, dtype, device, progress)
        self._cos, self._sin = rotary_tables(self.config, max_seq_len, device)
        self._cache = PagedKVCache(self.geometry, max_batch_size, max_seq_len, page_size, dtype, device)
        self._decoder = Decoder(
            self.geometry,
            self._weights,
            self._cache,
            self._cos,
            self._sin,
            current_device(device),
            max_batch_size,
            steps_per_launch,
        )

    @property
    def decoder(self) -> Decoder:
        """The device side: graph, buffers and plans."""
        return self._decoder

    def set_schedule(self, schedule: str | Schedule) -> None:
        """Use another schedule from the next step on. Weights and cache stay.

        Raises:
            ScheduleError: no such schedule; the old one stays in use.
        """
        self.schedule = find_schedule(schedule)

    def prefill(self, input_ids: Prompts, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Start new sequences; those before are forgotten.

        Args:
            input_ids: int64 [B, T], or B sequences of token ids of any lengths.
            attention_mask: [B, T], 0 for padding, with a tensor of input_ids.
        Returns:
            float32 [B, vocab]: logits after each prompt.
        Raises:
            InputError, CapacityError: the request is not valid; sequences before are kept then.
        """
        return self._start(read_prompts(input_ids, attention_mask, self.geometry.vocab))

    def _start(self, prompts: list[torch.Tensor]) -> torch.Tensor:
        """prefill, with prompts that have been read."""
        if len(prompts) > self.max_batch_size:
            raise CapacityError(
                f"batch of {len(prompts)} sequences, max_batch_size is {self.max_batch_size}; "
                "split the batch or create the model with a larger max_batch_size"
            )
        longest = max(len(p) for p in prompts)
        if longest > self.max_seq_len:
            raise CapacityError(
                f"prompt of {longest} tokens, max_seq_len is {self.max_seq_len}; "
                "shorten the prompt or create the model with a larger max_seq_len"
            )
        self._decoder.start([len(p) for p in prompts])
        on_device = [p.to(self.device) for p in prompts]
        try:
            return prefill(self.geometry, self._weights, self._cache, self._cos, self._sin, on_device)
        except BaseException:  # out of memory, an interrupt: the cache is half written
            self._decoder.drop()
            raise

    def decode(self, next_tokens: torch.Tensor) -> torch.Tensor:
        """Append one token to each sequence and run one step.

        Args:
            next_tokens: integers [B] or [B, 1].
        Returns:
            float32 [B, vocab]: logits after that token.
        Raises:
            InputError: no sequences, another B, or token ids out of range.
            CapacityError: a sequence is as long as max_seq_len allows.
            DeadlockError: the kernel's schedule did not finish.
        """
        tokens = self.read_next(next_tokens)
        self._decoder.set_ends([], 0)  # the caller decides where a sequence ends
        self._decoder.run(tokens, 1, self.schedule)
        return self._decoder.logits()

    def read_next(self, next_tokens: torch.Tensor) -> torch.Tensor:
        """The next token of each sequence, integers [B]. Raises InputError: see decode."""
        tokens = torch.as_tensor(next_tokens).reshape(-1)
        if self._decoder.batch == 0:
            raise InputError("decode has no sequences to continue; call prefill first")
        if len(tokens) != self._decoder.batch:
            raise InputError(f"{len(tokens)} next tokens for {self._decoder.batch} sequences; give one for each")
        check_ids(tokens, "next tokens", self.geometry.vocab)
        return tokens

    def generate(
        self,
        input_ids: Prompts,
        max_new_tokens: int,
        *,
        attention_mask: torch.Tensor | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> torch.Tensor:
        """Prompts followed by generated tokens; greedy unless temperature is above 0.

        Args:
            input_ids: int64 [B, T], or B sequences of token ids of any lengths.
            max_new_tokens: most tokens to generate for each sequence; fewer when all reach an end.
            attention_mask: [B, T], 0 for padding, with a tensor of input_ids.
            eos_token_id: ends a sequence; default from the generation configuration, [] for none.
            pad_token_id: fills up prompts (on the left) and finished sequences; default from that configuration,
                or the first eos id.
            temperature, top_k, top_p: sampling, by transformers' logits processors; one step a launch then.
            seed: of the sampling.
        Returns:
            int64 [B, T + new] on the model's device; T is the longest prompt.
        Raises:
            InputError, CapacityError: the request is not valid; the model stays usable.
            DeadlockError: the kernel's schedule did not finish.
        """
        prompts = read_prompts(input_ids, attention_mask, self.geometry.vocab)
        check_length(prompts, max_new_tokens, self.max_seq_len)
        ends, pad = end_tokens(self.generation_config, eos_token_id, pad_token_id)
        sampler = Sampler(temperature, top_k, top_p, seed, self.device) if temperature != 0 else None
        logits = self._start(prompts)
        self._decoder.set_ends(ends, pad)
        return continue_prompts(self._decoder, self.schedule, prompts, logits, max_new_tokens, ends, pad, sampler)

    @contextmanager
    def trace(self, path: str | Path | None = None) -> Iterator[Trace]:
        """Record when and where each task of the decode steps inside the block runs.

        Steps of decode and generate count, prefills do not. Such launches take a second compiled kernel, which writes
        the times down; those outside the block are as they always are.

        Args:
            path: of a file for ui.perfetto.dev, written when the block ends without an error.
        Yields:
            The trace, to which launches are added as they end; by_operator() is its table.
        Raises:
            InputError: this model is being traced already, or there is no directory for `path`.
        """
        if path is not None and (Path(path).is_dir() or not Path(path).parent.is_dir()):
            raise InputError(f"trace file {str(path)!r} cannot be written; give a file name in a directory that exists")
        with self._decoder.traced() as trace:
            yield trace
        if path is not None:
            trace.write(path)


def read_configs(source: str | Path | Any) -> tuple[Any, GenerationConfig]:
    """The model's and the generation's configuration. Raises CheckpointError if the first cannot be read."""
    if not isinstance(source, str | Path):
        return source.config, source.generation_config
    try:
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{source}: the configuration cannot be read ({error}); give a checkpoint directory or a hub id"
        ) from error
    try:
        return config, GenerationConfig.from_pretrained(source)
    except OSError:  # optional file
        return config, GenerationConfig.from_model_config(config)


def rotary_tables(config: Any, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of positions 0 to length, float32 [length, head_dim], as transformers computes them."""
    rotary = Qwen3RotaryEmbedding(config)
    positions = torch.arange(length)[None]
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32), positions)
    return cos[0].to(device).contiguous(), sin[0].to(device).contiguous()
