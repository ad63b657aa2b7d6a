"""Tile sizes for a model on a device: the small set of compiled kernels and their workers."""

from megaflow.kinds import KernelConfig, Tiling
from megaflow.models.experts import routing_symbols
from megaflow.models.geometry import Geometry
from megaflow.models.qwen3 import LOGIT_PARTS
from megaflow.models.stream import RESIDUAL_PARTS
from megaflow.target import Device
from megaflow.tasks.linear import row_tiles

TOKEN_TILES = (1, 16, 32)  # one compiled kernel each; a batch takes the first that holds it


def kernel_config(model: Geometry, batch: int, device: Device, dtype: str) -> KernelConfig:
    """Tile sizes for a batch. Batches over the largest token tile take several tiles of that size."""
    tokens = next((t for t in TOKEN_TILES if t >= batch), TOKEN_TILES[-1])
    if device.interpreted:  # few large tiles: the interpreter's time goes by operations, not by elements
        rows, k_blocks, stages, prefetch = 64, 8, 1, 1
    elif tokens == 1:
        rows, k_blocks, stages, prefetch = (8, 8, 4, 16) if model.hidden < 2048 else (16, 4, 6, 16)
    elif tokens == 16:
        # with narrow heads the wider product spills registers on sm_100
        rows, k_blocks, stages, prefetch = (16, 4, 4, 16) if model.head_dim == 128 else (16, 2, 6, 16)
    else:
        rows, k_blocks, stages, prefetch = 16, 1, 6, 16
    heads = 1 << (model.group - 1).bit_length()
    return KernelConfig(
        tokens=tokens,
        rows=rows,
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
    token_tiles = -(-batch // config.tokens)
    symbols = {
        "B": batch,
        RESIDUAL_PARTS.name: row_tiles(model.hidden, config, device.tiling_workers, token_tiles),
        LOGIT_PARTS.name: row_tiles(model.vocab, config, device.tiling_workers, token_tiles),
        **routing_symbols(model.experts, batch),
    }
    return Tiling(config, device.tiling_workers, symbols)


def smallest_rows(model: Geometry, device: Device) -> int:
    """The shortest sub-tile of any batch: bounds the number of tiles along a weight's rows."""
    return min(kernel_config(model, tokens, device, "bfloat16").rows for tokens in TOKEN_TILES)
