"""Choosing the experts of one token: softmax over the router's logits of experts, the K largest, their weights.

What follows the logits of the `count` experts is not looked at.
"""

import torch

from megaflow.backend import jit, tl
from megaflow.device import await_inputs
from megaflow.errors import PlanError
from megaflow.graph import Operator
from megaflow.kinds import Buffers, TaskKind, Tile, Tiling
from megaflow.regions import TiledOperator
from megaflow.tasks.common import by_role, number, pointer, token_access

FIELDS = ("logits", "logits_stride", "count", "slots", "normalised", "experts", "experts_stride",
          "weights", "weights_stride")  # fmt: skip
(LOGITS, LOGITS_STRIDE, COUNT, SLOTS, NORMALISED, EXPERTS, EXPERTS_STRIDE,
 WEIGHTS, WEIGHTS_STRIDE) = map(tl.constexpr, range(len(FIELDS)))  # fmt: skip

MOST_EXPERTS = 512
MOST_SLOTS = 16  # experts of a token
EXPERT_BLOCK = tl.constexpr(MOST_EXPERTS)
SLOT_BLOCK = tl.constexpr(MOST_SLOTS)
LAST = tl.constexpr(2**31 - 1)
LOWEST = tl.constexpr(-(2**63))


@jit
def ascending(bits):
    """int32 bits of floats -> int32 in the order of the floats; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def topk_body(row, c_token, c_unused1, c_unused2, step, inputs, CONFIG: tl.constexpr):
    count = number(row, COUNT)
    slots = number(row, SLOTS)
    o_e = tl.arange(0, EXPERT_BLOCK)
    m_e = o_e < count
    p_logits = pointer(row, LOGITS, tl.float32) + c_token * number(row, LOGITS_STRIDE)
    await_inputs(inputs)
    logits = tl.load(p_logits + o_e, mask=m_e, other=float("-inf"))
    largest = tl.max(logits, 0)
    total = tl.sum(tl.exp(logits - largest), 0)
    # one number for logit and expert, the lower expert before its equals: one reduction finds the best, and whatever
    # the logits are, NaN too, the choices are different experts
    logits = tl.where(logits == 0.0, 0.0, logits)  # -0.0 equals 0.0
    order = ascending(logits.to(tl.int32, bitcast=True)).to(tl.int64)
    left = tl.where(m_e, (order << 32) | (o_e ^ LAST).to(tl.int64), LOWEST)
    o_s = tl.arange(0, SLOT_BLOCK)
    chosen = tl.full([SLOT_BLOCK], LOWEST, tl.int64)
    for slot in range(0, slots):
        best = tl.max(left, 0)
        left = tl.where(left == best, LOWEST, left)
        chosen = tl.where(o_s == slot, best, chosen)
    m_s = o_s < slots
    logit = ascending((chosen >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
    weight = tl.where(m_s, tl.exp(logit - largest) / total, 0.0)
    if number(row, NORMALISED) != 0:
        weight = weight / tl.sum(weight, 0)
    p_experts = pointer(row, EXPERTS, tl.int32) + c_token * number(row, EXPERTS_STRIDE)
    p_weights = pointer(row, WEIGHTS, tl.float32) + c_token * number(row, WEIGHTS_STRIDE)
    tl.store(p_experts + o_s, ((chosen & LAST) ^ LAST).to(tl.int32), mask=m_s)
    tl.store(p_weights + o_s, weight, mask=m_s)


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
        writes=(token_access(op, tiling, "experts"), token_access(op, tiling, "weights")),
        tile_bytes=count * 4,
    )


def row(op: Operator, tiled: TiledOperator, buffers: Buffers) -> dict[str, int]:
    at = by_role(op, buffers)
    return {
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


def oracle(inputs: dict[str, torch.Tensor], count: int, slots: int, norm_topk_prob: bool) -> dict[str, torch.Tensor]:
    """The operator in torch, in the dtype of the logits [B, n], of which the first `count` are experts'.

    Returns:
        experts and weights [B, slots], the best first.
    """
    logits = inputs["logits"][:, :count]
    experts = logits.sort(dim=1, descending=True, stable=True).indices[:, :slots]
    weights = logits.softmax(1).gather(1, experts)
    if norm_topk_prob:
        weights = weights / weights.sum(1, keepdim=True)
    return {"experts": experts, "weights": weights}


def run_tile(tile: Tile) -> None:
    slots = tile.op.tensor("experts").width
    attrs = tile.op.attrs
    outputs = oracle({"logits": tile.read("logits")}, attrs["count"], slots, attrs["norm_topk_prob"])
    for role, values in outputs.items():
        tile.write(role, values)


TOPK = TaskKind("topk", topk_body, tile, FIELDS, row, oracle, run_tile)
