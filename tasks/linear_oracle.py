"""Linear layers in torch: what megaflow.tasks.linear computes, for a whole operator and for one tile."""

import torch

from megaflow.kinds import Tile
from megaflow.tasks.packing import PackedWeight


def oracle(inputs: dict[str, torch.Tensor], epilogue: str, eps: float) -> dict[str, torch.Tensor]:
    """The operator in torch, in the dtype of its inputs; `weight` is an ordinary [rows, columns] matrix."""
    y = inputs["x"] @ inputs["weight"].T
    if "ssq" in inputs:
        y = y * torch.rsqrt(inputs["ssq"].sum(1, keepdim=True) / inputs["weight"].shape[1] + eps)
    if "bias" in inputs:
        y = y + inputs["bias"]
    if epilogue == "silu":
        gate, up = y.unflatten(1, (-1, 2)).unbind(2)
        return {"out": torch.nn.functional.silu(gate) * up}
    if epilogue == "residual":
        h = inputs["h"] + y
        return {"h_out": h, "out": h * inputs["gamma"], "ssq_out": h.square().sum(1, keepdim=True)}
    if epilogue == "logits":
        best = y.max(1)
        return {"out": y, "best_value": best.values[:, None], "best_index": best.indices[:, None]}
    return {"out": y}


def run_tile(tile: Tile) -> None:
    """A tile is the operator with some of the weight's rows, for some tokens."""
    rows, columns = tile.op.tensor("weight").bind({})
    height = tile.tiled.param("run") * tile.config.rows
    first = tile.at[0] * height
    last = min(first + height, rows)
    weight = PackedWeight(tile.buffer("weight"), rows, columns).unpack(first, last).float()
    inputs = {"x": tile.read("x"), "weight": weight}
    if "ssq" in tile.op.inputs:
        inputs["ssq"] = tile.read("ssq")
    if "bias" in tile.op.inputs:
        inputs["bias"] = tile.buffer("bias")[first:last]
    if tile.op.attrs["epilogue"] == "residual":
        inputs |= {"h": tile.read("h"), "gamma": tile.buffer("gamma")[first:last]}
    outputs = oracle(inputs, tile.op.attrs["epilogue"], tile.config.eps)
    if "best_index" in outputs:
        outputs["best_index"] += first
    for role, values in outputs.items():
        tile.write(role, values)
