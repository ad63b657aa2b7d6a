"""Whether a timed run was right: transformers, fed the run's tokens, in float32 and in bfloat16."""

import copy
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from common import Qwen3
from engines import Timed
from transformers import Qwen3ForCausalLM

LARGEST_ERROR = 1.5  # of megaflow's logits, as a multiple of transformers' in bfloat16


@dataclass(frozen=True)
class Check:
    """How a run compares with transformers in float32, with transformers in bfloat16 beside it.

    Attributes:
        agreement: share of steps whose token is the float32 choice.
        largest_gap: largest float32 logit less that of the token, at most over the steps.
        relative_error: L2, of the last step's logits; None if they were not kept.
        bf16_*: the same of transformers in bfloat16.
    """

    agreement: float
    bf16_agreement: float
    largest_gap: float
    bf16_largest_gap: float
    relative_error: float | None
    bf16_relative_error: float

    @property
    def accurate(self) -> bool:
        """Whether the logits are about as close to float32 as bfloat16 allows; a NaN is not."""
        return self.relative_error is None or self.relative_error <= LARGEST_ERROR * self.bf16_relative_error

    def __str__(self) -> str:
        parts = [
            f"float32 choice {self.agreement:.1%} (bf16 {self.bf16_agreement:.1%})",
            f"gap {self.largest_gap:.2g} (bf16 {self.bf16_largest_gap:.2g})",
        ]
        if self.relative_error is not None:
            parts.append(f"error {self.relative_error:.2e} (bf16 {self.bf16_relative_error:.2e})")
        return ", ".join(parts)


def judge(tokens: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Share of tokens [steps] that are the choice of logits [steps, vocab], and the largest gap to it."""
    best, best_token = exact.max(1)
    gaps = best - exact.gather(1, tokens[:, None])[:, 0]
    return float((tokens == best_token).float().mean()), float(gaps.max())


@torch.no_grad()
def check(reference: Qwen3, rounded: Qwen3, prompts: torch.Tensor, run: Timed) -> Check:
    """Feed prompts and the run's tokens to transformers, one sequence at a time.

    Args:
        reference, rounded: the model in float32 and in bfloat16.
        prompts: int64 [B, T].
    """
    steps = run.tokens.shape[1]
    fed = torch.cat((prompts, run.first[:, None], run.tokens[:, :-1]), 1)
    choices, bf16_choices, errors, bf16_errors, norms = [], [], [], [], []
    for sequence, tokens in enumerate(run.tokens):
        ids = fed[sequence : sequence + 1]
        exact, near = (
            model(input_ids=ids, use_cache=False, logits_to_keep=steps).logits[0].float()
            for model in (reference, rounded)
        )
        choices.append(judge(tokens, exact))
        bf16_choices.append(judge(near.argmax(1), exact))
        norms.append(exact[-1].norm())
        bf16_errors.append((near[-1] - exact[-1]).norm())
        if run.logits is not None:
            errors.append((run.logits[sequence] - exact[-1]).norm())

    def relative(parts: list[torch.Tensor]) -> float:
        return float(torch.stack(parts).norm() / torch.stack(norms).norm())

    agreement, gap = zip(*choices, strict=True)
    bf16_agreement, bf16_gap = zip(*bf16_choices, strict=True)
    return Check(
        agreement=statistics.mean(agreement),
        bf16_agreement=statistics.mean(bf16_agreement),
        largest_gap=max(gap),
        bf16_largest_gap=max(bf16_gap),
        relative_error=relative(errors) if errors else None,
        bf16_relative_error=relative(bf16_errors),
    )


def float32_copy(model: Qwen3) -> Qwen3:
    """The same weights in a float32 model on the same device; those of layers with experts only while they run."""
    if isinstance(model, Qwen3ForCausalLM):
        with torch.device(model.device):
            same = Qwen3ForCausalLM(model.config).float().eval()
        same.load_state_dict(model.state_dict())
        return same
    passing = {id(layer): PassingFloat32(layer) for layer in model.model.layers}
    same = copy.deepcopy(model, passing).float()
    with torch.device(model.device):  # its frequencies may have been rounded with the weights
        same.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return same


class PassingFloat32(torch.nn.Module):
    """A layer in float32, made from another one whenever it runs and then forgotten."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self._layer = (layer,)  # in a tuple it is no submodule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layer = copy.deepcopy(self._layer[0]).float()
        for module in layer.modules():
            if hasattr(module, "gate_up_proj") and hasattr(module, "config"):
                module.config._experts_implementation = "eager"  # grouped products are made for bfloat16
        return layer(*args, **kwargs)
