"""Linear layers: a tile of y = W x, with what precedes and follows it fused in (megaflow.tasks.linear_body).

One token: a task is as many sub-tiles of CONFIG.rows weight rows as let all workers finish together. Several tokens: a
task is 64 rows by CONFIG.tokens tokens; where that makes fewer tasks than keep all workers busy, K is split.
"""

from collections.abc import Sequence

from megaflow.graph import Operator
from megaflow.kinds import Buffers, KernelConfig, TaskKind, Tiling
from megaflow.regions import Access, Span, TiledOperator
from megaflow.tasks.common import by_role
from megaflow.tasks.linear_body import FIELDS, linear_body
from megaflow.tasks.linear_oracle import oracle, run_tile
from megaflow.tasks.packing import BLOCK, blocks
from megaflow.tasks.product import product_row, residual_row

LONGEST_RUN = 32
MOST_SPLITS = 8
SPLIT_TILES = 1024  # tiles of all splits of one tile of tokens: bounds the workspace
# what a task costs besides its product, in iterations of it (CONFIG.k_blocks weight blocks): its wait, its notify and
# filling the load pipeline; and for 16 tokens: as a split leaving its sum, as the last split adding up each of them
TASK_COST, SPLIT_COST, ADD_COST = 6, 4, 0.3


def rows_per_task(rows: int, config: KernelConfig, workers: int, counts: Sequence[int], task_cost: float) -> int:
    """Weight rows of one task: as many sub-tiles as let all workers finish at nearly the same time.

    Args:
        counts: how many times the weight's tasks run (experts, of which it is not known how many are active): the
            busiest worker's sub-tiles, on average over these, decide the time.
        task_cost: what a task costs in itself (its wait, notify and the refill of the load pipeline), in sub-tiles.
    """
    sub_tiles = -(-rows // config.rows)

    def cost(run: int) -> float:
        rounds = sum(-(-(-(-sub_tiles // run) * count) // workers) for count in counts)
        return rounds * (run + task_cost)

    return config.rows * min(range(1, min(LONGEST_RUN, sub_tiles) + 1), key=cost)


def row_height(rows: int, config: KernelConfig, workers: int) -> int:
    """Weight rows of one tile."""
    return config.rows if config.tokens > 1 else rows_per_task(rows, config, workers, (1,), 0.25)


def row_tiles(rows: int, config: KernelConfig, workers: int) -> int:
    """Number of tiles along the weight's rows; also the number of partial sums that a token gets."""
    return -(-rows // row_height(rows, config, workers))


def most_splits(rows: int) -> int:
    """The most splits of K that a weight of so many rows can have."""
    return max(1, min(MOST_SPLITS, SPLIT_TILES // -(-rows // BLOCK)))


def split_span(rows: int, columns: int, config: KernelConfig, workers: int, token_tiles: int) -> int:
    """Weight blocks of one split of K, so that all workers finish at nearly the same time and as soon as they can."""
    k_blocks = blocks(columns)
    tiles = -(-rows // BLOCK) * token_tiles

    def cost(iterations: int) -> float:
        splits = -(-k_blocks // (iterations * config.k_blocks))
        if splits > most_splits(rows):
            return float("inf")
        added = (SPLIT_COST + splits * ADD_COST) * config.tokens / 16 if splits > 1 else 0
        return -(-tiles * splits // workers) * (iterations + TASK_COST + added)

    return config.k_blocks * min(range(1, -(-k_blocks // config.k_blocks) + 1), key=cost)


def tile(op: Operator, tiling: Tiling) -> TiledOperator:
    config = tiling.config
    rows, columns = tiling.shape(op, "weight")
    height = row_height(rows, config, tiling.workers)
    span = blocks(columns)
    if config.tokens > 1 and "partials" in op.inputs:
        span = split_span(rows, columns, config, tiling.workers, tiling.token_tiles)
    splits = -(-blocks(columns) // span)

    def access(role: str, column: Span | None = None) -> Access:
        shape = tiling.shape(op, role)
        spans = (tiling.along_batch(1, config.tokens), column or Span.whole(shape[1]))
        return Access(op.tensor(role).name, shape, spans)

    across = Span.tiles(0, height)
    reads, writes = [access("x")], []
    params = [("run", height // config.rows), ("span", span), ("batch", tiling.sequences)]
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
    if splits > 1:
        writes.append(access("partials"))
    token_tiles = -(-tiling.sequences // config.tokens)
    element_bytes = config.element.primitive_bitwidth // 8
    assert "bias" not in op.inputs or op.attrs["epilogue"] == "store"
    columns_of_split = min(span * BLOCK, columns)
    return TiledOperator(
        op.name,
        op.kind,
        # the token tiles of one weight tile run side by side
        grid=(-(-rows // height), token_tiles, *([splits] if splits > 1 else [])),
        reads=tuple(reads),
        writes=tuple(writes),
        tile_bytes=height * columns_of_split * element_bytes,
        params=tuple(params),
        tile_flops=2 * height * columns_of_split * min(config.tokens, tiling.sequences),
        joined=splits > 1,
        early_bytes=config.rows * min(config.prefetch * BLOCK, columns_of_split) * element_bytes,
        readers=token_tiles,
    )


def row(op: Operator, tiled: TiledOperator, buffers: Buffers) -> dict[str, int]:
    at = by_role(op, buffers)
    values = product_row(op, tiled, buffers) | {"batch": tiled.param("batch"), "span": tiled.param("span")}
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
    if "partials" in op.inputs:
        values |= {
            "partials": at("partials").data_ptr(),
            "partials_stride": at("partials").stride(0),
            "arrivals": at("arrivals").data_ptr(),
            "arrivals_stride": at("arrivals").stride(0),
        }
    return values


LINEAR = TaskKind("linear", linear_body, tile, FIELDS, row, oracle, run_tile)
