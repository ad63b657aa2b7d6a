"""Linear layers: a tile of y = W x, with what precedes and follows it fused in.

Before: the input may be an RMSNorm whose weight the producer has multiplied in already; what is left is the
scale 1 / rms of each token, which commutes with the product. Producers hand over partial sums of squares, one
per tile, so no consumer goes over the input again.
After: the epilogue, one of STORE (qkv), RESIDUAL (add to the residual stream, prepare the next RMSNorm), SILU
(gate and up rows alternate; y = silu(gate) * up) and LOGITS (store, and the best of the tile for argmax).

One task is `run` sub-tiles of CONFIG.rows weight rows, by CONFIG.tokens tokens.
"""

import torch

from megaflow.backend import jit, tl
from megaflow.graph import Operator
from megaflow.kinds import Buffers, KernelConfig, TaskKind, Tiling
from megaflow.regions import Access, Span, TiledOperator
from megaflow.tasks.common import number, pointer
from megaflow.tasks.packing import BLOCK, blocks

FIELDS = (
    "x", "x_stride", "w", "k_blocks", "rows", "run", "epilogue", "batch",
    "ssq_in", "ssq_in_stride", "parts", "norm_width",
    "out", "out_stride",
    "h", "h_stride", "gamma", "ssq_out", "ssq_out_stride",
    "best_value", "best_index", "best_stride",
)  # fmt: skip
(X, X_STRIDE, W, K_BLOCKS, ROWS, RUN, EPILOGUE, BATCH,
 SSQ_IN, SSQ_IN_STRIDE, PARTS, NORM_WIDTH,
 OUT, OUT_STRIDE,
 H, H_STRIDE, GAMMA, SSQ_OUT, SSQ_OUT_STRIDE,
 BEST_VALUE, BEST_INDEX, BEST_STRIDE) = map(tl.constexpr, range(len(FIELDS)))  # fmt: skip

EPILOGUES = ("store", "residual", "silu", "logits")
STORE, RESIDUAL, SILU, LOGITS = map(tl.constexpr, range(len(EPILOGUES)))

WEIGHT_BLOCK = tl.constexpr(BLOCK)
PART_BLOCK = tl.constexpr(256)
LONGEST_RUN = 32


@jit
def tile_product(x, x_stride, w, k_blocks, first_row, o_t, m_t, CONFIG: tl.constexpr):
    """W[first_row : first_row + rows] @ x[o_t].T as float32 [rows, tokens]; rows lie in one weight block."""
    B: tl.constexpr = WEIGHT_BLOCK
    KB: tl.constexpr = CONFIG.k_blocks
    R: tl.constexpr = CONFIG.rows
    T: tl.constexpr = CONFIG.tokens
    o_k = tl.arange(0, KB)
    o_n = tl.arange(0, R)
    o_c = tl.arange(0, B)
    w += (first_row // B).to(tl.int64) * k_blocks * (B * B) + (first_row % B) * B
    w_offsets = o_k[:, None, None] * (B * B) + o_n[None, :, None] * B + o_c[None, None, :]
    if T == 1:
        # one token: multiply and add in registers, reduce across threads once at the end
        p_x = x + tl.sum(o_t) * x_stride + o_k[:, None] * B + o_c[None, :]
        acc = tl.zeros([KB, R, B], tl.float32)
        for k in tl.range(0, k_blocks, KB, num_stages=CONFIG.stages):
            m_k = k + o_k < k_blocks
            p_w = tl.multiple_of(w + k * (B * B) + w_offsets, (1, 1, 16))
            wt = tl.load(p_w, mask=m_k[:, None, None], other=0.0)
            xt = tl.load(tl.multiple_of(p_x + k * B, (1, 16)), mask=m_k[:, None], other=0.0)
            acc += wt.to(tl.float32) * xt.to(tl.float32)[:, None, :]
        return tl.sum(tl.sum(acc, 2), 0)[:, None]
    else:
        # k_blocks independent products side by side: each warp has its own part of K, summed once at the end
        p_x = x + o_t[None, None, :] * x_stride + o_k[:, None, None] * B + o_c[None, :, None]
        acc = tl.zeros([KB, R, T], tl.float32)
        for k in tl.range(0, k_blocks, KB, num_stages=CONFIG.stages):
            m_k = k + o_k < k_blocks
            p_w = tl.multiple_of(w + k * (B * B) + w_offsets, (1, 1, 16))
            wt = tl.load(p_w, mask=m_k[:, None, None], other=0.0)
            xt = tl.load(
                tl.multiple_of(p_x + k * B, (1, 16, 1)), mask=m_k[:, None, None] & m_t[None, None, :], other=0.0
            )
            acc = tl.dot(wt, xt, acc, input_precision="ieee")
        return tl.sum(acc, 0)


@jit
def norm_scale(row, o_t, m_t, CONFIG: tl.constexpr):
    """1 / rms of each token, from the partial sums of squares that the producer's tiles left."""
    parts = number(row, PARTS)
    width = tl.maximum(number(row, NORM_WIDTH), 1)
    p_ssq = pointer(row, SSQ_IN, tl.float32) + o_t * number(row, SSQ_IN_STRIDE)
    T: tl.constexpr = CONFIG.tokens
    PB: tl.constexpr = PART_BLOCK if T == 1 else 64
    total = tl.zeros([T], tl.float32)
    for first in range(0, parts, PB):
        o_p = first + tl.arange(0, PB)
        part = tl.load(p_ssq[:, None] + o_p[None, :], mask=m_t[:, None] & (o_p < parts)[None, :], other=0.0)
        total += tl.sum(part, 1)
    return tl.where(parts > 0, tl.rsqrt(total / width + CONFIG.eps), 1.0)


@jit
def store_silu(row, y, first_row, o_t, m_t, CONFIG: tl.constexpr):
    """out = silu(gate) * up; gate and up rows alternate in y [rows, tokens]."""
    R: tl.constexpr = CONFIG.rows
    T: tl.constexpr = CONFIG.tokens
    gate, up = tl.split(tl.permute(tl.reshape(y, (R // 2, 2, T)), (0, 2, 1)))
    o_f = first_row // 2 + tl.arange(0, R // 2)
    p_out = pointer(row, OUT, CONFIG.element) + o_t[None, :] * number(row, OUT_STRIDE) + o_f[:, None]
    act = gate * tl.sigmoid(gate) * up
    tl.store(p_out, act.to(CONFIG.element), mask=(o_f < number(row, ROWS) // 2)[:, None] & m_t[None, :])


@jit
def add_residual(row, y, o_n, o_t, mask, CONFIG: tl.constexpr):
    """h += y; out = h * gamma, the next RMSNorm's input. Returns the sum of squares of h by token."""
    p_h = pointer(row, H, tl.float32) + o_t[None, :] * number(row, H_STRIDE) + o_n[:, None]
    h = y + tl.load(p_h, mask=mask, other=0.0)
    tl.debug_barrier()  # small tiles are replicated over threads: all have read h before one writes it
    tl.store(p_h, h, mask=mask)
    gamma = tl.load(pointer(row, GAMMA, tl.float32) + o_n, mask=o_n < number(row, ROWS), other=0.0)
    p_out = pointer(row, OUT, CONFIG.element) + o_t[None, :] * number(row, OUT_STRIDE) + o_n[:, None]
    tl.store(p_out, (h * gamma[:, None]).to(CONFIG.element), mask=mask)
    return tl.sum(tl.where(mask, h * h, 0.0), 0)


@jit
def linear_body(row, c_token, c_row, c_unused, step, CONFIG: tl.constexpr):
    R: tl.constexpr = CONFIG.rows
    T: tl.constexpr = CONFIG.tokens
    rows = number(row, ROWS)
    run = number(row, RUN)
    epilogue = number(row, EPILOGUE)
    k_blocks = number(row, K_BLOCKS)
    o_t = c_token * T + tl.arange(0, T)
    m_t = o_t < number(row, BATCH)
    x = pointer(row, X, CONFIG.element)
    x_stride = number(row, X_STRIDE)
    w = pointer(row, W, CONFIG.element)
    scale = norm_scale(row, o_t, m_t, CONFIG)

    ssq = tl.zeros([T], tl.float32)
    best = tl.full([T], float("-inf"), tl.float32)
    best_row = tl.zeros([T], tl.int32)
    first = c_row * run * R
    sub_tiles = tl.minimum(run, (rows - first + R - 1) // R)
    for sub_tile in range(0, sub_tiles):
        first_row = first + sub_tile * R
        o_n = first_row + tl.arange(0, R)
        mask = (o_n < rows)[:, None] & m_t[None, :]
        y = tile_product(x, x_stride, w, k_blocks, first_row, o_t, m_t, CONFIG) * scale[None, :]
        if epilogue == SILU:
            store_silu(row, y, first_row, o_t, m_t, CONFIG)
        elif epilogue == RESIDUAL:
            ssq += add_residual(row, y, o_n, o_t, mask, CONFIG)
        else:
            p_out = pointer(row, OUT, tl.float32) + o_t[None, :].to(tl.int64) * number(row, OUT_STRIDE)
            tl.store(p_out + o_n[:, None], y, mask=mask)
            if epilogue == LOGITS:
                candidate = tl.where(mask, y, float("-inf"))
                tile_best = tl.max(candidate, 0)
                tile_row = tl.min(tl.where(candidate == tile_best[None, :], o_n[:, None], rows), 0)
                best_row = tl.where(tile_best > best, tile_row, best_row)
                best = tl.maximum(best, tile_best)
    if epilogue == RESIDUAL:
        tl.store(pointer(row, SSQ_OUT, tl.float32) + o_t * number(row, SSQ_OUT_STRIDE) + c_row, ssq, mask=m_t)
    elif epilogue == LOGITS:
        at = o_t * number(row, BEST_STRIDE) + c_row
        tl.store(pointer(row, BEST_VALUE, tl.float32) + at, best, mask=m_t)
        tl.store(pointer(row, BEST_INDEX, tl.int32) + at, best_row, mask=m_t)


def rows_per_task(rows: int, config: KernelConfig, workers: int, token_tiles: int) -> int:
    """Weight rows of one task: as many sub-tiles as let all workers finish at nearly the same time.

    The busiest worker's sub-tiles decide the time; a quarter of a sub-tile stands for what a task costs in
    itself (its wait, notify and the refill of the load pipeline).
    """
    sub_tiles = -(-rows // config.rows)

    def cost(run: int) -> float:
        rounds = -(-(-(-sub_tiles // run) * token_tiles) // workers)
        return rounds * (run + 0.25)

    return config.rows * min(range(1, min(LONGEST_RUN, sub_tiles) + 1), key=cost)


def row_tiles(rows: int, config: KernelConfig, workers: int, token_tiles: int) -> int:
    """Number of tasks along the weight's rows; also the number of partial sums that a token gets."""
    return -(-rows // rows_per_task(rows, config, workers, token_tiles))


def tile(op: Operator, tiling: Tiling) -> TiledOperator:
    config = tiling.config
    rows, columns = tiling.shape(op, "weight")
    height = rows_per_task(rows, config, tiling.workers, tiling.token_tiles)

    def access(role: str, column: Span | None = None) -> Access:
        shape = tiling.shape(op, role)
        spans = (Span.tiles(0, config.tokens), column or Span.whole(shape[1]))
        return Access(op.tensor(role).name, shape, spans)

    across = Span.tiles(1, height)
    reads, writes = [access("x")], []
    params = [("run", height // config.rows), ("batch", tiling.symbols["B"])]
    if "ssq" in op.inputs:
        reads.append(access("ssq"))
        params.append(("parts", tiling.shape(op, "ssq")[1]))
    if op.attrs["epilogue"] == "residual":
        reads.append(access("h", across))
        writes += [access("h_out", across), access("out", across), access("ssq_out", Span.tiles(1, 1))]
    elif op.attrs["epilogue"] == "silu":
        writes.append(access("out", Span.tiles(1, height // 2)))
    else:
        writes.append(access("out", across))
    if op.attrs["epilogue"] == "logits":
        writes += [access(role, Span.tiles(1, 1)) for role in ("best_value", "best_index")]
    return TiledOperator(
        op.name,
        op.kind,
        grid=(tiling.token_tiles, -(-rows // height)),
        reads=tuple(reads),
        writes=tuple(writes),
        tile_bytes=height * columns * config.element.primitive_bitwidth // 8,
        params=tuple(params),
    )


def row(op: Operator, tiled: TiledOperator, buffers: Buffers) -> dict[str, int]:
    def at(role: str) -> torch.Tensor:
        return buffers[op.tensor(role).name]

    rows, columns = op.tensor("weight").bind({})
    values = {
        "x": at("x").data_ptr(),
        "x_stride": at("x").stride(0),
        "w": at("weight").data_ptr(),
        "k_blocks": blocks(columns),
        "rows": rows,
        "run": tiled.param("run"),
        "batch": tiled.param("batch"),
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
    if op.attrs["epilogue"] == "residual":
        values |= {
            "h": at("h").data_ptr(),
            "h_stride": at("h").stride(0),
            "gamma": at("gamma").data_ptr(),
            "ssq_out": at("ssq_out").data_ptr(),
            "ssq_out_stride": at("ssq_out").stride(0),
        }
    if op.attrs["epilogue"] == "logits":
        values |= {
            "best_value": at("best_value").data_ptr(),
            "best_index": at("best_index").data_ptr(),
            "best_stride": at("best_value").stride(0),
        }
    return values


def oracle(
    inputs: dict[str, torch.Tensor], epilogue: str, eps: float
) -> dict[str, torch.Tensor]:
    """The operator in torch, in the dtype of its inputs; `weight` is an ordinary [rows, columns] matrix."""
    y = inputs["x"] @ inputs["weight"].T
    if "ssq" in inputs:
        y = y * torch.rsqrt(inputs["ssq"].sum(1, keepdim=True) / inputs["weight"].shape[1] + eps)
    if epilogue == "silu":
        gate, up = y.unflatten(1, (-1, 2)).unbind(2)
        return {"out": torch.nn.functional.silu(gate) * up}
    if epilogue == "residual":
        h = inputs["h"] + y
        return {"h_out": h, "out": h * inputs["gamma"], "ssq_out": h.square().sum(1, keepdim=True)}
    if epilogue == "logits":
        best = y.max(1)
        return {"out": y, "best_value": best.values[:, None], "best_index": best.indices[:, None]}
    return {"out": y}


LINEAR = TaskKind("linear", linear_body, tile, FIELDS, row, oracle)
