"""Adding up the outputs of a token's experts, into the residual stream.

h_out = h + the sum of weight * expert_out over the token's experts, in order, + sigmoid(gate) * shared_out if there is
an expert that all tokens share; and what the next RMSNorm needs of it, just as a linear layer leaves it
(megaflow.tasks.linear). The logit `gate` is the last of the router's.
"""

import torch

from megaflow.backend import jit, tl
from megaflow.device import await_inputs
from megaflow.graph import Operator
from megaflow.kinds import Buffers, TaskKind, Tile, Tiling
from megaflow.lanes import long, number, pointer
from megaflow.regions import Access, Span, TiledOperator
from megaflow.tasks.common import by_role
from megaflow.tasks.product import (
    BATCH,
    PRODUCT_FIELDS,
    RESIDUAL_FIELDS,
    ROWS,
    SSQ_OUT,
    SSQ_OUT_STRIDE,
    X_STRIDE,
    X,
    add_residual,
    residual_row,
)

# rows of operators that add up the outputs of experts begin with these
SUM_FIELDS = (*PRODUCT_FIELDS, *RESIDUAL_FIELDS, "slots", "logits", "logits_stride", "count",
              "shared_out", "shared_stride")  # fmt: skip
(SLOTS, LOGITS, LOGITS_STRIDE, COUNT,
 SHARED_OUT, SHARED_STRIDE) = map(tl.constexpr, range(len(SUM_FIELDS) - 6, len(SUM_FIELDS)))  # fmt: skip
FIELDS = (*SUM_FIELDS, "weights", "weights_stride")
WEIGHTS, WEIGHTS_STRIDE = map(tl.constexpr, range(len(FIELDS) - 2, len(FIELDS)))

TILE_COLUMNS = 128
TILE_TOKENS = 4
COLUMNS = tl.constexpr(TILE_COLUMNS)
TOKENS = tl.constexpr(TILE_TOKENS)
LOADED = tl.constexpr(8)  # experts' outputs that are loaded at once


@jit
def weighted_sum(row, o_n, o_t, mask, slots):
    """float32 [columns, tokens]: weight * expert_out, summed over the experts of each token in order."""
    y = tl.full([COLUMNS, TOKENS], 0.0, tl.float32)
    p_x = pointer(row, X, tl.float32) + o_n[:, None]
    p_weight = pointer(row, WEIGHTS, tl.float32) + (o_t * number(row, WEIGHTS_STRIDE))[None, :]
    for first in range(0, slots, LOADED):
        for i in tl.static_range(LOADED):
            m = mask & (first + i < slots)
            pair = (o_t * slots + first + i)[None, :].to(tl.int64)
            x = tl.load(p_x + pair * number(row, X_STRIDE), mask=m, other=0.0)
            y += x * tl.load(p_weight + first + i, mask=m, other=0.0)
    return y


@jit
def gated_shared(row, o_n, o_t, mask):
    """float32 [rows, tokens]: sigmoid(gate) * shared_out; zero where there is no shared expert."""
    present = long(row, SHARED_OUT) != 0
    p_gate = pointer(row, LOGITS, tl.float32) + o_t * number(row, LOGITS_STRIDE) + number(row, COUNT)
    p_shared = pointer(row, SHARED_OUT, tl.float32) + (o_t * number(row, SHARED_STRIDE))[None, :] + o_n[:, None]
    gate = tl.load(p_gate, mask=present & (o_t < number(row, BATCH)), other=0.0)
    return tl.sigmoid(gate)[None, :] * tl.load(p_shared, mask=present & mask, other=0.0)


@jit
def combine_body(row, c_column, c_token, c_unused, step, inputs, CONFIG: tl.constexpr):
    o_n = c_column * COLUMNS + tl.arange(0, COLUMNS)
    o_t = c_token * TOKENS + tl.arange(0, TOKENS)
    m_t = o_t < number(row, BATCH)
    mask = (o_n < number(row, ROWS))[:, None] & m_t[None, :]
    slots = number(row, SLOTS)
    await_inputs(inputs)
    y = weighted_sum(row, o_n, o_t, mask, slots) + gated_shared(row, o_n, o_t, mask)
    ssq = add_residual(row, y, o_n, o_t, mask, CONFIG)
    tl.store(pointer(row, SSQ_OUT, tl.float32) + o_t * number(row, SSQ_OUT_STRIDE) + c_column, ssq, mask=m_t)


def combine_parts(width: int) -> int:
    """Tiles along h; also the number of partial sums of squares that a token gets."""
    return -(-width // TILE_COLUMNS)


def tile(op: Operator, tiling: Tiling) -> TiledOperator:
    assert tiling.part is None, "experts' lists are for the whole batch"
    batch, width = tiling.shape(op, "h")
    slots = tiling.shape(op, "weights")[1]
    across = Span.tiles(0, TILE_COLUMNS)

    def access(role: str, column: Span) -> Access:
        return Access(op.tensor(role).name, tiling.shape(op, role), (Span.tiles(1, TILE_TOKENS), column))

    pairs = Span.tiles(1, TILE_TOKENS * slots)
    expert_out = Access(op.tensor("expert_out").name, (batch * slots, width), (pairs, across))
    reads = [expert_out, access("weights", Span.whole(slots)), access("h", across)]
    summed = slots  # outputs of experts, for each token
    if "shared_out" in op.inputs:
        summed += 1
        reads += [access("shared_out", across), access("gate", gate_span(op))]
    return TiledOperator(
        op.name,
        op.kind,
        grid=(combine_parts(width), -(-batch // TILE_TOKENS)),
        reads=tuple(reads),
        writes=(access("h_out", across), access("out", across), access("ssq_out", Span.tiles(0, 1))),
        tile_bytes=TILE_COLUMNS * min(TILE_TOKENS, batch) * (summed + 1) * 4,
        params=(("batch", batch),),
        tile_flops=2 * TILE_COLUMNS * min(TILE_TOKENS, batch) * summed,
    )


def gate_span(op: Operator) -> Span:
    """Where the shared expert's logit lies among the router's."""
    return Span(None, 1, offset=op.tensor("gate").width - 1)


def shared_row(op: Operator, buffers: Buffers) -> dict[str, int]:
    """The fields of a shared expert; none where there is no such."""
    if "shared_out" not in op.inputs:
        return {}
    at = by_role(op, buffers)
    return {
        "shared_out": at("shared_out").data_ptr(),
        "shared_stride": at("shared_out").stride(0),
        "logits": at("gate").data_ptr(),
        "logits_stride": at("gate").stride(0),
        "count": gate_span(op).offset,
    }

def row(op: Operator, tiled: TiledOperator, buffers: Buffers) -> dict[str, int]:
    at = by_role(op, buffers)
    return residual_row(op, buffers) | shared_row(op, buffers) | {
        "x": at("expert_out").data_ptr(),
        "x_stride": at("expert_out").stride(0),
        "rows": op.tensor("h").width,
        "batch": tiled.param("batch"),
        "out": at("out").data_ptr(),
        "out_stride": at("out").stride(0),
        "weights": at("weights").data_ptr(),
        "weights_stride": at("weights").stride(0),
        "slots": op.tensor("weights").width,
    }


def shared_part(inputs: dict[str, torch.Tensor]) -> torch.Tensor | float:
    """What a shared expert adds, [B, hidden]; 0 where there is none."""
    return inputs["gate"][:, -1:].sigmoid() * inputs["shared_out"] if "shared_out" in inputs else 0.0


def oracle(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The operator in torch, in the dtype of its inputs.

    Args:
        inputs: expert_out [B * K, hidden], its rows are pairs; weights [B, K]; h [B, hidden]; gamma [hidden]; with a
            shared expert shared_out [B, hidden] and gate [B, n], of which the last column counts.
    """
    weights = inputs["weights"]
    y = inputs["expert_out"].unflatten(0, weights.shape)
    h = inputs["h"] + (weights[:, :, None] * y).sum(1) + shared_part(inputs)
    return {"h_out": h, "out": h * inputs["gamma"], "ssq_out": h.square().sum(1, keepdim=True)}


def run_tile(tile: Tile) -> None:
    """A tile is some columns for some tokens."""
    inputs = {role: tile.read(role) for role in ("weights", "h", "shared_out", "gate") if role in tile.op.inputs}
    (tokens, slots), columns = inputs["weights"].shape, inputs["h"].shape[1]
    pair = tile.at[1] * TILE_TOKENS * slots
    column = tile.at[0] * TILE_COLUMNS
    inputs["expert_out"] = tile.buffer("expert_out")[pair : pair + tokens * slots, column : column + columns]
    inputs["gamma"] = tile.buffer("gamma")[column : column + columns]
    for role, values in oracle(inputs).items():
        tile.write(role, values)


COMBINE = TaskKind("combine", combine_body, tile, FIELDS, row, oracle, run_tile)
