"""Whether a timed run was right: transformers, fed the run's tokens, in float32 and in bfloat16.

The float32 model has no weights of its own: each layer is made from the bfloat16 one whenever it runs, so that a model
can be checked which does not fit on the GPU in float32. With experts, a token whose router has a near-tie may go to
another expert after any rounding; that is a part of both errors.

Prompts of many tokens together take too long in float32, and the attention of a long one takes too much memory. There
the reference can go on from the keys and values of the prompts that the run's engine had in its cache: the steps are
checked then, which are what was timed, and the prefill is not.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from common import Qwen3
from engines import Past, Timed
from transformers import DynamicCache
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

LARGEST_ERROR = 1.5  # of megaflow's logits, as a multiple of transformers' in bfloat16
TOKENS_AT_ONCE = 8192  # that go through transformers, in whole sequences


@dataclass(frozen=True)
class Check:
    """How a run compares with transformers in float32, with transformers in bfloat16 beside it.

    Attributes:
        agreement: share of steps whose token is the float32 choice.
        largest_gap: largest float32 logit less that of the token, at most over the steps.
        relative_error: L2, of the last step's logits; None if they were not kept.
        bf16_*: the same of transformers in bfloat16.
        active_experts: experts of a sparse layer that had any tokens, the mean over steps and layers; None in a dense
            model. They are those to which transformers in bfloat16 sends the run's tokens.
        from_cache: whether the reference has gone on from the engine's prefill, instead of reading the prompts itself.
    """

    agreement: float
    bf16_agreement: float
    largest_gap: float
    bf16_largest_gap: float
    relative_error: float | None
    bf16_relative_error: float
    active_experts: float | None = None
    from_cache: bool = False

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
        if self.active_experts is not None:
            parts.append(f"{self.active_experts:.1f} experts active")
        if self.from_cache:
            parts.append("steps alone")
        return ", ".join(parts)


class Reference:
    """transformers in float32 and in bfloat16, with the same weights.

    Runs that chose the same tokens share the reference's answers, if they are checked one after the other.
    """

    def __init__(self, exact: Qwen3, rounded: Qwen3) -> None:
        self._exact = exact
        self._rounded = rounded
        self._asked: tuple[int, torch.Tensor, Check, torch.Tensor] | None = None

    def check(self, prompts: torch.Tensor, run: Timed, past: Callable[[int, int], Past] | None = None) -> Check:
        """Check a run that went on from prompts, int64 [B, T].

        Args:
            past: the keys and values of the prompts of sequences `first` to `end`, for the reference to go on from.
        """
        ids, steps = torch.cat((prompts, run.first[:, None], run.tokens), 1), run.tokens.shape[1]
        if past is not None:
            about_tokens, last = self._ask(ids, steps, past)  # of this engine alone
        else:
            if self._asked is None or self._asked[0] != steps or not torch.equal(self._asked[1], ids):
                self._asked = (steps, ids, *self._ask(ids, steps, None))
            *_, about_tokens, last = self._asked
        if run.logits is None:
            return about_tokens
        return replace(about_tokens, relative_error=relative_error(run.logits, last))

    def _ask(
        self, ids: torch.Tensor, steps: int, past: Callable[[int, int], Past] | None
    ) -> tuple[Check, torch.Tensor]:
        """What can be said about the last `steps` tokens of ids [B, length], and the last step's float32 logits."""
        parts, first = [], 0
        for part in ids.split(max(1, TOKENS_AT_ONCE // ids.shape[1])):
            end = first + len(part)
            parts.append(self._answers(part, steps, past(first, end) if past is not None else None))
            first = end
        agrees, gaps, near_agrees, near_gaps, last, near_last, chosen = map(torch.cat, zip(*parts, strict=True))
        check = Check(
            agreement=float(agrees.float().mean()),
            bf16_agreement=float(near_agrees.float().mean()),
            largest_gap=float(gaps.max()),
            bf16_largest_gap=float(near_gaps.max()),
            relative_error=None,
            bf16_relative_error=relative_error(near_last, last),
            active_experts=mean_active(chosen) if chosen.numel() else None,
            from_cache=past is not None,
        )
        return check, last

    @torch.no_grad()
    def _answers(self, ids: torch.Tensor, steps: int, past: Past | None) -> tuple[torch.Tensor, ...]:
        """About n sequences, by sequence: what the check's numbers are made of.

        Args:
            past: of all but the last `steps` tokens that are fed, if they are not to be read.
        Returns:
            what `judge` says of their tokens and of bfloat16's, the last step's logits of both, and the experts that
            tokens go to, int64 [n, sparse layers, steps, per_token], in bfloat16.
        """
        fed, tokens = ids[:, :-1] if past is None else ids[:, -steps - 1 : -1], ids[:, -steps:]
        exact = logits(self._exact, fed, steps, past)
        with recorded_choices(self._rounded) as chosen:
            near = logits(self._rounded, fed, steps, past)
        of_steps = [experts.unflatten(0, fed.shape)[:, -steps:] for experts in chosen]
        return (
            *judge(tokens, exact),
            *judge(near.argmax(2), exact),
            exact[:, -1].clone(),  # the other steps are not to be kept
            near[:, -1].clone(),
            torch.stack(of_steps, 1) if of_steps else torch.empty(len(ids), 0),
        )


def mean_active(chosen: torch.Tensor) -> float:
    """Experts of a layer and a step that have any tokens, on average.

    Args:
        chosen: int64 [B, layers, steps, per_token], the experts that each token goes to.
    """
    together = chosen.permute(1, 2, 0, 3).flatten(2).sort(2).values
    return float(1 + (together.diff(dim=2) != 0).sum(2).float().mean())


def judge(tokens: torch.Tensor, exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether tokens [n, steps] are the choice of logits [n, steps, vocab], and the gap to it, both [n, steps]."""
    best, best_token = exact.max(2)
    return tokens == best_token, best - exact.gather(2, tokens[:, :, None])[:, :, 0]


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """||found - exact|| / ||exact||."""
    return float((found - exact).norm() / exact.norm())


def logits(model: Qwen3, ids: torch.Tensor, steps: int, past: Past | None) -> torch.Tensor:
    """float32 [n, steps, vocab]: after each of the last `steps` tokens of ids [n, length], which go on from `past`."""
    if past is None:
        return model(input_ids=ids, use_cache=False, logits_to_keep=steps).logits.float()
    cache = DynamicCache(config=model.config)
    for layer, (keys, values) in enumerate(past):
        cache.update(keys.to(model.dtype), values.to(model.dtype), layer)
    return model(input_ids=ids, past_key_values=cache, logits_to_keep=steps).logits.float()


@contextmanager
def recorded_choices(model: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Inside the block each router of the model appends to a list what it chose: int64 [tokens, per_token]."""
    chosen: list[torch.Tensor] = []
    # by hooks of our own: those of output_router_logits would stay, for torch.compile to find
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output: chosen.append(output[2]))
        for module in model.modules()
        if isinstance(module, Qwen3MoeTopKRouter)
    ]
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()


def float32_copy(model: Qwen3) -> Qwen3:
    """The same weights in a float32 model on the same device, those of the layers only while they run."""
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
        return in_float32(self._layer[0])(*args, **kwargs)


def in_float32(layer: torch.nn.Module) -> torch.nn.Module:
    """A float32 copy of a decoder layer."""
    layer = copy.deepcopy(layer).float()
    for module in layer.modules():
        if hasattr(module, "gate_up_proj") and hasattr(module, "config"):
            module.config._experts_implementation = "eager"  # grouped products are made for bfloat16
    return layer
