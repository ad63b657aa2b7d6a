"""Adding up the outputs of a token's experts, into the residual stream.

h_out = h + the sum of weight * expert_out over the token's experts, in order; and what the next RMSNorm needs of it,
just as a linear layer leaves it (megaflow.tasks.linear).
"""

import torch

from megaflow.backend import jit, tl
from megaflow.device import await_inputs
from megaflow.graph import Operator
from megaflow.kinds import Buffers, TaskKind, Tile, Tiling
from megaflow.regions import Access, Span, TiledOperator
from megaflow.tasks.common import by_role, number, pointer
from megaflow.tasks.linear import rows_per_task
from megaflow.tasks.product import (
    BATCH,
    PRODUCT_FIELDS,
    RESIDUAL_FIELDS,
    ROWS,
    RUN,
    SSQ_OUT,
    SSQ_OUT_STRIDE,
    X_STRIDE,
    X,
    add_residual,
    residual_row,
)

FIELDS = (*PRODUCT_FIELDS, *RESIDUAL_FIELDS, "weights", "weights_stride", "slots")
WEIGHTS, WEIGHTS_STRIDE, SLOTS = map(tl.constexpr, range(len(FIELDS) - 3, len(FIELDS)))

LOADED = tl.constexpr(8)  # experts' outputs that are loaded at once


@jit
def weighted_sum(row, o_n, o_t, mask, slots, CONFIG: tl.constexpr):
    """float32 [rows, tokens]: weight * expert_out, summed over the experts of each token in order."""
    y = tl.full([CONFIG.rows, CONFIG.tokens], 0.0, tl.float32)
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
def combine_body(row, c_column, c_token, c_unused, step, inputs, CONFIG: tl.constexpr):
    R: tl.constexpr = CONFIG.rows
    T: tl.constexpr = CONFIG.tokens
    run = number(row, RUN)
    width = number(row, ROWS)
    slots = number(row, SLOTS)
    o_t = c_token * T + tl.arange(0, T)
    m_t = o_t < number(row, BATCH)
    await_inputs(inputs)
    ssq = tl.full([T], 0.0, tl.float32)
    for i in range(0, run):
        o_n = (c_column * run + i) * R + tl.arange(0, R)
        mask = (o_n < width)[:, None] & m_t[None, :]
        ssq += add_residual(row, weighted_sum(row, o_n, o_t, mask, slots, CONFIG), o_n, o_t, mask, CONFIG)
    tl.store(pointer(row, SSQ_OUT, tl.float32) + o_t * number(row, SSQ_OUT_STRIDE) + c_column, ssq, mask=m_t)


def tile(op: Operator, tiling: Tiling) -> TiledOperator:
    assert tiling.part is None, "experts' lists are for the whole batch"
    config = tiling.config
    batch, width = tiling.shape(op, "h")
    slots = tiling.shape(op, "weights")[1]
    height = rows_per_task(width, config, tiling.workers, tiling.token_tiles)
    across = Span.tiles(0, height)

    def access(role: str, column: Span) -> Access:
        return Access(op.tensor(role).name, tiling.shape(op, role), (Span.tiles(1, config.tokens), column))

    pairs = Span.tiles(1, config.tokens * slots)
    expert_out = Access(op.tensor("expert_out").name, (batch * slots, width), (pairs, across))
    return TiledOperator(
        op.name,
        op.kind,
        grid=(-(-width // height), tiling.token_tiles),
        reads=(expert_out, access("weights", Span.whole(slots)), access("h", across)),
        writes=(access("h_out", across), access("out", across), access("ssq_out", Span.tiles(0, 1))),
        tile_bytes=height * min(config.tokens, batch) * (slots + 1) * 4,
        params=(("run", height // config.rows), ("batch", batch)),
        tile_flops=2 * height * min(config.tokens, batch) * slots,
    )


def row(op: Operator, tiled: TiledOperator, buffers: Buffers) -> dict[str, int]:
    at = by_role(op, buffers)
    return residual_row(op, buffers) | {
        "x": at("expert_out").data_ptr(),
        "x_stride": at("expert_out").stride(0),
        "rows": op.tensor("h").width,
        "run": tiled.param("run"),
        "batch": tiled.param("batch"),
        "out": at("out").data_ptr(),
        "out_stride": at("out").stride(0),
        "weights": at("weights").data_ptr(),
        "weights_stride": at("weights").stride(0),
        "slots": op.tensor("weights").width,
    }


def oracle(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The operator in torch, in the dtype of its inputs; expert_out is [B * K, hidden], its rows are pairs."""
    weights = inputs["weights"]
    y = inputs["expert_out"].unflatten(0, weights.shape)
    h = inputs["h"] + (weights[:, :, None] * y).sum(1)
    return {"h_out": h, "out": h * inputs["gamma"], "ssq_out": h.square().sum(1, keepdim=True)}


def run_tile(tile: Tile) -> None:
    """A tile is some columns for some tokens."""
    inputs = {role: tile.read(role) for role in ("weights", "h")}
    (tokens, slots), columns = inputs["weights"].shape, inputs["h"].shape[1]
    pair = tile.at[1] * tile.config.tokens * slots
    column = tile.at[0] * tile.tiled.param("run") * tile.config.rows
    inputs["expert_out"] = tile.buffer("expert_out")[pair : pair + tokens * slots, column : column + columns]
    inputs["gamma"] = tile.buffer("gamma")[column : column + columns]
    for role, values in oracle(inputs).items():
        tile.write(role, values)


COMBINE = TaskKind("combine", combine_body, tile, FIELDS, row, oracle, run_tile)
