"""The embedding look-up of one token: starts the residual stream and prepares the first RMSNorm."""

import torch

from megaflow.backend import jit, tl
from megaflow.device import await_inputs
from megaflow.graph import Operator
from megaflow.kinds import Buffers, TaskKind, Tile, Tiling
from megaflow.lanes import number, pointer
from megaflow.regions import TiledOperator
from megaflow.tasks.common import by_role, token_access
from megaflow.tasks.packing import BLOCK, PackedWeight, blocks

FIELDS = ("tokens", "weight", "rows", "k_blocks", "width", "h", "h_stride", "gamma", "out", "out_stride",
          "ssq_out", "ssq_out_stride")  # fmt: skip
(TOKENS, WEIGHT, ROWS, K_BLOCKS, WIDTH, H, H_STRIDE, GAMMA, OUT, OUT_STRIDE,
 SSQ_OUT, SSQ_OUT_STRIDE) = map(tl.constexpr, range(len(FIELDS)))  # fmt: skip

WEIGHT_BLOCK = tl.constexpr(BLOCK)
CHUNK = tl.constexpr(1024)  # columns at a time


@jit
def embedding_body(row, c_token, c_unused1, c_unused2, step, inputs, CONFIG: tl.constexpr):
    B: tl.constexpr = WEIGHT_BLOCK
    k_blocks = number(row, K_BLOCKS)
    width = number(row, WIDTH)
    await_inputs(inputs)
    token = tl.load(pointer(row, TOKENS, tl.int32) + c_token)
    token = tl.minimum(tl.maximum(token, 0), number(row, ROWS) - 1)
    weight = pointer(row, WEIGHT, CONFIG.element)
    weight += (token // B).to(tl.int64) * k_blocks * (B * B) + (token % B) * B
    p_h = pointer(row, H, tl.float32) + c_token * number(row, H_STRIDE)
    p_out = pointer(row, OUT, CONFIG.element) + c_token * number(row, OUT_STRIDE)
    gamma = pointer(row, GAMMA, tl.float32)
    ssq = tl.full([CHUNK], 0.0, tl.float32)
    for first in range(0, width, CHUNK):
        o_c = first + tl.arange(0, CHUNK)
        m_c = o_c < width
        h = tl.load(weight + (o_c // B) * (B * B) + o_c % B, mask=m_c, other=0.0).to(tl.float32)
        tl.store(p_h + o_c, h, mask=m_c)
        tl.store(p_out + o_c, (h * tl.load(gamma + o_c, mask=m_c, other=0.0)).to(CONFIG.element), mask=m_c)
        ssq += h * h
    tl.store(pointer(row, SSQ_OUT, tl.float32) + c_token * number(row, SSQ_OUT_STRIDE), tl.sum(ssq, 0))


def tile(op: Operator, tiling: Tiling) -> TiledOperator:
    return TiledOperator(
        op.name,
        op.kind,
        grid=(tiling.sequences,),
        reads=(token_access(op, tiling, "tokens"),),
        writes=(token_access(op, tiling, "h"), token_access(op, tiling, "out"), token_access(op, tiling, "ssq_out")),
        tile_bytes=tiling.shape(op, "weight")[1] * tiling.config.element.primitive_bitwidth // 8,
    )


def row(op: Operator, tiled: TiledOperator, buffers: Buffers) -> dict[str, int]:
    at = by_role(op, buffers)
    rows, columns = op.tensor("weight").bind({})
    return {
        "tokens": at("tokens").data_ptr(),
        "weight": at("weight").data_ptr(),
        "rows": rows,
        "k_blocks": blocks(columns),
        "width": columns,
        "h": at("h").data_ptr(),
        "h_stride": at("h").stride(0),
        "gamma": at("gamma").data_ptr(),
        "out": at("out").data_ptr(),
        "out_stride": at("out").stride(0),
        "ssq_out": at("ssq_out").data_ptr(),
        "ssq_out_stride": at("ssq_out").stride(0),
    }


def oracle(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The operator in torch, in the dtype of its weight [rows, columns]."""
    h = inputs["weight"][inputs["tokens"].long()]
    return {"h": h, "out": h * inputs["gamma"], "ssq_out": h.square().sum(1, keepdim=True)}


def run_tile(tile: Tile) -> None:
    rows, columns = tile.op.tensor("weight").bind({})
    token = tile.read("tokens").long().clamp(0, rows - 1)
    weight = PackedWeight(tile.buffer("weight"), rows, columns).gather_rows(token).float()
    first = torch.zeros_like(token)  # in the matrix of this row alone
    outputs = oracle({"tokens": first, "weight": weight, "gamma": tile.buffer("gamma")})
    for role, values in outputs.items():
        tile.write(role, values)


EMBEDDING = TaskKind("embedding", embedding_body, tile, FIELDS, row, oracle, run_tile)
