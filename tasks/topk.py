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
LOWEST = tl.constexpr(-(2**31))
UNCHOSEN = tl.constexpr(NO_SLOT)
WARPS = tl.constexpr(4)
LANES = tl.constexpr(32)


@jit
def experts_of(tile: tl.constexpr):
    """int32 [WARPS, LANES]: the numbers of the experts in a tile, one for each lane, alike in all warps."""
    return tl.broadcast_to(tl.arange(0, LANES)[None, :], (WARPS, LANES)) + tile * LANES


@jit
def choose(p_logits, count, slots, normalised, CONFIG: tl.constexpr):
    """The slots of experts, int32 (or UNCHOSEN), and their weights, float32: a tile for every 32 experts.

    Each warp finds out by itself, and its row of a tile [WARPS, LANES] is like any other's: reductions across warps
    would cost barriers, two for each slot.
    """
    N: tl.constexpr = CONFIG.experts // LANES
    logits = ()
    left = ()
    chosen = ()
    for j in tl.static_range(N):
        m_e = experts_of(j) < count
        logit = tl.load(p_logits + experts_of(j), mask=m_e, other=float("-inf"))
        # integers in the order of the logits: whatever these are, NaN too, the choices are different experts
        bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
        order = tl.maximum(bits ^ ((bits >> 31) & LAST), LOWEST + 1)
        logits = logits + (logit,)
        left = left + (tl.where(m_e, order, LOWEST),)
        chosen = chosen + (tl.full([WARPS, LANES], UNCHOSEN, tl.int32),)
    for i in range(0, slots):
        highest = tl.max(over_tiles(left, True, N), 1)[:, None]
        candidates = ()
        for j in tl.static_range(N):
            candidates = candidates + (tl.where(left[j] == highest, experts_of(j), LAST),)
        best = tl.min(over_tiles(candidates, False, N), 1)[:, None]
        still_left = ()
        now_chosen = ()
        for j in tl.static_range(N):
            here = experts_of(j) == best
            still_left = still_left + (tl.where(here, LOWEST, left[j]),)
            now_chosen = now_chosen + (tl.where(here, i, chosen[j]),)
        left = still_left
        chosen = now_chosen
    highest = tl.max(over_tiles(logits, True, N), 1)[:, None]
    total = tl.full([WARPS, LANES], 0.0, tl.float32)
    for j in tl.static_range(N):
        total += tl.where((chosen[j] >= 0) | (normalised == 0), tl.exp(logits[j] - highest), 0.0)
    total = tl.sum(total, 1)[:, None]
    weights = ()
    for j in tl.static_range(N):
        weights = weights + (tl.exp(logits[j] - highest) / total,)
    return chosen, weights


@jit
def over_tiles(tiles, largest: tl.constexpr, N: tl.constexpr):
    """The largest or the smallest at each place of N tiles."""
    found = tiles[0]
    for j in tl.static_range(1, N):
        found = tl.maximum(found, tiles[j]) if largest else tl.minimum(found, tiles[j])
    return found


@jit
def expert_in(c_slot, p_logits, count, slots, normalised, CONFIG: tl.constexpr):
    """The expert in a token's slot and its weight."""
    chosen, weights = choose(p_logits, count, slots, normalised, CONFIG)
    both = tl.full([WARPS, LANES], 0, tl.int64)
    for j in tl.static_range(CONFIG.experts // LANES):
        weight = (weights[j].to(tl.int32, bitcast=True) & LAST).to(tl.int64)  # it has no sign
        both += tl.where(chosen[j] == c_slot, (experts_of(j).to(tl.int64) << 32) | weight, 0)
    both = tl.max(tl.sum(both, 1), 0)  # alike in all warps
    return (both >> 32).to(tl.int32), (both & LAST).to(tl.int32).to(tl.float32, bitcast=True)


@jit
def topk_body(row, c_token, c_unused1, c_unused2, step, inputs, CONFIG: tl.constexpr):
    count = number(row, COUNT)
    slots = number(row, SLOTS)
    normalised = number(row, NORMALISED)
    p_logits = pointer(row, LOGITS, tl.float32) + c_token * number(row, LOGITS_STRIDE)
    await_inputs(inputs)
    chosen, weights = choose(p_logits, count, slots, normalised, CONFIG)
    once = (tl.arange(0, WARPS) == 0)[:, None]
    p_expert = pointer(row, EXPERTS, tl.int32) + c_token * number(row, EXPERTS_STRIDE)
    p_weight = pointer(row, WEIGHTS, tl.float32) + c_token * number(row, WEIGHTS_STRIDE)
    p_slot = pointer(row, SLOT_OF, tl.int32) + c_token * number(row, SLOT_OF_STRIDE)
    for j in tl.static_range(CONFIG.experts // LANES):
        o_e = experts_of(j)
        tl.store(p_expert + chosen[j], o_e, mask=(chosen[j] >= 0) & once)
        tl.store(p_weight + chosen[j], weights[j], mask=(chosen[j] >= 0) & once)
        tl.store(p_slot + o_e, chosen[j], mask=(o_e < count) & once)


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
