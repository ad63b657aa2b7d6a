"""Linear layers: a tile of y = W x, with what precedes and follows it fused in.

Before: the input may be an RMSNorm whose weight the producer has multiplied in already; what is left is the
scale 1 / rms of each token, which commutes with the product. Producers hand over partial sums of squares, one
per tile, so no consumer goes over the input again.
After: the epilogue, one of STORE (qkv), RESIDUAL (add to the residual stream, prepare the next RMSNorm), SILU
(gate and up rows alternate; y = silu(gate) * up) and LOGITS (store, and the best of the tile for argmax).

One task is `run` sub-tiles of CONFIG.rows weight rows, by CONFIG.tokens tokens.
"""

from megaflow.backend import jit, tl
from megaflow.device import await_inputs, prefetch
from megaflow.graph import Operator
from megaflow.kinds import Buffers, KernelConfig, TaskKind, Tiling
from megaflow.regions import Access, Span, TiledOperator
from megaflow.tasks.common import by_role, number, pointer
from megaflow.tasks.linear_oracle import oracle, run_tile
from megaflow.tasks.packing import BLOCK, blocks

FIELDS = (
    "x", "x_stride", "w", "k_blocks", "rows", "run", "epilogue", "batch",
    "ssq_in", "ssq_in_stride", "parts", "norm_width",
    "out", "out_stride",
    "h", "h_out", "h_stride", "gamma", "ssq_out", "ssq_out_stride",
    "best_value", "best_index", "best_stride",
)  # fmt: skip
(X, X_STRIDE, W, K_BLOCKS, ROWS, RUN, EPILOGUE, BATCH,
 SSQ_IN, SSQ_IN_STRIDE, PARTS, NORM_WIDTH,
 OUT, OUT_STRIDE,
 H, H_OUT, H_STRIDE, GAMMA, SSQ_OUT, SSQ_OUT_STRIDE,
 BEST_VALUE, BEST_INDEX, BEST_STRIDE) = map(tl.constexpr, range(len(FIELDS)))  # fmt: skip

EPILOGUES = ("store", "residual", "silu", "logits")
STORE, RESIDUAL, SILU, LOGITS = map(tl.constexpr, range(len(EPILOGUES)))

WEIGHT_BLOCK = tl.constexpr(BLOCK)
PART_BLOCK = tl.constexpr(256)
LONGEST_RUN = 32


@jit
def multiply(acc, x, x_stride, w, k, k_blocks, o_t, m_t, CONFIG: tl.constexpr):
    """Add the product of weight blocks k to k + KB (of one sub-tile, at w) and the input's same columns to acc.

    One token: multiply and add in registers, acc is [KB, rows, 64]. Several: KB products side by side on the
    tensor cores, so that each warp has its own part of K; acc is [KB, rows, tokens].
    """
    B: tl.constexpr = WEIGHT_BLOCK
    KB: tl.constexpr = CONFIG.k_blocks
    T: tl.constexpr = CONFIG.tokens
    o_k = k + tl.arange(0, KB)
    o_n = tl.arange(0, CONFIG.rows)
    o_c = tl.arange(0, B)
    m_k = o_k < k_blocks
    p_w = w + (o_k[:, None, None] * (B * B) + o_n[None, :, None] * B + o_c[None, None, :])
    wt = tl.load(tl.multiple_of(p_w, (1, 1, 16)), mask=m_k[:, None, None], other=0.0)
    if T == 1:
        p_x = x + tl.sum(o_t) * x_stride + (o_k[:, None] * B + o_c[None, :])
        xt = tl.load(tl.multiple_of(p_x, (1, 16)), mask=m_k[:, None], other=0.0)
        return acc + wt.to(tl.float32) * xt.to(tl.float32)[:, None, :]
    else:
        p_x = x + o_t[None, None, :] * x_stride + (o_k[:, None, None] * B + o_c[None, :, None])
        m_x = m_k[:, None, None] & m_t[None, None, :]
        xt = tl.load(tl.multiple_of(p_x, (1, 16, 1)), mask=m_x, other=0.0)
        return tl.dot(wt, xt, acc, input_precision="ieee")


@jit
def empty_product(CONFIG: tl.constexpr):
    """The accumulator of `multiply`, zero."""
    KB: tl.constexpr = CONFIG.k_blocks
    R: tl.constexpr = CONFIG.rows
    LAST: tl.constexpr = WEIGHT_BLOCK if CONFIG.tokens == 1 else CONFIG.tokens
    return tl.full([KB, R, LAST], 0.0, tl.float32)


@jit
def reduce_product(acc, CONFIG: tl.constexpr):
    """float32 [rows, tokens] from the accumulator of `multiply`."""
    if CONFIG.tokens == 1:
        return tl.sum(tl.sum(acc, 2), 0)[:, None]
    else:
        return tl.sum(acc, 0)


@jit
def squares(row, o_t, m_t, CONFIG: tl.constexpr):
    """The partial sums of squares that the producer's tiles left, as float32 [tokens, n] with the same sum.

    For one token the last addition, across threads, is left until the product is done: its latency hides there.
    """
    T: tl.constexpr = CONFIG.tokens
    PB: tl.constexpr = PART_BLOCK if T == 1 else 32
    parts = number(row, PARTS)
    p_ssq = pointer(row, SSQ_IN, tl.float32) + o_t * number(row, SSQ_IN_STRIDE)
    total = tl.full([T, PB], 0.0, tl.float32)
    for first in range(0, parts, PB):
        o_p = first + tl.arange(0, PB)
        total += tl.load(p_ssq[:, None] + o_p[None, :], mask=m_t[:, None] & (o_p < parts)[None, :], other=0.0)
    if T == 1:
        return total
    else:
        return tl.sum(total, 1)[:, None]


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


@jit
def linear_body(row, c_row, c_token, c_unused, step, inputs, CONFIG: tl.constexpr):
    B: tl.constexpr = WEIGHT_BLOCK
    KB: tl.constexpr = CONFIG.k_blocks
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
    weight = pointer(row, W, CONFIG.element)
    parts = number(row, PARTS)
    width = tl.maximum(number(row, NORM_WIDTH), 1)
    first = c_row * run * R
    sub_tiles = tl.minimum(run, (rows - first + R - 1) // R)

    o_k = tl.arange(0, CONFIG.prefetch)
    w = weight + (first // B).to(tl.int64) * k_blocks * (B * B) + (first % B) * B
    prefetch(w + (o_k[:, None] * (B * B) + tl.arange(0, R)[None, :] * B), (o_k < k_blocks)[:, None])
    await_inputs(inputs)
    sums = squares(row, o_t, m_t, CONFIG)

    ssq = tl.full([T], 0.0, tl.float32)
    best = tl.full([T], float("-inf"), tl.float32)
    best_row = tl.full([T], 0, tl.int32)
    acc = empty_product(CONFIG)
    # one loop over all sub-tiles, so that the load pipeline does not run dry between them
    rounds = (k_blocks + KB - 1) // KB
    for i in tl.range(0, sub_tiles * rounds, num_stages=CONFIG.stages):
        first_row = first + i // rounds * R
        k = i % rounds * KB
        w = weight + (first_row // B).to(tl.int64) * k_blocks * (B * B) + (first_row % B) * B
        acc = multiply(acc, x, x_stride, w, k, k_blocks, o_t, m_t, CONFIG)
        if k + KB >= k_blocks:
            scale = tl.where(parts > 0, tl.rsqrt(tl.sum(sums, 1) / width + CONFIG.eps), 1.0)
            y = reduce_product(acc, CONFIG) * scale[None, :]
            acc = empty_product(CONFIG)
            o_n = first_row + tl.arange(0, R)
            mask = (o_n < rows)[:, None] & m_t[None, :]
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
        spans = (tiling.along_batch(1, config.tokens), column or Span.whole(shape[1]))
        return Access(op.tensor(role).name, shape, spans)

    across = Span.tiles(0, height)
    reads, writes = [access("x")], []
    params = [("run", height // config.rows), ("batch", tiling.sequences)]
    if "ssq" in op.inputs:
        reads.append(access("ssq"))
        params.append(("parts", tiling.shape(op, "ssq")[1]))
    if op.attrs["epilogue"] == "residual":
        reads.append(access("h", across))
        writes += [access("h_out", across), access("out", across), access("ssq_out", Span.tiles(0, 1))]
    elif op.attrs["epilogue"] == "silu":
        writes.append(access("out", Span.tiles(0, height // 2)))
    else:
        writes.append(access("out", across))
    if op.attrs["epilogue"] == "logits":
        writes += [access(role, Span.tiles(0, 1)) for role in ("best_value", "best_index")]
    token_tiles = -(-tiling.sequences // config.tokens)
    element_bytes = config.element.primitive_bitwidth // 8
    return TiledOperator(
        op.name,
        op.kind,
        # the token tiles of one weight tile run side by side
        grid=(-(-rows // height), token_tiles),
        reads=tuple(reads),
        writes=tuple(writes),
        tile_bytes=height * columns * element_bytes,
        params=tuple(params),
        tile_flops=2 * height * columns * min(config.tokens, tiling.sequences),
        early_bytes=config.rows * min(config.prefetch * BLOCK, columns) * element_bytes,
        readers=token_tiles,
    )


def row(op: Operator, tiled: TiledOperator, buffers: Buffers) -> dict[str, int]:
    at = by_role(op, buffers)
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
            "h_out": at("h_out").data_ptr(),
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


LINEAR = TaskKind("linear", linear_body, tile, FIELDS, row, oracle, run_tile)
