"""Choosing the experts of one token: softmax over the router's logits of experts, the K largest, their weights.

What follows the logits of the `count` experts is not looked at. `experts` and `weights` have a place for each slot,
`slot_of` one for each expert: what `group` needs.
"""

import torch

from megaflow.backend import jit, tl
from megaflow.device import await_inputs
from megaflow.errors import PlanError
from megaflow.graph import Operator
from megaflow.kinds import Buffers, TaskKind, Tile, Tiling
from megaflow.lanes import number, pointer
from megaflow.regions import TiledOperator
from megaflow.tasks.common import by_role, token_access

FIELDS = ("logits", "logits_stride", "count", "slots", "normalised", "experts", "experts_stride",
          "weights", "weights_stride", "slot_of", "slot_of_stride")  # fmt: skip
(LOGITS, LOGITS_STRIDE, COUNT, SLOTS, NORMALISED, EXPERTS, EXPERTS_STRIDE,
 WEIGHTS, WEIGHTS_STRIDE, SLOT_OF, SLOT_OF_STRIDE) = map(tl.constexpr, range(len(FIELDS)))  # fmt: skip

MOST_EXPERTS = 512
MOST_SLOTS = 16  # experts of a token
NO_SLOT = -1
LAST = tl.constexpr(2**31 - 1)
LOWEST = tl.constexpr(-(2**63))
UNCHOSEN = tl.constexpr(NO_SLOT)


@jit
def topk_body(row, c_token, c_unused1, c_unused2, step, inputs, CONFIG: tl.constexpr):
    E: tl.constexpr = CONFIG.experts
    count = number(row, COUNT)
    slots = number(row, SLOTS)
    o_e = tl.arange(0, E)
    m_e = o_e < count
    p_logits = pointer(row, LOGITS, tl.float32) + c_token * number(row, LOGITS_STRIDE)
    await_inputs(inputs)
    logits = tl.load(p_logits + o_e, mask=m_e, other=float("-inf"))
    # one number for logit and expert, the lower expert before its equals: one reduction finds the best, and whatever
    # the logits are, NaN too, the choices are different experts
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    order = (bits ^ ((bits >> 31) & LAST)).to(tl.int64)
    left = tl.where(m_e, (order << 32) | (o_e ^ LAST).to(tl.int64), LOWEST)
    slot = tl.full([E], UNCHOSEN, tl.int32)
    for i in range(0, slots):
        best = left == tl.max(left, 0)
        slot = tl.where(best, i, slot)
        left = tl.where(best, LOWEST, left)
    chosen = slot >= 0
    power = tl.exp(logits - tl.max(logits, 0))
    weight = power / tl.sum(tl.where(chosen | (number(row, NORMALISED) == 0), power, 0.0), 0)
    tl.store(pointer(row, EXPERTS, tl.int32) + c_token * number(row, EXPERTS_STRIDE) + slot, o_e, mask=chosen)
    tl.store(pointer(row, WEIGHTS, tl.float32) + c_token * number(row, WEIGHTS_STRIDE) + slot, weight, mask=chosen)
    p_slot = pointer(row, SLOT_OF, tl.int32) + c_token * number(row, SLOT_OF_STRIDE) + o_e
    tl.store(p_slot, slot, mask=m_e & (number(row, SLOT_OF_STRIDE) > 0))


def tile(op: Operator, tiling: Tiling) -> TiledOperator:
    count, slots = op.attrs["count"], tiling.shape(op, "experts")[1]
    if not slots <= count <= MOST_EXPERTS or slots > MOST_SLOTS:
        raise PlanError(
            f"operator {op.name}: {slots} of {count} experts; a token may have up to {MOST_SLOTS} of up to "
            f"{MOST_EXPERTS} experts"
        )
    return TiledOperator(
        op.name,
        op.kind,
        grid=(tiling.sequences,),
        reads=(token_access(op, tiling, "logits"),),
        writes=tuple(token_access(op, tiling, role) for role in op.outputs),
        tile_bytes=count * 4,
    )


def row(op: Operator, tiled: TiledOperator, buffers: Buffers) -> dict[str, int]:
    at = by_role(op, buffers)
    values = {
        "logits": at("logits").data_ptr(),
        "logits_stride": at("logits").stride(0),
        "count": op.attrs["count"],
        "slots": op.tensor("experts").width,
        "normalised": int(op.attrs["norm_topk_prob"]),
        "experts": at("experts").data_ptr(),
        "experts_stride": at("experts").stride(0),
        "weights": at("weights").data_ptr(),
        "weights_stride": at("weights").stride(0),
    }
    if "slot_of" in op.outputs:
        values |= {"slot_of": at("slot_of").data_ptr(), "slot_of_stride": at("slot_of").stride(0)}
    return values


def oracle(inputs: dict[str, torch.Tensor], count: int, slots: int, norm_topk_prob: bool) -> dict[str, torch.Tensor]:
    """The operator in torch, in the dtype of the logits [B, n], of which the first `count` are experts'.

    Returns:
        experts and weights [B, slots], the best first; slot_of [B, count]: the slot that an expert has, or NO_SLOT.
    """
    logits = inputs["logits"][:, :count]
    experts = logits.sort(dim=1, descending=True, stable=True).indices[:, :slots]
    weights = logits.softmax(1).gather(1, experts)
    if norm_topk_prob:
        weights = weights / weights.sum(1, keepdim=True)
    slot_of = torch.full_like(logits, NO_SLOT, dtype=torch.int64)
    slot_of.scatter_(1, experts, torch.arange(slots, device=experts.device).expand_as(experts))
    return {"experts": experts, "weights": weights, "slot_of": slot_of}


def run_tile(tile: Tile) -> None:
    slots = tile.op.tensor("experts").width
    attrs = tile.op.attrs
    outputs = oracle({"logits": tile.read("logits")}, attrs["count"], slots, attrs["norm_topk_prob"])
    for role in tile.op.outputs:
        tile.write(role, outputs[role])


TOPK = TaskKind("topk", topk_body, tile, FIELDS, row, oracle, run_tile)
