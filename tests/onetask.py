"""One operator, run by the persistent kernel, for comparison with its oracle."""

import random
from typing import Any

import torch

from megaflow.backend import interpreted, kernel_device
from megaflow.device import STOP_STEP
from megaflow.graph import Graph, Tensor
from megaflow.kinds import KernelConfig, Tile, Tiling
from megaflow.models.planner import KINDS_BY_NAME, bodies_of, make_plan
from megaflow.runtime import LoadedPlan, new_control
from megaflow.scheduler import find_schedule

EPS = 1e-6


def config(tokens: int, **changes: Any) -> KernelConfig:
    """Small tiles, so that small operators have several."""
    fields = {"tokens": tokens, "rows": 16 if tokens == 1 else 64, "k_blocks": 2, "stages": 1, "prefetch": 1,
              "experts": 128, "expert_tokens": tokens, "head_dim": 64, "heads": 8, "group": 16, "kv_block": 16,
              "qk_norm": True, "eps": EPS, "dtype": "float32" if interpreted() else "bfloat16"}  # fmt: skip
    return KernelConfig(**(fields | changes))


def model_dtype() -> torch.dtype:
    return torch.float32 if interpreted() else torch.bfloat16


def tolerance() -> float:
    """Largest relative L2 error against a float64 reference."""
    return 1e-5 if interpreted() else 1e-2


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """||got - wanted|| / ||wanted||; NaN if anything was not written."""
    return float((got.double().cpu() - wanted.double().cpu()).norm() / wanted.double().cpu().norm())


def run_operator(
    kind: str,
    inputs: dict[str, Tensor],
    outputs: dict[str, Tensor],
    buffers: dict[str, torch.Tensor],
    kernel: KernelConfig,
    symbols: dict[str, int],
    schedule: str,
    workers: int = 3,
    **attrs: Any,
) -> None:
    """Run one step of a graph of one operator; results are in `buffers` (by tensor name, on the kernel's device).

    With the schedule "torch" there is no kernel: the tiles are computed in torch, one by one, in any order.
    """
    graph = Graph()
    op = graph.add("op", kind, inputs, outputs, **attrs)
    tiling = Tiling(kernel, workers, symbols)
    if schedule == "torch":
        tiled = KINDS_BY_NAME[kind].cut(op, tiling)
        tiles = [Tile(op, tiled, tuple(at), 0, kernel, buffers) for at in tiled.coordinates().tolist()]
        for tile in random.Random(0).sample(tiles, len(tiles)):
            KINDS_BY_NAME[kind].run_tile(tile)
        return
    plan = make_plan(graph, tiling, find_schedule(schedule), 1 if interpreted() else workers)
    control = new_control(kernel_device())
    buffers = {"stop_step": control[STOP_STEP.value :], **buffers}
    row = KINDS_BY_NAME[kind].packed_row(graph.operators[0], plan.graph.operators[0], buffers)
    table = torch.tensor([row], dtype=torch.int64).to(kernel_device())
    loaded = LoadedPlan(plan, table, control, bodies_of(graph), kernel)
    loaded.launch(1)
    assert loaded.finish() == 1


def on_device(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return tensor.to(kernel_device(), dtype or tensor.dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A buffer of NaN (or of the most negative integer)."""
    value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min
    return torch.full(shape, value, dtype=dtype, device=kernel_device())
