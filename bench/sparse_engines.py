"""What the benchmark of sparse layers times: chains of layers h + experts(norm(h)), each with weights of its own.

The layers are those of a transformers model, whose attention is left out. A chain starts from the first rows of its
embedding, one for each token.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from chains import Kernel, Recorded
from torch.nn import functional
from transformers import Qwen3MoeForCausalLM

from megaflow.graph import BATCH, Graph, Tensor
from megaflow.models.experts import sparse_mlp
from megaflow.models.geometry import Geometry
from megaflow.models.stream import Names, Stream, norm_weight
from megaflow.models.tiling import tiling
from megaflow.models.weights import Weights
from megaflow.target import current_device


def kernel(model: Geometry, weights: Weights, batch: int, schedule: str) -> Kernel[torch.Tensor]:
    """megaflow's kernel on a graph of the sparse layers alone."""
    matrix = weights.matrices["embedding"].data
    cut = tiling(model, batch, current_device(matrix.device), str(matrix.dtype).removeprefix("torch."))
    buffers = weights.buffers() | {"tokens": torch.arange(batch, dtype=torch.int32, device=matrix.device)}
    graph, h = sparse_graph(model, batch)
    return Kernel(graph, cut, schedule, buffers, lambda buffers: buffers[h.name][:, : model.hidden])


def sparse_graph(model: Geometry, batch: int) -> tuple[Graph, Tensor]:
    """The embedding and then each layer's experts, as in megaflow.models.qwen3, and the h that remains."""
    g = Graph()
    stream = Stream(
        Tensor("h", (BATCH, model.hidden), "float32"),
        Tensor("normed", (BATCH, model.hidden)),
        Tensor("ssq_embedding", (BATCH, 1), "float32"),
    )
    norms = [norm_weight(Names(layer)("mlp_norm"), model.hidden) for layer in range(model.layers)]
    embedding = Tensor("embedding", (model.vocab, model.hidden))
    g.add(
        "embedding",
        "embedding",
        {"tokens": Tensor("tokens", (BATCH,), "int32"), "weight": embedding, "gamma": norms[0]},
        {"h": stream.h, "out": stream.normed, "ssq_out": stream.ssq},
    )
    for layer, following in enumerate([*norms[1:], norm_weight("final_norm", model.hidden)]):
        stream = sparse_mlp(g, model, Names(layer), stream, following, batch)
    return g, stream.h


def recorded(
    model: Qwen3MoeForCausalLM, batch: int, forward: Callable[[torch.Tensor], torch.Tensor]
) -> Recorded[torch.Tensor]:
    """A function from h to h as a CUDA graph, from the chain's start."""
    start = start_of(model, batch)
    return Recorded(partial(forward, start), start.device)


def start_of(model: Qwen3MoeForCausalLM, batch: int) -> torch.Tensor:
    """[batch, hidden]: what a chain starts from."""
    return model.model.embed_tokens.weight.detach()[:batch]


def chain(layers: Iterable[Any], h: torch.Tensor) -> torch.Tensor:
    """h [B, hidden] after transformers' decoder layers without their attention."""
    for layer in layers:
        h = h + layer.mlp(layer.post_attention_layernorm(h)[None])[0]
    return h


def transformers(model: Qwen3MoeForCausalLM, batch: int, implementation: str) -> Recorded[torch.Tensor]:
    """transformers' own blocks, with one of its implementations of experts."""
    model.set_experts_implementation(implementation)
    return recorded(model, batch, partial(chain, model.model.layers))


def by_layer(model: Qwen3MoeForCausalLM, batch: int, layer: Callable[..., torch.Tensor]) -> Recorded[torch.Tensor]:
    """A chain of a function like `grouped`, which is called once for each layer."""
    assert model.config.norm_topk_prob
    k, eps = model.config.num_experts_per_tok, model.config.rms_norm_eps
    weights = [
        (x.post_attention_layernorm.weight, x.mlp.gate.weight, x.mlp.experts.gate_up_proj, x.mlp.experts.down_proj)
        for x in model.model.layers
    ]

    def forward(h: torch.Tensor) -> torch.Tensor:
        for gamma, router, gate_up, down in weights:
            h = layer(h, gamma, router, gate_up, down, k, eps)
        return h

    return recorded(model, batch, forward)


def routed(
    h: torch.Tensor, gamma: torch.Tensor, router: torch.Tensor, k: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """norm(h), and the weights and numbers, both [B, k], of each token's experts."""
    x = functional.rms_norm(h, gamma.shape, gamma, eps)
    weight, chosen = functional.linear(x, router).float().softmax(1).topk(k)
    return x, weight / weight.sum(1, keepdim=True), chosen


def gated(y: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up; gate columns come before up columns."""
    gate, up = y.chunk(2, -1)
    return functional.silu(gate) * up


def grouped(
    h: torch.Tensor, gamma: torch.Tensor, router: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    k: int, eps: float,
) -> torch.Tensor:  # fmt: skip
    """A layer by torch's grouped matrix product, over the pairs of token and expert in the order of the experts."""
    x, weight, chosen = routed(h, gamma, router, k, eps)
    experts, order = chosen.flatten().sort()
    ends = torch.searchsorted(experts, torch.arange(len(router), device=h.device), right=True, out_int32=True)
    middle = gated(functional.grouped_mm(x[order // k], gate_up.transpose(1, 2), offs=ends))
    y = functional.grouped_mm(middle, down.transpose(1, 2), offs=ends)
    by_token = y[order.argsort()].unflatten(0, (-1, k))
    return h + (by_token * weight[:, :, None]).sum(1).to(h.dtype)


def gathered(
    h: torch.Tensor, gamma: torch.Tensor, router: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    k: int, eps: float,
) -> torch.Tensor:  # fmt: skip
    """A layer by products with gathered weights, for few tokens: torch.compile reads them where they lie."""
    x, weight, chosen = routed(h, gamma, router, k, eps)
    middle = gated(torch.einsum("bi,bkoi->bko", x, gate_up[chosen]))
    y = torch.einsum("bki,bkoi->bko", middle, down[chosen])
    return h + (y * weight[:, :, None]).sum(1).to(h.dtype)


def compiled(model: Qwen3MoeForCausalLM, batch: int, layer: Callable[..., torch.Tensor]) -> Recorded[torch.Tensor]:
    """A chain of a function that torch.compile has compiled, once for all layers."""
    options = {"coordinate_descent_tuning": True}  # which also turns products with one column into fused sums
    return by_layer(model, batch, torch.compile(layer, fullgraph=True, dynamic=False, options=options))


def vllm(model: Qwen3MoeForCausalLM, batch: int) -> Recorded[torch.Tensor]:
    """A chain with vLLM's fused experts in Triton. Raises ModuleNotFoundError without vLLM."""
    from vllm.model_executor.layers.fused_moe import fused_experts

    def layer(
        h: torch.Tensor, gamma: torch.Tensor, router: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
        k: int, eps: float,
    ) -> torch.Tensor:  # fmt: skip
        x, weight, chosen = routed(h, gamma, router, k, eps)
        return h + fused_experts(hidden_states=x, w1=gate_up, w2=down, topk_weights=weight, topk_ids=chosen.int())

    return by_layer(model, batch, layer)
