"""Decode attention for one sequence and one KV head: QK-norm (if any), RoPE, paged append, split-KV, combine.

The KV positions are cut into splits that different workers take; the split that holds the newest position takes
its key and value from qkv and appends them to the cache. Each split leaves an unnormalised sum and its softmax
statistics; the split that arrives last combines them, always in the same order, so results do not depend on who
that is (Flash-Decoding; the order of the reduction is fixed by the split's index). How many splits are active follows
from the live length at run time; the others return at once.
"""

from megaflow.backend import jit, tl
from megaflow.device import await_inputs, prefetch
from megaflow.graph import Operator
from megaflow.kinds import Buffers, TaskKind, Tiling
from megaflow.lanes import number, pointer
from megaflow.regions import Access, Span, TiledOperator
from megaflow.tasks.attention_oracle import oracle, run_tile
from megaflow.tasks.common import by_role

FIELDS = ("qkv", "qkv_stride", "q_norm", "k_norm", "cos", "sin", "positions", "k_cache", "v_cache", "block_table",
          "block_table_stride", "page_shift", "kv_heads", "group", "splits", "out", "out_stride",
          "partial", "statistics", "arrived")  # fmt: skip
(QKV, QKV_STRIDE, Q_NORM, K_NORM, COS, SIN, POSITIONS, K_CACHE, V_CACHE, BLOCK_TABLE,
 BLOCK_TABLE_STRIDE, PAGE_SHIFT, KV_HEADS, GROUP, SPLITS, OUT, OUT_STRIDE,
 PARTIAL, STATISTICS, ARRIVED) = map(tl.constexpr, range(len(FIELDS)))  # fmt: skip

LINE = tl.constexpr(64)  # elements of a 128-byte line
LOG2E = tl.constexpr(1.4426950408889634)
COMBINED = tl.constexpr(32 * 128)  # elements of partial sums that are combined at a time: 32 registers of each thread


@jit
def norm_weight(row, field: tl.constexpr, o_d, CONFIG: tl.constexpr):
    """Elements o_d [n] of the weight of QK-norm, [1, n]; 1 in a model without it."""
    if CONFIG.qk_norm:
        return tl.load(pointer(row, field, tl.float32) + o_d)[None, :]
    else:
        return 1.0


@jit
def norm_rope(x, pair, weight, pair_weight, cos, sin, o_d, CONFIG: tl.constexpr):
    """RMSNorm, if the model has it, and rotary embedding (rotate-half convention) of vectors [n, head_dim].

    Without rounding. `pair` has the elements half a vector away; `o_d` [n, head_dim] their places. Weights, cos and sin
    are [1, head_dim], those of the position.
    """
    D: tl.constexpr = CONFIG.head_dim
    if CONFIG.qk_norm:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + CONFIG.eps)[:, None]
        x = x * scale * weight
        pair = pair * scale * pair_weight
    return x * cos + tl.where(o_d < D // 2, -pair, pair) * sin


@jit
def slots(table, positions, mask, page_shift, kv_heads, c_head):
    """Numbers of the given positions' vectors in a paged cache [pages, kv_heads, page_size, head_dim].

    32 bits hold them: a cache with more vectors would be larger than any GPU's memory.
    """
    page = tl.load(table + (positions >> page_shift), mask=mask, other=0)
    within = positions & ((1 << page_shift) - 1)
    return ((page * kv_heads + c_head) << page_shift) + within


@jit
def load_block(k_cache, v_cache, slot, mask, CONFIG: tl.constexpr):
    """Keys [head_dim, n] and values [n, head_dim] of the cached vectors with these numbers; 0 where masked."""
    o_d = tl.arange(0, CONFIG.head_dim)
    first = slot.to(tl.int64) * CONFIG.head_dim
    p_k = tl.multiple_of(k_cache + first[None, :] + o_d[:, None], (16, 1))
    p_v = tl.multiple_of(v_cache + first[:, None] + o_d[None, :], (1, 16))
    return tl.load(p_k, mask=mask[None, :], other=0.0), tl.load(p_v, mask=mask[:, None], other=0.0)


@jit
def attend(q, k, v, mask, top, total, acc, CONFIG: tl.constexpr):
    """Take some positions' keys [head_dim, n] and values [n, head_dim] into the softmax (Flash-Attention)."""
    scores = tl.dot(q, k, input_precision="ieee")
    scores = tl.where(mask[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    p = tl.exp2(scores - new_top[:, None])
    fade = tl.exp2(top - new_top)
    total = total * fade + tl.sum(p, 1)
    acc = tl.dot(p.to(CONFIG.element), v, acc * fade[:, None], input_precision="ieee")
    return new_top, total, acc


@jit
def combine(row, unit, splits, active, out, group, CONFIG: tl.constexpr):
    """Add up the splits' partial sums, in an order that depends on nothing but their number, and write the result.

    Many splits are loaded at a time, as far as registers go: one after the other each would cost a latency.
    """
    D: tl.constexpr = CONFIG.head_dim
    G: tl.constexpr = CONFIG.group
    H: tl.constexpr = CONFIG.heads
    N: tl.constexpr = max(2, COMBINED // (H * D))
    partial = pointer(row, PARTIAL, tl.float32) + unit.to(tl.int64) * splits * G * D
    statistics = pointer(row, STATISTICS, tl.float32) + unit * splits * G * 2
    o_h = tl.arange(0, H)
    o_out = o_h[:, None] * D + tl.arange(0, D)[None, :]
    mask = o_out < group * D
    top = tl.full([H], float("-inf"), tl.float32)
    total = tl.full([H], 0.0, tl.float32)
    acc = tl.full([H, D], 0.0, tl.float32)
    for first in range(0, active, N):
        o_n = first + tl.arange(0, N)
        m_n = (o_n < active)[:, None] & (o_h >= 0)[None, :]
        p_top = statistics + (o_n * G * 2)[:, None] + o_h[None, :]
        tops = tl.load(p_top, mask=m_n, other=float("-inf"))
        totals = tl.load(p_top + G, mask=m_n, other=0.0)
        p_sums = partial + (o_n * G * D)[:, None, None] + o_out[None, :, :]
        sums = tl.load(p_sums, mask=(o_n < active)[:, None, None] & mask[None, :, :], other=0.0)
        # finite, since each active split has a position and the first of these is active
        new_top = tl.maximum(top, tl.max(tops, 0))
        fade = tl.exp2(top - new_top)
        weights = tl.exp2(tops - new_top[None, :])
        total = total * fade + tl.sum(weights * totals, 0)
        acc = acc * fade[:, None] + tl.sum(weights[:, :, None] * sums, 0)
        top = new_top
    tl.store(out + o_out, (acc / total[:, None]).to(CONFIG.element), mask=mask)


@jit
def attention_body(row, c_sequence, c_head, c_split, step, inputs, CONFIG: tl.constexpr):
    D: tl.constexpr = CONFIG.head_dim
    G: tl.constexpr = CONFIG.group
    S: tl.constexpr = CONFIG.kv_block
    # for one token the page of the next block is looked up by hand, for several the load pipeline does it
    STAGES: tl.constexpr = 1 if CONFIG.tokens == 1 else 3
    group = number(row, GROUP)
    splits = number(row, SPLITS)
    kv_heads = number(row, KV_HEADS)
    page_shift = number(row, PAGE_SHIFT)
    k_cache = pointer(row, K_CACHE, CONFIG.element)
    v_cache = pointer(row, V_CACHE, CONFIG.element)
    table = pointer(row, BLOCK_TABLE, tl.int32) + c_sequence * number(row, BLOCK_TABLE_STRIDE)
    position = tl.load(pointer(row, POSITIONS, tl.int32) + c_sequence)
    length = position + 1
    chunk = ((length + splits - 1) // splits + S - 1) // S * S
    active = (length + chunk - 1) // chunk
    start = c_split * chunk
    stop = tl.minimum(start + chunk, position)  # of what is in the cache
    o_g = tl.arange(0, G)
    o_d = tl.arange(0, D)
    o_pair = (o_d + D // 2) % D
    cos = tl.load(pointer(row, COS, tl.float32) + position * D + o_d)[None, :]
    sin = tl.load(pointer(row, SIN, tl.float32) + position * D + o_d)[None, :]
    q_weight = norm_weight(row, Q_NORM, o_d, CONFIG)
    q_pair_weight = norm_weight(row, Q_NORM, o_pair, CONFIG)
    k_weight = norm_weight(row, K_NORM, o_d, CONFIG)
    k_pair_weight = norm_weight(row, K_NORM, o_pair, CONFIG)
    new_slot = slots(table, position, position >= 0, page_shift, kv_heads, c_head)
    o_s = start + tl.arange(0, S)
    m_s = o_s < stop
    slot = slots(table, o_s, m_s, page_shift, kv_heads, c_head)
    lines = slot.to(tl.int64)[:, None] * D + tl.arange(0, D // LINE)[None, :] * LINE
    prefetch(k_cache + lines, m_s[:, None])
    prefetch(v_cache + lines, m_s[:, None])
    await_inputs(inputs)

    if c_split < active:
        m_g = (o_g < group)[:, None] & (o_d >= 0)[None, :]
        qkv = pointer(row, QKV, tl.float32) + c_sequence * number(row, QKV_STRIDE) + c_head * (group + 2) * D
        o_gd = tl.broadcast_to(o_d[None, :], (G, D))
        p_q = qkv + (o_g * D)[:, None]
        p_new = qkv + ((tl.arange(0, 1) + group) * D)[:, None]
        q = tl.load(p_q + o_gd, mask=m_g, other=0.0)
        q_pair = tl.load(p_q + (o_gd + D // 2) % D, mask=m_g, other=0.0)
        new_k = tl.load(p_new + o_d[None, :])
        new_k_pair = tl.load(p_new + o_pair[None, :])
        new_v = tl.load(qkv + (group + 1) * D + o_d).to(CONFIG.element)
        if CONFIG.tokens == 1:
            # before any arithmetic: a load behind a reduction's barriers would start late. Kernels for more tokens
            # have no registers left for that
            k, v = load_block(k_cache, v_cache, slot, m_s, CONFIG)
            o_s += S
            slot = slots(table, o_s, o_s < stop, page_shift, kv_heads, c_head)
        q = norm_rope(q, q_pair, q_weight, q_pair_weight, cos, sin, o_gd, CONFIG)
        q = (q * (LOG2E * D**-0.5)).to(CONFIG.element)

        top = tl.full([G], float("-inf"), tl.float32)
        total = tl.full([G], 0.0, tl.float32)
        acc = tl.full([G, D], 0.0, tl.float32)
        if c_split == active - 1:
            # the new position goes to the cache, and into the softmax from here
            key = norm_rope(new_k, new_k_pair, k_weight, k_pair_weight, cos, sin, o_d[None, :], CONFIG)
            key = key.to(CONFIG.element)
            tl.store(k_cache + new_slot.to(tl.int64) * D + o_d[None, :], key)
            tl.store(v_cache + new_slot.to(tl.int64) * D + o_d, new_v)
            top = tl.sum(q.to(tl.float32) * key.to(tl.float32), 1)
            total = tl.full([G], 1.0, tl.float32)
            acc = tl.broadcast_to(new_v.to(tl.float32)[None, :], (G, D))
        if CONFIG.tokens == 1:
            top, total, acc = attend(q, k, v, m_s, top, total, acc, CONFIG)
            start += S
        for first in tl.range(start, stop, S, num_stages=STAGES):
            o_s = first + tl.arange(0, S)
            m_s = o_s < stop
            if CONFIG.tokens > 1:
                slot = slots(table, o_s, m_s, page_shift, kv_heads, c_head)
            k, v = load_block(k_cache, v_cache, slot, m_s, CONFIG)
            if CONFIG.tokens == 1:
                slot = slots(table, o_s + S, o_s + S < stop, page_shift, kv_heads, c_head)
            top, total, acc = attend(q, k, v, m_s, top, total, acc, CONFIG)

        out = pointer(row, OUT, CONFIG.element) + c_sequence * number(row, OUT_STRIDE) + c_head * group * D
        o_out = o_g[:, None] * D + o_d[None, :]
        if active == 1:
            tl.store(out + o_out, (acc / total[:, None]).to(CONFIG.element), mask=m_g)
        else:
            # workspace [sequence, head, split, group, D], and two statistics for each query head
            unit = c_sequence * kv_heads + c_head
            partial = pointer(row, PARTIAL, tl.float32) + unit.to(tl.int64) * splits * G * D
            statistics = pointer(row, STATISTICS, tl.float32) + unit * splits * G * 2
            tl.store(partial + c_split * G * D + o_out, acc, mask=m_g)
            tl.store(statistics + c_split * G * 2 + o_g, top)
            tl.store(statistics + c_split * G * 2 + G + o_g, total)
            tl.debug_barrier()
            arrived = pointer(row, ARRIVED, tl.int32) + unit * 32
            if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == active - 1:
                tl.debug_barrier()
                combine(row, unit, splits, active, out, group, CONFIG)
                tl.store(arrived, 0)


def split_count(batch: int, kv_heads: int, max_length: int, kv_block: int, workers: int) -> int:
    """Splits of the KV positions: enough tasks for all workers, none shorter than one KV block."""
    return max(1, min(workers // (batch * kv_heads), -(-max_length // kv_block)))


def tile(op: Operator, tiling: Tiling) -> TiledOperator:
    config = tiling.config
    assert config.qk_norm == ("q_norm" in op.inputs) == ("k_norm" in op.inputs)
    kv_heads, group = op.attrs["kv_heads"], op.attrs["group"]
    max_length = op.attrs["max_length"]
    splits = split_count(tiling.batch, kv_heads, max_length, config.kv_block, tiling.workers)
    width = config.head_dim
    position_bytes = 2 * width * config.element.primitive_bitwidth // 8  # key and value

    def access(role: str, heads: int) -> Access:
        spans = (tiling.along_batch(0, 1), Span.tiles(1, heads * width))
        return Access(op.tensor(role).name, tiling.shape(op, role), spans)

    # any split may be the one that combines all splits of its sequence and head
    workspace = Access(
        op.tensor("partial").name, (tiling.batch, kv_heads), (tiling.along_batch(0, 1), Span.tiles(1, 1))
    )

    return TiledOperator(
        op.name,
        op.kind,
        grid=(tiling.sequences, kv_heads, splits),
        reads=(access("qkv", group + 2),),
        writes=(access("out", group), *((workspace,) if splits > 1 else ())),
        tile_bytes=max_length // splits * position_bytes,
        params=(("splits", splits), ("group_tile", config.group)),
        tile_flops=4 * (max_length // splits) * width * group,
        irregular=True,
        joined=splits > 1,
        early_bytes=min(config.kv_block, max_length // splits) * position_bytes,
    )


def row(op: Operator, tiled: TiledOperator, buffers: Buffers) -> dict[str, int]:
    at = by_role(op, buffers)
    pointers = ("qkv", "cos", "sin", "positions", "k_cache", "v_cache", "block_table", "out", "arrived")
    norms = [role for role in ("q_norm", "k_norm") if role in op.inputs]
    page_size, head_dim = at("k_cache").shape[2:]
    # the workspace has no dimension for sequences: their share of it depends on the number of splits
    units = tiled.part.start * op.attrs["kv_heads"] * tiled.param("splits") if tiled.part else 0
    group = tiled.param("group_tile")
    return {
        "qkv_stride": at("qkv").stride(0),
        "block_table_stride": at("block_table").stride(0),
        "out_stride": at("out").stride(0),
        "page_shift": page_size.bit_length() - 1,
        "kv_heads": op.attrs["kv_heads"],
        "group": op.attrs["group"],
        "splits": tiled.param("splits"),
        "partial": at("partial")[units * group * head_dim :].data_ptr(),
        "statistics": at("statistics")[units * group * 2 :].data_ptr(),
        **{role: at(role).data_ptr() for role in (*pointers, *norms)},
    }


ATTENTION = TaskKind("attention", attention_body, tile, FIELDS, row, oracle, run_tile)
