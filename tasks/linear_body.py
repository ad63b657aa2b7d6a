"""The bodies of linear tasks: one token in registers, several on the tensor cores.

Before the product: the input may be an RMSNorm whose weight the producer has multiplied in already; what is left is the
scale 1 / rms of each token, which commutes with the product. Producers hand over partial sums of squares, one per tile,
so no consumer goes over the input again.
After it: the epilogue, one of STORE (qkv; with a bias if there is one), RESIDUAL (add to the residual stream, prepare
the next RMSNorm), SILU (gate and up rows alternate; y = silu(gate) * up) and LOGITS (store, and the best of the tile
for argmax).
"""

from megaflow.backend import jit, tl
from megaflow.device import await_inputs, prefetch
from megaflow.lanes import long, number, pointer
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
    reduce_product,
    squares,
    store_product,
    store_silu,
    sub_tile,
)

FIELDS = (*PRODUCT_FIELDS, *RESIDUAL_FIELDS, "best_value", "best_index", "best_stride", "bias",
          "span", "partials", "partials_stride", "arrivals", "arrivals_stride")  # fmt: skip
(BEST_VALUE, BEST_INDEX, BEST_STRIDE, BIAS,
 SPAN, PARTIALS, PARTIALS_STRIDE, ARRIVALS, ARRIVALS_STRIDE) = map(
    tl.constexpr, range(len(FIELDS) - 9, len(FIELDS))
)  # fmt: skip


FEW_TOKENS = tl.constexpr(16)  # for which sums of squares can be kept while the product is made


@jit
def linear_body(row, c_row, c_token, c_split, step, inputs, CONFIG: tl.constexpr):
    if CONFIG.tokens == 1:
        one_token(row, c_row, c_token, inputs, CONFIG)
    else:
        several_tokens(row, c_row, c_token, c_split, inputs, CONFIG)


@jit
def one_token(row, c_row, c_token, inputs, CONFIG: tl.constexpr):
    """RUN sub-tiles of CONFIG.rows weight rows by one token."""
    B: tl.constexpr = WEIGHT_BLOCK
    KB: tl.constexpr = CONFIG.k_blocks
    R: tl.constexpr = CONFIG.rows
    rows = number(row, ROWS)
    run = number(row, RUN)
    epilogue = number(row, EPILOGUE)
    k_blocks = number(row, K_BLOCKS)
    o_t = c_token + tl.arange(0, 1)
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
    sums = squares(row, o_t, m_t, 1)

    ssq = tl.full([1], 0.0, tl.float32)
    scale = tl.full([1], 1.0, tl.float32)
    best = tl.full([R, 1], float("-inf"), tl.float32)
    best_row = tl.full([R, 1], 0, tl.int32)
    acc = empty_product(CONFIG, 1)
    # one loop over all sub-tiles, so that the load pipeline does not run dry between them
    rounds = (k_blocks + KB - 1) // KB
    for i in tl.range(0, sub_tiles * rounds, num_stages=CONFIG.stages):
        first_row = first + i // rounds * R
        k = i % rounds * KB
        w = sub_tile(weight, first_row, k_blocks)
        acc = multiply(acc, x, x_stride, w, k, k_blocks, o_t, m_t, CONFIG, 1)
        if k + KB >= k_blocks:
            if i < rounds:  # the sum across threads is taken once, when the first product is done
                scale = norm_scale(sums, parts, width, CONFIG)
            y = reduce_product(acc, 1) * scale[None, :]
            acc = empty_product(CONFIG, 1)
            o_n = first_row + tl.arange(0, R)
            mask = (o_n < rows)[:, None] & m_t[None, :]
            if epilogue == SILU:
                store_silu(row, y, first_row, o_t, m_t, 1.0, CONFIG)
            elif epilogue == RESIDUAL:
                ssq += add_residual(row, y, o_n, o_t, mask, CONFIG)
            else:
                y += bias_of(row, o_n, rows)
                store_product(row, y, o_n, o_t, mask)
                if epilogue == LOGITS:
                    better = mask & (y > best)
                    best_row = tl.where(better, o_n[:, None], best_row)
                    best = tl.where(better, y, best)
    if epilogue == RESIDUAL:
        tl.store(pointer(row, SSQ_OUT, tl.float32) + o_t * number(row, SSQ_OUT_STRIDE) + c_row, ssq, mask=m_t)
    elif epilogue == LOGITS:
        tile_best, tile_row = best_of(best, best_row)
        store_best(row, tile_best, tile_row, o_t, m_t, c_row)


@jit
def several_tokens(row, c_row, c_token, c_split, inputs, CONFIG: tl.constexpr):
    """64 weight rows, or what a split of K (SPAN weight blocks) adds to them, by CONFIG.tokens tokens.

    Each split leaves its sum in the workspace. The one that arrives last adds them up, in the order of the splits, so
    that the result does not depend on which it is (split-K; Stream-K, PPoPP 2023, section 2, calls it fixed-split).
    """
    B: tl.constexpr = WEIGHT_BLOCK
    R: tl.constexpr = CONFIG.rows
    T: tl.constexpr = CONFIG.tokens
    rows = number(row, ROWS)
    k_blocks = number(row, K_BLOCKS)
    span = number(row, SPAN)
    o_t = c_token * T + tl.arange(0, T)
    m_t = o_t < number(row, BATCH)
    x = pointer(row, X, CONFIG.element)
    x_stride = number(row, X_STRIDE)
    o_n = c_row * R + tl.arange(0, R)
    w = sub_tile(pointer(row, W, CONFIG.element), c_row * R, k_blocks)
    begin = c_split * span
    end = tl.minimum(begin + span, k_blocks)

    o_k = begin + tl.arange(0, CONFIG.prefetch)
    prefetch(w + (o_k[:, None] * (B * B) + tl.arange(0, R)[None, :] * B), (o_k < end)[:, None])
    await_inputs(inputs)
    if T <= FEW_TOKENS:
        sums = squares(row, o_t, m_t, T)
    y = empty_product(CONFIG, T)
    for k in tl.range(begin, end, CONFIG.k_blocks, num_stages=CONFIG.stages):
        y = multiply(y, x, x_stride, w, k, end, o_t, m_t, CONFIG, T)
    last = True
    if span < k_blocks:
        y, last = add_splits(row, y, c_row, c_split, (k_blocks + span - 1) // span, o_t, m_t)
    if last:
        epilogue = number(row, EPILOGUE)
        width = tl.maximum(number(row, NORM_WIDTH), 1)
        if T > FEW_TOKENS:
            sums = squares(row, o_t, m_t, T)
        y = y * norm_scale(sums, number(row, PARTS), width, CONFIG)[None, :]
        mask = (o_n < rows)[:, None] & m_t[None, :]
        if epilogue == SILU:
            store_silu(row, y, c_row * R, o_t, m_t, 1.0, CONFIG)
        elif epilogue == RESIDUAL:
            ssq = add_residual(row, y, o_n, o_t, mask, CONFIG)
            tl.store(pointer(row, SSQ_OUT, tl.float32) + o_t * number(row, SSQ_OUT_STRIDE) + c_row, ssq, mask=m_t)
        else:
            y += bias_of(row, o_n, rows)
            store_product(row, y, o_n, o_t, mask)
            if epilogue == LOGITS:
                best, best_row = best_of(tl.where(mask, y, float("-inf")), o_n[:, None])
                store_best(row, best, best_row, o_t, m_t, c_row)


@jit
def add_splits(row, y, c_row, c_split, splits, o_t, m_t):
    """The sum over all splits of a tile and whether this one arrived last; the sum is of use to that one only.

    A token's row in the workspace has the sums of all splits of the first tile of rows, then those of the next.
    """
    R: tl.constexpr = y.shape[0]
    o_y = (c_row * splits * R + tl.arange(0, R))[:, None] + (o_t * number(row, PARTIALS_STRIDE))[None, :]
    partial = pointer(row, PARTIALS, tl.float32) + o_y
    tl.store(partial + c_split * R, y, mask=m_t[None, :])
    tl.debug_barrier()
    arrived = pointer(row, ARRIVALS, tl.int32) + tl.min(o_t, 0) * number(row, ARRIVALS_STRIDE) + c_row * 32
    last = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == splits - 1
    if last:
        tl.debug_barrier()
        tl.store(arrived, 0)
        y = tl.full(y.shape, 0.0, tl.float32)
        # several at a time, as far as registers go: one after the other each would cost a latency
        AT_ONCE: tl.constexpr = 8 if y.shape[1] <= 16 else 64 // y.shape[1]
        for split in range(0, splits, AT_ONCE):
            for i in tl.static_range(AT_ONCE):
                y += tl.load(partial + (split + i) * R, mask=m_t[None, :] & (split + i < splits), other=0.0)
    return y, last


@jit
def bias_of(row, o_n, rows):
    """float32 [rows of the sub-tile, 1]; zero if the operator has no bias."""
    mask = (long(row, BIAS) != 0) & (o_n < rows)
    return tl.load(pointer(row, BIAS, tl.float32) + o_n, mask=mask, other=0.0)[:, None]


@jit
def best_of(y, o_n):
    """The largest of y [rows, tokens], by token, and the first of the row numbers o_n [rows, 1] that have it."""
    best = tl.max(y, 0)
    return best, tl.min(tl.where(y == best[None, :], o_n, 2**31 - 1), 0)


@jit
def store_best(row, best, best_row, o_t, m_t, c_row):
    """best_value, best_index = the best of a tile."""
    at = o_t * number(row, BEST_STRIDE) + c_row
    tl.store(pointer(row, BEST_VALUE, tl.float32) + at, best, mask=m_t)
    tl.store(pointer(row, BEST_INDEX, tl.int32) + at, best_row, mask=m_t)
