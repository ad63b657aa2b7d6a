"""Choosing the experts of one token: softmax over the router's logits of experts, the K largest, their weights.

What follows the logits of the `count` experts is not looked at. `experts` and `weights` have a place for each slot,
`slot_of` one for each expert: what `group` needs. A lone token's experts are chosen by the tasks that multiply with
them (megaflow.tasks.slot_linear).
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
def choose(p_logits, count, slots, normalised, CONFIG: tl.constexpr):
    """The slot of each expert (or UNCHOSEN), int32 [CONFIG.experts], and its weight, float32."""
    o_e = tl.arange(0, CONFIG.experts)
    m_e = o_e < count
    logits = tl.load(p_logits + o_e, mask=m_e, other=float("-inf"))
    # one number for logit and expert, the lower expert before its equals: one reduction finds the best, and whatever
    # the logits are, NaN too, the choices are different experts
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    order = (bits ^ ((bits >> 31) & LAST)).to(tl.int64)
    left = tl.where(m_e, (order << 32) | (o_e ^ LAST).to(tl.int64), LOWEST)
    slot = tl.full([CONFIG.experts], UNCHOSEN, tl.int32)
    for i in range(0, slots):
        best = left == tl.max(left, 0)
        slot = tl.where(best, i, slot)
        left = tl.where(best, LOWEST, left)
    power = tl.exp(logits - tl.max(logits, 0))
    return slot, power / tl.sum(tl.where((slot >= 0) | (normalised == 0), power, 0.0), 0)


@jit
def expert_in(c_slot, p_logits, count, slots, normalised, CONFIG: tl.constexpr):
    """The expert in a token's slot and its weight."""
    slot, weight = choose(p_logits, count, slots, normalised, CONFIG)
    # one sum for both; weights have no sign
    both = (tl.arange(0, CONFIG.experts).to(tl.int64) << 32) | (weight.to(tl.int32, bitcast=True) & LAST).to(tl.int64)
    both = tl.sum(tl.where(slot == c_slot, both, 0), 0)
    return (both >> 32).to(tl.int32), (both & LAST).to(tl.int32).to(tl.float32, bitcast=True)


@jit
def topk_body(row, c_token, c_unused1, c_unused2, step, inputs, CONFIG: tl.constexpr):
    count = number(row, COUNT)
    slots = number(row, SLOTS)
    normalised = number(row, NORMALISED)
    o_e = tl.arange(0, CONFIG.experts)
    p_logits = pointer(row, LOGITS, tl.float32) + c_token * number(row, LOGITS_STRIDE)
    await_inputs(inputs)
    slot, weight = choose(p_logits, count, slots, normalised, CONFIG)
    chosen = slot >= 0
    tl.store(pointer(row, EXPERTS, tl.int32) + c_token * number(row, EXPERTS_STRIDE) + slot, o_e, mask=chosen)
    tl.store(pointer(row, WEIGHTS, tl.float32) + c_token * number(row, WEIGHTS_STRIDE) + slot, weight, mask=chosen)
    p_slot = pointer(row, SLOT_OF, tl.int32) + c_token * number(row, SLOT_OF_STRIDE) + o_e
    tl.store(p_slot, slot, mask=o_e < count)


def tile(op: Operator, tiling: Tiling) -> TiledOperator:
    check_choice(op, op.attrs["count"])
    return TiledOperator(
        op.name,
        op.kind,
        grid=(tiling.sequences,),
        reads=(token_access(op, tiling, "logits"),),
        writes=tuple(token_access(op, tiling, role) for role in op.outputs),
        tile_bytes=op.attrs["count"] * 4,
    )


def check_choice(op: Operator, count: int) -> None:
    """Raises PlanError if an operator cannot choose its `slots` among so many experts."""
    slots = op.attrs["slots"]
    if not slots <= count <= MOST_EXPERTS or slots > MOST_SLOTS:
        raise PlanError(
            f"operator {op.name}: {slots} of {count} experts; a token may have up to {MOST_SLOTS} of up to "
            f"{MOST_EXPERTS} experts"
        )


def row(op: Operator, tiled: TiledOperator, buffers: Buffers) -> dict[str, int]:
    at = by_role(op, buffers)
    return {
        "logits": at("logits").data_ptr(),
        "logits_stride": at("logits").stride(0),
        "count": op.attrs["count"],
        "slots": op.attrs["slots"],
        "normalised": int(op.attrs["norm_topk_prob"]),
        "experts": at("experts").data_ptr(),
        "experts_stride": at("experts").stride(0),
        "weights": at("weights").data_ptr(),
        "weights_stride": at("weights").stride(0),
        "slot_of": at("slot_of").data_ptr(),
        "slot_of_stride": at("slot_of").stride(0),
    }


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
    for role, values in oracle({"logits": tile.read("logits")}, **tile.op.attrs).items():
        tile.write(role, values)


TOPK = TaskKind("topk", topk_body, tile, FIELDS, row, oracle, run_tile)
