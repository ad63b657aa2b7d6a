"""Linear layers: a tile of y = W x, with what precedes and follows it fused in.

Before: the input may be an RMSNorm whose weight the producer has multiplied in already; what is left is the
scale 1 / rms of each token, which commutes with the product. Producers hand over partial sums of squares, one
per tile, so no consumer goes over the input again.
After: the epilogue, one of STORE (qkv; with a bias if there is one), RESIDUAL (add to the residual stream, prepare the
next RMSNorm), SILU (gate and up rows alternate; y = silu(gate) * up) and LOGITS (store, and the best of the tile for
argmax).

One task is `run` sub-tiles of CONFIG.rows weight rows, by CONFIG.tokens tokens.
"""

from megaflow.backend import jit, tl
from megaflow.device import await_inputs, prefetch
from megaflow.graph import Operator
from megaflow.kinds import Buffers, KernelConfig, TaskKind, Tiling
from megaflow.regions import Access, Span, TiledOperator
from megaflow.tasks.common import by_role, number, pointer
from megaflow.tasks.linear_oracle import oracle, run_tile
from megaflow.tasks.packing import BLOCK
from megaflow.tasks.product import (
    BATCH,
    EPILOGUE,
    K_BLOCKS,
    LOGITS,
    NORM_WIDTH,
    PARTS,
    PRODUCT_FIELDS,
    RESIDUAL,
    RESIDUAL_FIELDS,
    ROWS,
    RUN,
    SILU,
    SSQ_OUT,
    SSQ_OUT_STRIDE,
    WEIGHT_BLOCK,
    X_STRIDE,
    W,
    X,
    add_residual,
    empty_product,
    multiply,
    norm_scale,
    product_row,
    reduce_product,
    residual_row,
    squares,
    store_product,
    store_silu,
    sub_tile,
)

FIELDS = (*PRODUCT_FIELDS, *RESIDUAL_FIELDS, "best_value", "best_index", "best_stride", "bias")
BEST_VALUE, BEST_INDEX, BEST_STRIDE, BIAS = map(tl.constexpr, range(len(FIELDS) - 4, len(FIELDS)))

LONGEST_RUN = 32


@jit
def bias_of(row, o_n, rows):
    """float32 [rows of the sub-tile, 1]; zero if the operator has no bias."""
    mask = (tl.load(row + BIAS) != 0) & (o_n < rows)
    return tl.load(pointer(row, BIAS, tl.float32) + o_n, mask=mask, other=0.0)[:, None]


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
    w = sub_tile(weight, first, k_blocks)
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
        w = sub_tile(weight, first_row, k_blocks)
        acc = multiply(acc, x, x_stride, w, k, k_blocks, o_t, m_t, CONFIG)
        if k + KB >= k_blocks:
            y = reduce_product(acc, CONFIG) * norm_scale(sums, parts, width, CONFIG)[None, :]
            acc = empty_product(CONFIG)
            o_n = first_row + tl.arange(0, R)
            mask = (o_n < rows)[:, None] & m_t[None, :]
            if epilogue == SILU:
                store_silu(row, y, first_row, o_t, m_t, CONFIG)
            elif epilogue == RESIDUAL:
                ssq += add_residual(row, y, o_n, o_t, mask, CONFIG)
            else:
                y += bias_of(row, o_n, rows)
                store_product(row, y, o_n, o_t, mask)
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
    assert "bias" not in op.inputs or op.attrs["epilogue"] == "store"
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
    values = product_row(op, tiled, buffers) | {"batch": tiled.param("batch")}
    if op.attrs["epilogue"] == "residual":
        values |= residual_row(op, buffers)
    if "bias" in op.inputs:
        values["bias"] = at("bias").data_ptr()
    if op.attrs["epilogue"] == "logits":
        values |= {
            "best_value": at("best_value").data_ptr(),
            "best_index": at("best_index").data_ptr(),
            "best_stride": at("best_value").stride(0),
        }
    return values


LINEAR = TaskKind("linear", linear_body, tile, FIELDS, row, oracle, run_tile)
