"""Linear layers of one token's experts, without grouping: each slot goes straight to its expert's rows.

A task is, for the expert in slot c0, `run` sub-tiles of CONFIG.rows weight rows. SILU: gate and up, multiplied by the
expert's weight; each task chooses the experts by itself, which is sooner done than to wait for another task that does,
and writes down which is in its slot. RESIDUAL: down; the slot that arrives last at a tile of rows adds up all slots, in
their order, and adds that to the residual stream.
"""

import torch

from megaflow.backend import jit, tl
from megaflow.device import await_inputs
from megaflow.graph import Operator
from megaflow.kinds import Buffers, KernelConfig, TaskKind, Tile, Tiling
from megaflow.lanes import number, pointer
from megaflow.regions import Access, Span, TiledOperator
from megaflow.tasks import combine, linear_oracle, topk
from megaflow.tasks.combine import COUNT, LOGITS, SLOTS, gate_span, gated_shared, shared_row
from megaflow.tasks.common import LINE, by_role, whole_access
from megaflow.tasks.linear import rows_per_task
from megaflow.tasks.packing import PackedWeight, padded
from megaflow.tasks.product import (
    EPILOGUE,
    K_BLOCKS,
    NORM_WIDTH,
    PARTS,
    ROWS,
    RUN,
    SILU,
    SSQ_OUT,
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
    store_silu,
    sub_tile,
)
from megaflow.tasks.topk import expert_in

FIELDS = (*combine.SUM_FIELDS, "normalised", "experts", "sums", "sums_stride", "arrivals")
NORMALISED, EXPERTS, SUMS, SUMS_STRIDE, ARRIVALS = map(tl.constexpr, range(len(FIELDS) - 5, len(FIELDS)))

COLUMNS = tl.constexpr(128)  # of the residual stream that are added up at a time, one for each thread
LOADED = tl.constexpr(8)  # slots that are loaded at once
COUNTER = tl.constexpr(LINE)


@jit
def slot_linear_body(row, c_slot, c_row, c_unused, step, inputs, CONFIG: tl.constexpr):
    B: tl.constexpr = WEIGHT_BLOCK
    KB: tl.constexpr = CONFIG.k_blocks
    R: tl.constexpr = CONFIG.rows
    rows = number(row, ROWS)
    run = number(row, RUN)
    epilogue = number(row, EPILOGUE)
    k_blocks = number(row, K_BLOCKS)
    first = c_row * run * R
    sub_tiles = tl.minimum(run, (rows - first + R - 1) // R)
    rounds = (k_blocks + KB - 1) // KB
    x_stride = number(row, X_STRIDE)
    x = pointer(row, X, CONFIG.element) + tl.where(epilogue == SILU, 0, c_slot) * x_stride
    o_t = tl.arange(0, 1)
    m_t = o_t == 0
    await_inputs(inputs)
    sums = squares(row, o_t, m_t, 1)
    slots = number(row, SLOTS)
    p_expert = pointer(row, EXPERTS, tl.int32) + c_slot
    share = 1.0
    if epilogue == SILU:
        p_logits = pointer(row, LOGITS, tl.float32)
        expert, share = expert_in(c_slot, p_logits, number(row, COUNT), slots, number(row, NORMALISED), CONFIG)
        tl.store(p_expert, expert)
    else:
        expert = tl.load(p_expert)
    weight = sub_tile(pointer(row, W, CONFIG.element), expert * ((rows + B - 1) // B * B), k_blocks)
    scale = tl.full([1], 1.0, tl.float32)
    acc = empty_product(CONFIG, 1)
    for i in tl.range(0, sub_tiles * rounds, num_stages=CONFIG.stages):
        first_row = first + i // rounds * R
        k = i % rounds * KB
        acc = multiply(acc, x, x_stride, sub_tile(weight, first_row, k_blocks), k, k_blocks, o_t, m_t, CONFIG, 1)
        if k + KB >= k_blocks:
            if i < rounds:  # the sum across threads is taken once, when the first product is done
                width = tl.maximum(number(row, NORM_WIDTH), 1)
                scale = norm_scale(sums, number(row, PARTS), width, CONFIG)
            y = reduce_product(acc, 1) * scale[None, :]
            acc = empty_product(CONFIG, 1)
            if epilogue == SILU:
                store_silu(row, y, first_row, o_t + c_slot, m_t, share, CONFIG)
            else:
                o_n = first_row + tl.arange(0, R)
                p_sums = pointer(row, SUMS, tl.float32) + c_slot * number(row, SUMS_STRIDE)
                tl.store(p_sums + o_n[:, None], y, mask=(o_n < rows)[:, None])
    if epilogue != SILU:
        tl.debug_barrier()
        arrived = pointer(row, ARRIVALS, tl.int32) + c_row * COUNTER
        if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == slots - 1:
            tl.debug_barrier()
            tl.store(arrived, 0)
            add_slots(row, c_row, first, tl.minimum(first + run * R, rows), slots, CONFIG)


@jit
def add_slots(row, c_row, first, end, slots, CONFIG: tl.constexpr):
    """Rows first to end of the sum over the slots, added to the residual stream."""
    o_t = tl.arange(0, 1)
    ssq = tl.full([1], 0.0, tl.float32)
    for start in range(first, end, COLUMNS):
        o_n = start + tl.arange(0, COLUMNS)
        mask = (o_n < end)[:, None]
        p_sums = pointer(row, SUMS, tl.float32) + o_n[:, None]
        y = tl.full([COLUMNS, 1], 0.0, tl.float32)
        for slot in range(0, slots, LOADED):
            for i in tl.static_range(LOADED):
                y += tl.load(p_sums + (slot + i) * number(row, SUMS_STRIDE), mask=mask & (slot + i < slots), other=0.0)
        ssq += add_residual(row, y + gated_shared(row, o_n, o_t, mask), o_n, o_t, mask, CONFIG)
    tl.store(pointer(row, SSQ_OUT, tl.float32) + o_t + c_row, ssq)


def row_run(rows: int, slots: int, config: KernelConfig, workers: int) -> int:
    """Sub-tiles of one task."""
    return rows_per_task(rows, config, workers, (slots,), 0.25) // config.rows


def slot_parts(rows: int, slots: int, config: KernelConfig, workers: int) -> int:
    """Tiles of a slot along the weight's rows; also the number of partial sums of squares that a token gets."""
    return -(-rows // (row_run(rows, slots, config, workers) * config.rows))


def tile(op: Operator, tiling: Tiling) -> TiledOperator:
    assert tiling.batch == 1, "slots of several tokens are grouped by expert"
    config = tiling.config
    count, rows, columns = tiling.shape(op, "weight")
    topk.check_choice(op, count)
    slots = op.attrs["slots"]
    silu = op.attrs["epilogue"] == "silu"
    run = row_run(rows, slots, config, tiling.workers)
    height = run * config.rows
    params = [("run", run)]

    def access(role: str, spans: tuple[Span, Span]) -> Access:
        return Access(op.tensor(role).name, tiling.shape(op, role), spans)

    one, across = Span.whole(1), Span.tiles(1, height)
    expert = access("experts", (one, Span.tiles(0, 1)))
    if silu:
        reads = [whole_access(op, tiling, role) for role in ("x", "ssq", "logits")]
        params.append(("parts", tiling.shape(op, "ssq")[1]))
        writes = [access("out", (Span.tiles(0, 1), Span.tiles(1, height // 2))), expert]
    else:
        reads = [access("x", (Span.tiles(0, 1), Span.whole(columns))), access("h", (one, across)), expert]
        if "shared_out" in op.inputs:
            reads += [access("shared_out", (one, across)), access("gate", (one, gate_span(op)))]
        writes = [access("sums", (Span.tiles(0, 1), across)), access("ssq_out", (one, Span.tiles(1, 1)))]
        writes += [access(role, (one, across)) for role in ("h_out", "out")]
    element_bytes = config.element.primitive_bitwidth // 8
    return TiledOperator(
        op.name,
        op.kind,
        grid=(slots, -(-rows // height)),
        reads=tuple(reads),
        writes=tuple(writes),
        tile_bytes=height * columns * element_bytes,
        params=tuple(params),
        tile_flops=2 * height * columns,
        joined=not silu,
    )


def row(op: Operator, tiled: TiledOperator, buffers: Buffers) -> dict[str, int]:
    at = by_role(op, buffers)
    values = product_row(op, tiled, buffers) | {
        "experts": at("experts").data_ptr(),
        "slots": op.attrs["slots"],
    }
    if "logits" in op.inputs:
        count = op.tensor("weight").bind({})[0]
        values |= {"logits": at("logits").data_ptr(), "count": count, "normalised": int(op.attrs["norm_topk_prob"])}
    else:
        values |= residual_row(op, buffers) | shared_row(op, buffers) | {
            "batch": 1,
            "sums": at("sums").data_ptr(),
            "sums_stride": at("sums").stride(0),
            "arrivals": at("arrivals").data_ptr(),
        }
    return values


def oracle(
    inputs: dict[str, torch.Tensor], epilogue: str, eps: float, slots: int, norm_topk_prob: bool = False
) -> dict[str, torch.Tensor]:
    """The operator in torch, in the dtype of its inputs.

    Args:
        inputs: weight [E, rows, columns]. SILU: x [1, columns], ssq and logits [1, n]. RESIDUAL: x [K, columns],
            experts [1, K], h and gamma; with a shared expert shared_out and gate, as in megaflow.tasks.combine.
        slots: K. norm_topk_prob: of SILU, whether the weights of a token's experts add up to 1.
    Returns:
        SILU: out [K, rows / 2], experts. RESIDUAL: sums [K, rows], h_out and out [1, rows], ssq_out [1, 1].
    """
    if epilogue == "silu":
        choice = topk.oracle({"logits": inputs["logits"]}, len(inputs["weight"]), slots, norm_topk_prob)
        chosen = inputs["weight"][choice["experts"][0]]
        given = {"x": inputs["x"], "ssq": inputs["ssq"], "weight": chosen.flatten(0, 1)}
        out = linear_oracle.oracle(given, epilogue, eps)["out"].view(slots, -1) * choice["weights"].T
        return {"out": out, "experts": choice["experts"]}
    chosen = inputs["weight"][inputs["experts"][0].long()]
    sums = torch.einsum("srk,sk->sr", chosen, inputs["x"])
    total = sums.sum(0, keepdim=True) + combine.shared_part(inputs)
    residual = {role: inputs[role] for role in ("h", "gamma")}
    return {"sums": sums} | linear_oracle.finish(total, residual, sums.shape[1], "residual", eps)


def run_tile(tile: Tile) -> None:
    """A tile is some rows of the weight of the expert in one slot."""
    count, rows, columns = tile.op.tensor("weight").bind({})
    slot, tile_row, _ = tile.at
    height = tile.tiled.param("run") * tile.config.rows
    first, last = tile_row * height, min((tile_row + 1) * height, rows)
    packed = PackedWeight(tile.buffer("weight"), count * padded(rows), columns)
    epilogue, eps, slots = tile.op.attrs["epilogue"], tile.config.eps, tile.op.attrs["slots"]

    def weight_of(expert: torch.Tensor) -> torch.Tensor:
        start = int(expert) * padded(rows)
        return packed.unpack(start + first, start + last).float()

    if epilogue == "silu":
        choice = topk.oracle({"logits": tile.read("logits")}, count, slots, tile.op.attrs["norm_topk_prob"])
        expert, share = choice["experts"][0, slot], choice["weights"][0, slot]
        inputs = {"x": tile.read("x"), "ssq": tile.read("ssq"), "weight": weight_of(expert)}
        tile.write("out", linear_oracle.oracle(inputs, epilogue, eps)["out"] * share)
        tile.write("experts", expert)
        return
    tile.write("sums", tile.read("x") @ weight_of(tile.read("experts")[0, 0]).T)
    counter = (tile_row * LINE,)
    arrived = int(tile.buffer("arrivals")[counter]) + 1
    tile.put("arrivals", counter, arrived % slots)
    if arrived == slots:
        total = tile.buffer("sums")[:slots, first:last].sum(0, keepdim=True)
        inputs = {role: tile.read(role) for role in ("h", "shared_out", "gate") if role in tile.op.inputs}
        total += combine.shared_part(inputs)
        inputs["gamma"] = tile.buffer("gamma")[first:last]
        for role, values in linear_oracle.finish(total, inputs, columns, epilogue, eps).items():
            tile.write(role, values)


SLOT_LINEAR = TaskKind("slot_linear", slot_linear_body, tile, FIELDS, row, oracle, run_tile)
