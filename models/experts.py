"""The MLP of a sparse layer: each token goes to the experts that its router chooses, and to the shared one if any.

Which experts are active is known on the device alone. Operators over them are cut for the most that can be, and
tiles beyond the active ones find nothing to do, so an inactive expert's weights are never read. The shared expert
depends on no routing; its two halves stand around the routing, so that workers have them to do in the meantime.
"""

from megaflow.graph import BATCH, Graph, Symbol, Tensor
from megaflow.models.geometry import Experts, Geometry
from megaflow.models.stream import Names, Stream, linear, workspace
from megaflow.tasks.combine import combine_parts
from megaflow.tasks.common import LINE

PAIRS = Symbol("pairs")  # of a token and one of its experts; pair token * per_token + slot
PLACES = Symbol("places")  # in the list of active experts: the most that can be active
SLOT_PARTS = Symbol("slot_parts")  # tiles of one token's experts along h
PLACE_ENDS = Symbol("place_ends")  # PLACES + 1: where the pairs of each place begin, and where the last ones end


def routing_symbols(experts: Experts | None, batch: int) -> dict[str, int]:
    """The sizes of a batch's routing."""
    if experts is None:
        return {}
    places = experts.most_active(batch)
    return {PAIRS.name: experts.pairs(batch), PLACES.name: places, PLACE_ENDS.name: places + 1}


def sparse_mlp(g: Graph, model: Geometry, name: Names, stream: Stream, gamma: Tensor, batch: int) -> Stream:
    """h += sum over a token's experts of weight * down(silu(gate(norm(h))) * up(norm(h))); the shared one's weight is
    the sigmoid of the router's last logit.

    The operators depend on whether there are several tokens: those of one need no grouping.
    """
    experts, hidden = model.experts, model.hidden
    assert experts is not None
    count, width = experts.count, experts.width
    shared_hidden = shared_gate_up(g, name, stream, experts.shared_width, hidden) if experts.shared_width else None

    logits = Tensor("router_logits", (BATCH, experts.router_rows), "float32")
    router = Tensor(name("router"), (experts.router_rows, hidden))
    linear(g, name("router"), stream, router, {"out": logits}, "store")

    chosen = Tensor("topk_experts", (BATCH, experts.per_token), "int32")
    choice = {"slots": experts.per_token, "norm_topk_prob": experts.normalized}

    gate_up = Tensor(name("expert_gate_up"), (count, 2 * width, hidden))
    down = Tensor(name("expert_down"), (count, hidden, width))
    middle = Tensor("expert_hidden", (PAIRS, width))
    out = Tensor("expert_out", (PAIRS, hidden), "float32")
    into = {"x": stream.normed, "ssq": stream.ssq, "weight": gate_up}
    if batch == 1:
        shared = shared_down(g, name, shared_hidden, hidden, logits)
        gated = {"out": middle, "experts": chosen}
        g.add(name("expert_gate_up"), "slot_linear", into | {"logits": logits}, gated, epilogue="silu", **choice)
        after = stream.after(Tensor("ssq_slots", (BATCH, SLOT_PARTS), "float32"))
        arrivals = Tensor("arrivals_expert_down", (hidden * LINE,), "int32")
        g.add(
            name("expert_down"),
            "slot_linear",
            {"x": middle, "weight": down, "experts": chosen, "h": stream.h, "gamma": gamma, "arrivals": arrivals}
            | shared,
            {"sums": out} | after.outputs(),
            epilogue="residual",
            slots=experts.per_token,
        )
        return after

    weights = Tensor("topk_weights", (BATCH, experts.per_token), "float32")
    slot_of = {"slot_of": Tensor("slot_of_expert", (BATCH, count), "int32")}
    outputs = {"experts": chosen, "weights": weights, **slot_of}
    g.add(name("topk"), "topk", {"logits": logits}, outputs, count=count, **choice)

    lists = {
        "active": Tensor("active_experts", (PLACES,), "int32"),
        "active_count": Tensor("active_count", (1,), "int32"),
        "indptr": Tensor("expert_indptr", (PLACE_ENDS,), "int32"),
        "pairs": Tensor("expert_pairs", (PAIRS,), "int32"),
    }
    g.add(name("group"), "group", slot_of, lists, slots=experts.per_token)
    shared = shared_down(g, name, shared_hidden, hidden, logits)
    g.add(name("expert_gate_up"), "expert_linear", into | lists, {"out": middle}, epilogue="silu")
    g.add(name("expert_down"), "expert_linear", {"x": middle, "weight": down, **lists}, {"out": out}, epilogue="store")
    after = stream.after(Tensor("ssq_combined", (BATCH, combine_parts(hidden)), "float32"))
    combined = {"expert_out": out, "weights": weights, "h": stream.h, "gamma": gamma, **shared}
    g.add(name("combine"), "combine", combined, after.outputs())
    return after


def shared_gate_up(g: Graph, name: Names, stream: Stream, width: int, hidden: int) -> Tensor:
    """silu(gate(norm(h))) * up(norm(h)) of the expert that all tokens share, [B, width]."""
    out = Tensor("shared_hidden", (BATCH, width))
    linear(g, name("shared_gate_up"), stream, Tensor(name("shared_gate_up"), (2 * width, hidden)), {"out": out}, "silu")
    return out


def shared_down(g: Graph, name: Names, x: Tensor | None, hidden: int, logits: Tensor) -> dict[str, Tensor]:
    """down(x) of the expert that all tokens share, float32 [B, hidden], and its gate; nothing if there is none."""
    if x is None:
        return {}
    out = Tensor("shared_out", (BATCH, hidden), "float32")
    weight = Tensor(name("shared_down"), (hidden, x.width))
    inputs = {"x": x, "weight": weight, **workspace(name("shared_down"), weight)}
    g.add(name("shared_down"), "linear", inputs, {"out": out}, epilogue="store")
    return {"shared_out": out, "gate": logits}
