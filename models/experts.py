"""The MLP of a sparse layer: each token goes to the experts that its router chooses.

Which experts are active is known on the device alone. Operators over them are cut for the most that can be, and
tiles beyond the active ones find nothing to do, so an inactive expert's weights are never read.
"""

from megaflow.graph import BATCH, Graph, Symbol, Tensor
from megaflow.models.geometry import Experts, Geometry
from megaflow.models.stream import Names, Stream, linear
from megaflow.tasks.combine import combine_parts

PAIRS = Symbol("pairs")  # of a token and one of its experts; pair token * per_token + slot
PLACES = Symbol("places")  # in the list of active experts: the most that can be active
PLACE_ENDS = Symbol("place_ends")  # PLACES + 1: where the pairs of each place begin, and where the last ones end


def routing_symbols(experts: Experts | None, batch: int) -> dict[str, int]:
    """The sizes of a batch's routing."""
    if experts is None:
        return {}
    places = experts.most_active(batch)
    return {PAIRS.name: experts.pairs(batch), PLACES.name: places, PLACE_ENDS.name: places + 1}


def sparse_mlp(g: Graph, model: Geometry, name: Names, stream: Stream, gamma: Tensor) -> Stream:
    """h += sum over a token's experts of weight * down(silu(gate(norm(h))) * up(norm(h)))."""
    experts, hidden = model.experts, model.hidden
    assert experts is not None
    count, width = experts.count, experts.width
    logits = Tensor("router_logits", (BATCH, count), "float32")
    linear(g, name("router"), stream, Tensor(name("router"), (count, hidden)), {"out": logits}, "store")

    chosen = Tensor("topk_experts", (BATCH, experts.per_token), "int32")
    weights = Tensor("topk_weights", (BATCH, experts.per_token), "float32")
    outputs = {"experts": chosen, "weights": weights}
    g.add(name("topk"), "topk", {"logits": logits}, outputs, norm_topk_prob=experts.normalized)

    lists = {
        "active": Tensor("active_experts", (PLACES,), "int32"),
        "active_count": Tensor("active_count", (1,), "int32"),
        "indptr": Tensor("expert_indptr", (PLACE_ENDS,), "int32"),
        "pairs": Tensor("expert_pairs", (PAIRS,), "int32"),
    }
    g.add(name("group"), "group", {"experts": chosen}, lists, experts=count)

    middle = Tensor("expert_hidden", (PAIRS, width))
    gate_up = Tensor(name("expert_gate_up"), (count, 2 * width, hidden))
    inputs = {"x": stream.normed, "ssq": stream.ssq, "weight": gate_up, **lists}
    g.add(name("expert_gate_up"), "expert_linear", inputs, {"out": middle}, epilogue="silu")

    out = Tensor("expert_out", (PAIRS, hidden), "float32")
    down = Tensor(name("expert_down"), (count, hidden, width))
    g.add(name("expert_down"), "expert_linear", {"x": middle, "weight": down, **lists}, {"out": out}, epilogue="store")

    after = stream.after(Tensor("ssq_combined", (BATCH, combine_parts(hidden)), "float32"))
    g.add(
        name("combine"),
        "combine",
        {"expert_out": out, "weights": weights, "active": lists["active"], "h": stream.h, "gamma": gamma},
        {"h_out": after.h, "out": after.normed, "ssq_out": after.ssq},
    )
    return after
