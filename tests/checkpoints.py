"""Small random models for tests: dense ones, ones with experts, ones with a shared expert too."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from transformers import (
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from megaflow import MegaModel

T = TypeVar("T", bound=PreTrainedModel)

FIELDS = {
    "vocab_size": 293,
    "hidden_size": 80,
    "intermediate_size": 208,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
EXPERT_FIELDS = {  # with less of everything else, since experts have many tasks
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 120,
}
PROMPT_LENGTHS = (9, 1, 17, 4, 3, *range(1, 12))
SCHEDULES = ("static", "dynamic", "hybrid")


def small_config(**changes: Any) -> Qwen3Config:
    """A configuration that decodes in about a second a step in the interpreter."""
    return Qwen3Config(**(FIELDS | changes))


def small_moe_config(**changes: Any) -> Qwen3MoeConfig:
    """A configuration with experts in every layer, which decodes as fast."""
    return Qwen3MoeConfig(**(FIELDS | EXPERT_FIELDS | changes))


def small_shared_config(**changes: Any) -> Qwen2MoeConfig:
    """The same with an expert that all tokens share."""
    return Qwen2MoeConfig(**(FIELDS | EXPERT_FIELDS | {"shared_expert_intermediate_size": 112} | changes))


def small_model(seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    """A float32 model with random weights; norm weights are away from 1, so that a forgotten one shows."""
    return random_weights(seed, lambda: Qwen3ForCausalLM(small_config(**changes)))


def small_moe_model(seed: int = 0, **changes: Any) -> Qwen3MoeForCausalLM:
    """A model with experts, likewise."""
    return random_weights(seed, lambda: Qwen3MoeForCausalLM(small_moe_config(**changes)))


def small_shared_model(seed: int = 0, **changes: Any) -> Qwen2MoeForCausalLM:
    """A model with a shared expert, likewise."""
    return random_weights(seed, lambda: Qwen2MoeForCausalLM(small_shared_config(**changes)))


def random_weights(seed: int, make: Callable[[], T]) -> T:
    """The model that `make` makes, in float32."""
    torch.manual_seed(seed)
    model = make().float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    return model


def reference_tokens(model: PreTrainedModel, prompt: torch.Tensor, new: int, **options: Any) -> torch.Tensor:
    """transformers' greedy continuation of one prompt [length], int64 [length + new]."""
    with torch.no_grad():
        return model.generate(
            prompt[None], attention_mask=torch.ones_like(prompt[None]), max_new_tokens=new, do_sample=False, **options
        )[0]


def check_tokens(hf: PreTrainedModel, batch: int, new: int = 2, schedules: tuple[str, ...] = SCHEDULES) -> None:
    """Greedy tokens in all schedules are transformers'."""
    lengths = [PROMPT_LENGTHS[i % len(PROMPT_LENGTHS)] for i in range(batch)]
    prompts = [torch.randint(0, hf.config.vocab_size, (n,)) for n in lengths]
    wanted = [reference_tokens(hf, p, new)[len(p) :].tolist() for p in prompts]
    model = MegaModel.from_hf(hf, max_batch_size=batch, max_seq_len=32, page_size=16, progress=False)
    for schedule in schedules:
        model.set_schedule(schedule)
        assert model.generate(prompts, new)[:, -new:].tolist() == wanted, schedule
