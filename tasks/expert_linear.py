"""Linear layers of experts: a tile of one expert's y = W x for all pairs of token and expert that it has.

The tile's first coordinate is a place in the list of active experts (megaflow.tasks.group). There are as many places as
experts can be active; a tile whose place is empty returns at once, so the weights of an expert without tokens are not
read. The rest is as in megaflow.tasks.linear, but for the rows of x and out: those of the expert's pairs, gathered
CONFIG.expert_tokens at a time. `out` has a row for each pair; `x` has one for each pair, or for each token.
"""

import math
from functools import partial

from megaflow.backend import jit, tl
from megaflow.device import await_inputs
from megaflow.graph import Operator
from megaflow.kinds import Buffers, TaskKind, Tiling
from megaflow.lanes import number, pointer
from megaflow.regions import Access, Routing, Span, TiledOperator
from megaflow.tasks.common import by_role, whole_access
from megaflow.tasks.expert_oracle import oracle, run_tile
from megaflow.tasks.group import LISTS
from megaflow.tasks.linear import TASK_COST, rows_per_task
from megaflow.tasks.packing import blocks
from megaflow.tasks.product import (
    EPILOGUE,
    K_BLOCKS,
    NORM_WIDTH,
    PARTS,
    PRODUCT_FIELDS,
    ROWS,
    RUN,
    SILU,
    WEIGHT_BLOCK,
    X_STRIDE,
    W,
    X,
    empty_product,
    multiply,
    norm_scale,
    product_row,
    reduce_product,
    squares,
    store_product,
    store_silu,
    sub_tile,
)

FIELDS = (*PRODUCT_FIELDS, "active", "active_count", "indptr", "pairs", "pairs_per_row")
(ACTIVE, ACTIVE_COUNT, INDPTR, PAIRS,
 PAIRS_PER_ROW) = map(tl.constexpr, range(len(PRODUCT_FIELDS), len(FIELDS)))  # fmt: skip

THREADS = tl.constexpr(128)


@jit
def look_up(row, place):
    """The number of active experts, the expert at a place, where its pairs begin, and where they end.

    Loops depend on them, so all threads need the same ones, but after an abort the lists may change while they are
    read. What thread 0 has seen goes to all, in one reduction of the four numbers side by side.
    """
    p_bound = pointer(row, INDPTR, tl.int32) + place
    packed = tl.load(p_bound + 1).to(tl.int64) << 48
    packed |= (tl.load(p_bound).to(tl.int64) & 0xFFFF) << 32
    packed |= (tl.load(pointer(row, ACTIVE, tl.int32) + place).to(tl.int64) & 0xFFFF) << 16
    packed |= tl.load(pointer(row, ACTIVE_COUNT, tl.int32)).to(tl.int64) & 0xFFFF
    packed = tl.sum(tl.where(tl.arange(0, THREADS) == 0, packed, 0), 0)
    return (
        (packed & 0xFFFF).to(tl.int32),
        (packed >> 16 & 0xFFFF).to(tl.int32),
        (packed >> 32 & 0xFFFF).to(tl.int32),
        (packed >> 48 & 0xFFFF).to(tl.int32),
    )


@jit
def expert_linear_body(row, c_place, c_row, c_unused, step, inputs, CONFIG: tl.constexpr):
    B: tl.constexpr = WEIGHT_BLOCK
    KB: tl.constexpr = CONFIG.k_blocks
    R: tl.constexpr = CONFIG.rows
    T: tl.constexpr = CONFIG.expert_tokens
    rows = number(row, ROWS)
    run = number(row, RUN)
    epilogue = number(row, EPILOGUE)
    k_blocks = number(row, K_BLOCKS)
    x = pointer(row, X, CONFIG.element)
    x_stride = number(row, X_STRIDE)
    pairs_per_row = number(row, PAIRS_PER_ROW)
    first = c_row * run * R
    rounds = (k_blocks + KB - 1) // KB
    steps = tl.minimum(run, (rows - first + R - 1) // R) * rounds
    await_inputs(inputs)
    active, expert, begin, end = look_up(row, c_place)
    if c_place < active:
        weight = sub_tile(pointer(row, W, CONFIG.element), expert * ((rows + B - 1) // B * B), k_blocks)
        for chunk in range(begin, end, T):
            o_p = chunk + tl.arange(0, T)
            m_t = o_p < end
            pair = tl.load(pointer(row, PAIRS, tl.int32) + o_p, mask=m_t, other=0)
            o_x = pair // pairs_per_row
            sums = squares(row, o_x, m_t, T)
            scale = tl.full([T], 1.0, tl.float32)
            acc = empty_product(CONFIG, T)
            for i in tl.range(0, steps, num_stages=CONFIG.stages):
                first_row = first + i // rounds * R
                k = i % rounds * KB
                w = sub_tile(weight, first_row, k_blocks)
                acc = multiply(acc, x, x_stride, w, k, k_blocks, o_x, m_t, CONFIG, T)
                if k + KB >= k_blocks:
                    if i < rounds:  # the sum across threads is taken once, when the first product is done
                        width = tl.maximum(number(row, NORM_WIDTH), 1)
                        scale = norm_scale(sums, number(row, PARTS), width, CONFIG)
                    y = reduce_product(acc, T) * scale[None, :]
                    acc = empty_product(CONFIG, T)
                    o_n = first_row + tl.arange(0, R)
                    if epilogue == SILU:
                        store_silu(row, y, first_row, pair, m_t, 1.0, CONFIG)
                    else:
                        store_product(row, y, o_n, pair, (o_n < rows)[:, None] & m_t[None, :])


def active_experts(experts: int, batch: int, slots: int) -> tuple[float, float]:
    """How many experts have any pairs if each token chooses evenly: the mean and the standard deviation."""
    idle = (1 - slots / experts) ** batch  # the chance that nobody chooses an expert
    both_idle = idle * (1 - slots / max(experts - 1, 1)) ** batch
    variance = experts * idle + experts * (experts - 1) * both_idle - (experts * idle) ** 2
    return experts * (1 - idle), math.sqrt(max(variance, 0))


def expert_height(rows: int, columns: int, active: tuple[float, float], tiling: Tiling) -> int:
    """Weight rows of a task: what is best on average for the mean number of active experts and a deviation from it."""
    config = tiling.config
    mean, deviation = active
    counts = [round(mean + side * deviation) for side in (-1, 0, 1)]
    iterations = -(-blocks(columns) // config.k_blocks)
    return rows_per_task(rows, config, tiling.workers, counts, TASK_COST / iterations if config.tokens > 1 else 0.25)


def tile(op: Operator, tiling: Tiling) -> TiledOperator:
    assert tiling.part is None, "experts' lists are for the whole batch"
    config = tiling.config
    experts, rows, columns = tiling.shape(op, "weight")
    (places,), (pairs,) = tiling.shape(op, "active"), tiling.shape(op, "pairs")
    active = active_experts(experts, tiling.batch, pairs // tiling.batch)
    height = expert_height(rows, columns, active, tiling)

    whole = partial(whole_access, op, tiling)

    count, indptr, items = (op.tensor(role).name for role in ("active_count", "indptr", "pairs"))
    routing = Routing(count, indptr, items, places, pairs)

    def by_expert(role: str, across: Span) -> Access:
        return Access(op.tensor(role).name, tiling.shape(op, role), (Span.routed(routing), across))

    x_rows, x_width = tiling.shape(op, "x")
    by_token = "ssq" in op.inputs
    reads = [whole("x") if by_token else by_expert("x", Span.whole(x_width)), *map(whole, LISTS)]
    params = [("run", height // config.rows), ("pairs_per_row", pairs // x_rows)]
    if by_token:
        reads.append(whole("ssq"))
        params.append(("parts", tiling.shape(op, "ssq")[1]))
    silu = op.attrs["epilogue"] == "silu"
    element_bytes = config.element.primitive_bitwidth // 8
    return TiledOperator(
        op.name,
        op.kind,
        # the tiles of a place side by side: the empty places are all at the end
        grid=(places, -(-rows // height)),
        reads=tuple(reads),
        writes=(by_expert("out", Span.tiles(1, height // 2 if silu else height)),),
        tile_bytes=height * columns * element_bytes,
        params=tuple(params),
        tile_flops=round(2 * height * columns * pairs / active[0]),
        irregular=True,
        expected=active[0],
        routing=routing,
    )


def row(op: Operator, tiled: TiledOperator, buffers: Buffers) -> dict[str, int]:
    at = by_role(op, buffers)
    lists = {role: at(role).data_ptr() for role in LISTS}
    return product_row(op, tiled, buffers) | lists | {"pairs_per_row": tiled.param("pairs_per_row")}


EXPERT_LINEAR = TaskKind("expert_linear", expert_linear_body, tile, FIELDS, row, oracle, run_tile)
