"""Tile sizes for a model on a device: the small set of compiled kernels and their workers."""

from megaflow.kinds import KernelConfig, Tiling
from megaflow.models.experts import SLOT_PARTS, routing_symbols
from megaflow.models.geometry import Geometry
from megaflow.models.qwen3 import LOGIT_PARTS
from megaflow.models.stream import RESIDUAL_PARTS
from megaflow.target import Device
from megaflow.tasks.linear import row_tiles
from megaflow.tasks.packing import BLOCK
from megaflow.tasks.slot_linear import slot_parts

EXPERT_TOKENS = 16  # of one expert: most have fewer


def token_tiles(model: Geometry) -> tuple[int, ...]:
    """Token rows of a tile; one compiled kernel each. A batch takes the first that holds it.

    The most is what is fastest at batch 64. With experts there is less to read besides them, and the smaller tiles
    make more tasks of it; and few of 8 tokens have an expert in common.
    """
    return (1, 8, 16, 32) if model.experts else (1, 16, 64)


def kernel_config(model: Geometry, batch: int, device: Device, dtype: str) -> KernelConfig:
    """Tile sizes for a batch. Batches over the largest token tile take several tiles of that size."""
    sizes = token_tiles(model)
    tokens = next((t for t in sizes if t >= batch), sizes[-1])
    if device.interpreted:  # few large tiles: the interpreter's time goes by operations, not by elements
        rows, k_blocks, stages, prefetch = BLOCK, 8, 1, 1
    elif tokens == 1:
        rows, k_blocks, stages, prefetch = (8, 8, 4, 16) if model.hidden < 2048 else (16, 4, 6, 16)
    else:
        rows, k_blocks, prefetch = BLOCK, 2, 4
        stages = min(3 if tokens == 8 else 4, device.worker_shared_memory // (k_blocks * (rows + tokens) * BLOCK * 2))
    heads = 1 << (model.group - 1).bit_length()
    return KernelConfig(
        tokens=tokens,
        rows=rows,
        experts=max(128, 1 << (model.experts.count - 1).bit_length()) if model.experts else 0,
        expert_tokens=min(tokens, EXPERT_TOKENS),
        k_blocks=k_blocks,
        stages=stages,
        prefetch=prefetch,
        head_dim=model.head_dim,
        heads=heads,
        group=max(16, heads),
        kv_block=64,
        qk_norm=model.qk_norm,
        eps=model.eps,
        dtype=dtype,
    )


def tiling(model: Geometry, batch: int, device: Device, dtype: str) -> Tiling:
    """How the model's graph is cut for a batch of `batch` sequences."""
    config = kernel_config(model, batch, device, dtype)
    symbols = {
        "B": batch,
        RESIDUAL_PARTS.name: row_tiles(model.hidden, config, device.tiling_workers),
        LOGIT_PARTS.name: row_tiles(model.vocab, config, device.tiling_workers),
        **routing_symbols(model.experts, batch),
    }
    if model.experts is not None and batch == 1:
        slots = model.experts.per_token
        symbols[SLOT_PARTS.name] = slot_parts(model.hidden, slots, config, device.tiling_workers)
    return Tiling(config, device.tiling_workers, symbols)


def smallest_rows(model: Geometry, device: Device) -> int:
    """The shortest sub-tile of any batch: bounds the number of tiles along a weight's rows."""
    return min(kernel_config(model, tokens, device, "bfloat16").rows for tokens in token_tiles(model))
