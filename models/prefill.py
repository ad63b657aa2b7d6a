"""Prefill in torch: the prompt's keys and values go into the paged cache, the last token's logits come back.

It reads the same packed weights as the persistent kernel, one matrix unpacked at a time. Prompts go through the model a
few at a time, so that its activations take no more memory in a large batch.
"""

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional

from megaflow.models.geometry import Experts, Geometry
from megaflow.models.kv_cache import PagedKVCache
from megaflow.models.weights import Weights
from megaflow.tasks import TOPK
from megaflow.tasks.packing import PackedWeight, padded

HEAD_ROWS = 16384  # rows of the LM head that are unpacked at a time
TOKENS_AT_ONCE = 32768  # that go through the model together, in whole prompts


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, rotate-half convention. x [n, heads, head_dim]; cos, sin [n, head_dim] float32."""
    left, right = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-right, left), -1) * sin[:, None]


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up in float32; gate and up columns alternate in [n, 2 * width]."""
    gate, up = gate_up.float().unflatten(1, (-1, 2)).unbind(2)
    return functional.silu(gate) * up


def mix_experts(experts: Experts, weights: Weights, layer: str, x: torch.Tensor) -> torch.Tensor:
    """The weighted sum of the outputs of each token's experts, float32 [n, hidden], one expert at a time.

    A shared expert's output comes to it, with the sigmoid of the router's last logit.

    Args:
        layer: what the names of the layer's weights begin with.
        x: [n, hidden], in the dtype of the weights.
    """
    width, hidden = experts.width, x.shape[1]
    # the router is small and its choice is not to depend on how its logits are rounded
    logits = x.float() @ weights.matrices[layer + "router"].unpack().float().T
    routing = TOPK.oracle({"logits": logits}, experts.count, experts.per_token, experts.normalized)
    chosen, weight = routing["experts"].flatten(), routing["weights"].flatten()
    gate_up, down = weights.matrices[layer + "expert_gate_up"], weights.matrices[layer + "expert_down"]
    by_expert = chosen.argsort(stable=True)
    counts = chosen.bincount(minlength=experts.count).tolist()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert, pairs in enumerate(by_expert.split(counts)):
        if len(pairs) == 0:
            continue
        token = pairs // experts.per_token
        middle = gated(functional.linear(x[token], expert_matrix(gate_up, expert, 2 * width))).to(x.dtype)
        y = functional.linear(middle, expert_matrix(down, expert, hidden))
        out.index_add_(0, token, y * weight[pairs, None])
    if experts.shared_width:
        gate_up, down = weights.matrices[layer + "shared_gate_up"], weights.matrices[layer + "shared_down"]
        middle = gated(functional.linear(x, gate_up.unpack())).to(x.dtype)
        out += logits[:, experts.count :].sigmoid() * functional.linear(middle, down.unpack())
    return out


def expert_matrix(packed: PackedWeight, expert: int, rows: int) -> torch.Tensor:
    """[rows, columns] of one expert; each expert's rows are padded to whole blocks."""
    first = expert * padded(rows)
    return packed.unpack(first, first + rows)


def groups(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The prompts that go together, as (first, end): at most TOKENS_AT_ONCE tokens, or one prompt."""
    first = tokens = 0
    for i, length in enumerate(lengths):
        if i > first and tokens + length > TOKENS_AT_ONCE:
            yield first, i
            first, tokens = i, 0
        tokens += length
    yield first, len(lengths)


@torch.no_grad()
def prefill(
    model: Geometry,
    weights: Weights,
    cache: PagedKVCache,
    cos: torch.Tensor,
    sin: torch.Tensor,
    prompts: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Run the prompts through the model and fill the cache.

    Args:
        cos, sin: float32 [max_seq_len, head_dim].
        prompts: token ids, int64 [length] each, on the device; pages must have been reserved.
    Returns:
        float32 [len(prompts), vocab]: logits after each prompt's last token.
    """
    parts = [
        prefill_group(model, weights, cache, cos, sin, prompts[first:end], first)
        for first, end in groups([len(p) for p in prompts])
    ]
    return torch.cat(parts)


def prefill_group(
    model: Geometry,
    weights: Weights,
    cache: PagedKVCache,
    cos: torch.Tensor,
    sin: torch.Tensor,
    prompts: Sequence[torch.Tensor],
    first: int,
) -> torch.Tensor:
    """prefill, of sequences `first` and on, all at once."""
    lengths = [len(p) for p in prompts]
    tokens = torch.cat(list(prompts))
    device = tokens.device
    place = torch.cat([torch.arange(n, device=device) for n in lengths])
    cos, sin = cos[place], sin[place]
    dtype = weights.matrices["embedding"].data.dtype
    h = weights.matrices["embedding"].gather_rows(tokens).float()

    def norm(x: torch.Tensor, weight: str) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], weights.vectors[weight], model.eps)

    def linear(x: torch.Tensor, weight: str) -> torch.Tensor:
        return functional.linear(x.to(dtype), weights.matrices[weight].unpack())

    for layer in range(model.layers):
        name = f"layers.{layer}."
        qkv = linear(norm(h, name + "attn_norm"), name + "qkv").float()
        if model.qkv_bias:
            qkv += weights.vectors[name + "qkv_bias"]
        qkv = qkv.view(len(tokens), model.kv_heads, model.group + 2, model.head_dim)
        q, k, v = qkv[:, :, : model.group].flatten(1, 2), qkv[:, :, model.group], qkv[:, :, -1]
        if model.qk_norm:
            q, k = norm(q, name + "q_norm"), norm(k, name + "k_norm")
        q, k, v = rotate(q, cos, sin).to(dtype), rotate(k, cos, sin).to(dtype), v.to(dtype)
        attended = []
        rows = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        for sequence, (q_s, k_s, v_s) in enumerate(rows, first):
            cache.write(layer, sequence, k_s, v_s)
            q_h, k_h, v_h = (x.transpose(0, 1)[None] for x in (q_s, k_s, v_s))
            out = functional.scaled_dot_product_attention(q_h, k_h, v_h, is_causal=True, enable_gqa=True)
            attended.append(out[0].transpose(0, 1).flatten(1))
        h = h + linear(torch.cat(attended), name + "o_proj")
        x = norm(h, name + "mlp_norm")
        if model.is_sparse(layer):
            assert model.experts is not None
            h = h + mix_experts(model.experts, weights, name, x.to(dtype))
        else:
            h = h + linear(gated(linear(x, name + "gate_up")), name + "down")

    ends = torch.tensor(lengths, device=device).cumsum(0) - 1
    last = norm(h[ends], "final_norm").to(dtype)
    head = weights.matrices["embedding" if model.tied else "lm_head"]
    parts = [functional.linear(last, head.unpack(i, i + HEAD_ROWS)) for i in range(0, model.vocab, HEAD_ROWS)]
    return torch.cat(parts, 1).float()
