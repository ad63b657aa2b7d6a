"""What tasks with a weight matrix share: the product of a weight tile and tokens, what precedes and what follows it.

Operators' rows begin with the same fields (PRODUCT_FIELDS, and RESIDUAL_FIELDS after them where there is a residual
stream), so that the functions here take their pointers and sizes from the row of any of them.
"""

from megaflow.backend import jit, tl
from megaflow.graph import Operator
from megaflow.kinds import Buffers
from megaflow.lanes import number, pointer
from megaflow.regions import TiledOperator
from megaflow.tasks.common import by_role
from megaflow.tasks.packing import BLOCK, blocks

PRODUCT_FIELDS = (
    "x", "x_stride", "w", "k_blocks", "rows", "run", "epilogue", "batch",
    "ssq_in", "ssq_in_stride", "parts", "norm_width",
    "out", "out_stride",
)  # fmt: skip
RESIDUAL_FIELDS = ("h", "h_out", "h_stride", "gamma", "ssq_out", "ssq_out_stride")
(X, X_STRIDE, W, K_BLOCKS, ROWS, RUN, EPILOGUE, BATCH,
 SSQ_IN, SSQ_IN_STRIDE, PARTS, NORM_WIDTH,
 OUT, OUT_STRIDE,
 H, H_OUT, H_STRIDE, GAMMA, SSQ_OUT, SSQ_OUT_STRIDE,
) = map(tl.constexpr, range(len(PRODUCT_FIELDS + RESIDUAL_FIELDS)))  # fmt: skip

EPILOGUES = ("store", "residual", "silu", "logits")
STORE, RESIDUAL, SILU, LOGITS = map(tl.constexpr, range(len(EPILOGUES)))

WEIGHT_BLOCK = tl.constexpr(BLOCK)
PART_BLOCK = tl.constexpr(256)


@jit
def sub_tile(weight, first_row, k_blocks):
    """Where the weight block is in which a sub-tile begins, plus its row in that block."""
    B: tl.constexpr = WEIGHT_BLOCK
    return weight + (first_row // B).to(tl.int64) * k_blocks * (B * B) + (first_row % B) * B


@jit
def multiply(acc, x, x_stride, w, k, end, o_t, m_t, CONFIG: tl.constexpr, T: tl.constexpr):
    """Add the product of weight blocks k to k + KB, as far as they come before `end`, and the input's same columns.

    w is where a sub-tile of CONFIG.rows weight rows begins. One token: multiply and add in registers, acc is [KB, rows,
    64]. Several: a block's 64 rows on the tensor cores, acc is [64, T].
    """
    B: tl.constexpr = WEIGHT_BLOCK
    KB: tl.constexpr = CONFIG.k_blocks
    o_n = tl.arange(0, CONFIG.rows)
    o_c = tl.arange(0, B)
    if T == 1:
        o_k = k + tl.arange(0, KB)
        m_k = o_k < end
        p_w = w + (o_k[:, None, None] * (B * B) + o_n[None, :, None] * B + o_c[None, None, :])
        wt = tl.load(tl.multiple_of(p_w, (1, 1, 16)), mask=m_k[:, None, None], other=0.0)
        p_x = x + tl.sum(o_t) * x_stride + (o_k[:, None] * B + o_c[None, :])
        xt = tl.load(tl.multiple_of(p_x, (1, 16)), mask=m_k[:, None], other=0.0)
        return acc + wt.to(tl.float32) * xt.to(tl.float32)[:, None, :]
    else:
        tl.static_assert(CONFIG.rows == B)
        for j in tl.static_range(KB):
            m_c = (o_c < tl.where(k + j < end, B, 0))[None, :]
            p_w = w + (k + j) * (B * B) + (o_n[:, None] * B + o_c[None, :])
            wt = tl.load(tl.multiple_of(p_w, (1, 16)), mask=m_c, other=0.0)
            p_x = x + o_t[:, None] * x_stride + (o_c + (k + j) * B)[None, :]
            xt = tl.load(tl.multiple_of(p_x, (1, 16)), mask=m_t[:, None] & m_c, other=0.0)
            acc = tl.dot(wt, tl.trans(xt), acc, input_precision="ieee")
        return acc


@jit
def empty_product(CONFIG: tl.constexpr, T: tl.constexpr):
    """The accumulator of `multiply`, zero."""
    if T == 1:
        return tl.full([CONFIG.k_blocks, CONFIG.rows, WEIGHT_BLOCK], 0.0, tl.float32)
    else:
        return tl.full([CONFIG.rows, T], 0.0, tl.float32)


@jit
def reduce_product(acc, T: tl.constexpr):
    """float32 [rows, T] from the accumulator of `multiply`."""
    if T == 1:
        return tl.sum(tl.sum(acc, 2), 0)[:, None]
    else:
        return acc


@jit
def squares(row, o_t, m_t, T: tl.constexpr):
    """The partial sums of squares that the producer's tiles left, as float32 [tokens, n] with the same sum.

    The last addition, across threads, is left until the product is done: the latency of all this hides there.
    """
    PB: tl.constexpr = PART_BLOCK if T == 1 else 32
    parts = number(row, PARTS)
    p_ssq = pointer(row, SSQ_IN, tl.float32) + o_t * number(row, SSQ_IN_STRIDE)
    total = tl.full([T, PB], 0.0, tl.float32)
    for first in range(0, parts, PB):
        o_p = first + tl.arange(0, PB)
        total += tl.load(p_ssq[:, None] + o_p[None, :], mask=m_t[:, None] & (o_p < parts)[None, :], other=0.0)
    return total


@jit
def norm_scale(sums, parts, width, CONFIG: tl.constexpr):
    """1 / rms of each token, float32 [tokens], from `squares`; 1 where the input is no RMSNorm (no parts)."""
    return tl.where(parts > 0, tl.rsqrt(tl.sum(sums, 1) / width + CONFIG.eps), 1.0)


@jit
def store_product(row, y, o_n, o_t, mask):
    """out = y, in float32."""
    p_out = pointer(row, OUT, tl.float32) + o_t[None, :].to(tl.int64) * number(row, OUT_STRIDE)
    tl.store(p_out + o_n[:, None], y, mask=mask)


@jit
def store_silu(row, y, first_row, o_t, m_t, share, CONFIG: tl.constexpr):
    """out = silu(gate) * up * share; gate and up rows alternate in y [rows, tokens]."""
    R: tl.constexpr = y.shape[0]
    T: tl.constexpr = y.shape[1]
    gate, up = tl.split(tl.permute(tl.reshape(y, (R // 2, 2, T)), (0, 2, 1)))
    o_f = first_row // 2 + tl.arange(0, R // 2)
    p_out = pointer(row, OUT, CONFIG.element) + o_t[None, :] * number(row, OUT_STRIDE) + o_f[:, None]
    act = gate * tl.sigmoid(gate) * up * share
    tl.store(p_out, act.to(CONFIG.element), mask=(o_f < number(row, ROWS) // 2)[:, None] & m_t[None, :])


@jit
def add_residual(row, y, o_n, o_t, mask, CONFIG: tl.constexpr):
    """h_out = h + y; out = h_out * gamma, the next RMSNorm's input. Returns the sum of squares by token.

    Not in place: small tiles are replicated over threads, and one would write h before another has read it.
    """
    h_offsets = o_t[None, :] * number(row, H_STRIDE) + o_n[:, None]
    h = y + tl.load(pointer(row, H, tl.float32) + h_offsets, mask=mask, other=0.0)
    tl.store(pointer(row, H_OUT, tl.float32) + h_offsets, h, mask=mask)
    gamma = tl.load(pointer(row, GAMMA, tl.float32) + o_n, mask=o_n < number(row, ROWS), other=0.0)
    p_out = pointer(row, OUT, CONFIG.element) + o_t[None, :] * number(row, OUT_STRIDE) + o_n[:, None]
    tl.store(p_out, (h * gamma[:, None]).to(CONFIG.element), mask=mask)
    return tl.sum(tl.where(mask, h * h, 0.0), 0)


def product_row(op: Operator, tiled: TiledOperator, buffers: Buffers) -> dict[str, int]:
    """PRODUCT_FIELDS of an operator with a weight [..., rows, columns], but for the batch."""
    at = by_role(op, buffers)
    *_, rows, columns = op.tensor("weight").bind({})
    values = {
        "x": at("x").data_ptr(),
        "x_stride": at("x").stride(0),
        "w": at("weight").data_ptr(),
        "k_blocks": blocks(columns),
        "rows": rows,
        "run": tiled.param("run"),
        "epilogue": EPILOGUES.index(op.attrs["epilogue"]),
        "out": at("out").data_ptr(),
        "out_stride": at("out").stride(0),
    }
    if "ssq" in op.inputs:
        values |= {
            "ssq_in": at("ssq").data_ptr(),
            "ssq_in_stride": at("ssq").stride(0),
            "parts": tiled.param("parts"),
            "norm_width": columns,
        }
    return values


def residual_row(op: Operator, buffers: Buffers) -> dict[str, int]:
    """RESIDUAL_FIELDS of an operator that adds to the residual stream."""
    at = by_role(op, buffers)
    return {
        "h": at("h").data_ptr(),
        "h_out": at("h_out").data_ptr(),
        "h_stride": at("h").stride(0),
        "gamma": at("gamma").data_ptr(),
        "ssq_out": at("ssq_out").data_ptr(),
        "ssq_out_stride": at("ssq_out").stride(0),
    }
