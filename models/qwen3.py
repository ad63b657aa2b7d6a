"""A Qwen3 model, dense or with experts, or a Qwen2-MoE model as a logical graph: one decode step of B sequences."""

from megaflow.graph import BATCH, Graph, Symbol, Tensor
from megaflow.models.experts import sparse_mlp
from megaflow.models.geometry import Geometry
from megaflow.models.stream import Names, Stream, linear, norm_weight, residual
from megaflow.tasks.common import LINE

LOGIT_PARTS = Symbol("logit_parts")  # tiles of the LM head along its rows
PAGES = Symbol("pages")  # of a sequence, in the block table
STEPS = Symbol("steps")  # of a launch


def qwen3_graph(model: Geometry, max_length: int, batch: int) -> Graph:
    """The graph of one decode step, from the tokens to the tokens of the next step.

    Args:
        model: the sizes.
        max_length: longest sequence that will be decoded; bounds the number of attention splits.
        batch: B. Experts of one token are other operators than those of several; all else is the same for any batch.
    """
    g = Graph()
    tokens = Tensor("tokens", (BATCH,), "int32")
    stream = Stream(
        Tensor("h", (BATCH, model.hidden), "float32"),
        Tensor("normed", (BATCH, model.hidden)),
        Tensor("ssq_embedding", (BATCH, 1), "float32"),
    )
    embedding = Tensor("embedding", (model.vocab, model.hidden))
    g.add(
        "embedding",
        "embedding",
        {"tokens": tokens, "weight": embedding, "gamma": norm_weight(Names(0)("attn_norm"), model.hidden)},
        {"h": stream.h, "out": stream.normed, "ssq_out": stream.ssq},
    )
    for layer in range(model.layers):
        following = Names(layer + 1)("attn_norm") if layer + 1 < model.layers else "final_norm"
        stream = decoder_layer(g, model, Names(layer), stream, following, max_length, batch)
    head = embedding if model.tied else Tensor("lm_head", (model.vocab, model.hidden))
    best = {
        "best_value": Tensor("best_value", (BATCH, LOGIT_PARTS), "float32"),
        "best_index": Tensor("best_index", (BATCH, LOGIT_PARTS), "int32"),
    }
    logits = Tensor("logits", (BATCH, model.vocab), "float32")
    linear(g, "lm_head", stream, head, {"out": logits, **best}, "logits")
    state = {name: Tensor(name, (), "int32") for name in ("unfinished", "eos", "pad", "stop_step")}
    state |= {name: Tensor(name, (BATCH,), "int32") for name in ("positions", "finished")}
    state["generated"] = Tensor("generated", (BATCH, STEPS), "int32")
    g.add("select", "select", {**best, **state}, {"tokens": tokens})
    return g


def decoder_layer(
    g: Graph, model: Geometry, name: Names, stream: Stream, following: str, max_length: int, batch: int
) -> Stream:
    """h += o_proj(attention(qkv(norm(h)))); h += mlp(norm(h)). `following` names the norm that comes next."""
    qkv = Tensor("qkv", (BATCH, model.qkv_rows), "float32")
    attended = Tensor("attended", (BATCH, model.attention_width))

    weight = Tensor(name("qkv"), (model.qkv_rows, model.hidden))
    bias = Tensor(name("qkv_bias"), (model.qkv_rows,), "float32") if model.qkv_bias else None
    linear(g, name("qkv"), stream, weight, {"out": qkv}, "store", bias)
    attention(g, model, name, qkv, attended, max_length)
    o_proj = Tensor(name("o_proj"), (model.hidden, model.attention_width))
    stream = residual(g, name("o_proj"), attended, o_proj, stream, norm_weight(name("mlp_norm"), model.hidden))
    gamma = norm_weight(following, model.hidden)
    if model.is_sparse(name.layer):
        return sparse_mlp(g, model, name, stream, gamma, batch)
    return dense_mlp(g, model, name, stream, gamma)


def dense_mlp(g: Graph, model: Geometry, name: Names, stream: Stream, gamma: Tensor) -> Stream:
    """h += down(silu(gate(norm(h))) * up(norm(h)))."""
    activated = Tensor("activated", (BATCH, model.intermediate))
    gate_up = Tensor(name("gate_up"), (2 * model.intermediate, model.hidden))
    linear(g, name("gate_up"), stream, gate_up, {"out": activated}, "silu")
    down = Tensor(name("down"), (model.hidden, model.intermediate))
    return residual(g, name("down"), activated, down, stream, gamma)


def attention(g: Graph, model: Geometry, name: Names, qkv: Tensor, out: Tensor, max_length: int) -> None:
    """out = attention of the new token over the paged KV cache, which it is appended to first."""
    inputs = {role: Tensor(role, (), "float32") for role in ("cos", "sin", "partial", "statistics")}
    inputs["positions"] = Tensor("positions", (BATCH,), "int32")
    inputs["block_table"] = Tensor("block_table", (BATCH, PAGES), "int32")
    inputs["arrived"] = Tensor("arrived", (BATCH, model.kv_heads, LINE), "int32")
    inputs |= {role: Tensor(name(role), ()) for role in ("k_cache", "v_cache")}
    if model.qk_norm:
        inputs |= {role: norm_weight(name(role), model.head_dim) for role in ("q_norm", "k_norm")}
    g.add(
        name("attention"),
        "attention",
        {"qkv": qkv, **inputs},
        {"out": out},
        kv_heads=model.kv_heads,
        group=model.group,
        max_length=max_length,
    )
