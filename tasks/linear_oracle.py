"""Linear layers in torch: what megaflow.tasks.linear computes, for a whole operator and for one tile."""

import torch

from megaflow.kinds import Tile
from megaflow.tasks.common import LINE
from megaflow.tasks.packing import BLOCK, PackedWeight, blocks


def oracle(inputs: dict[str, torch.Tensor], epilogue: str, eps: float) -> dict[str, torch.Tensor]:
    """The operator in torch, in the dtype of its inputs; `weight` is an ordinary [rows, columns] matrix."""
    return finish(inputs["x"] @ inputs["weight"].T, inputs, inputs["weight"].shape[1], epilogue, eps)


def finish(
    y: torch.Tensor, inputs: dict[str, torch.Tensor], columns: int, epilogue: str, eps: float
) -> dict[str, torch.Tensor]:
    """What comes after the product y = x W^T [tokens, rows], whose sum runs over so many columns."""
    if "ssq" in inputs:
        y = y * torch.rsqrt(inputs["ssq"].sum(1, keepdim=True) / columns + eps)
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
    """A tile is the operator with some of the weight's rows, for some tokens, and as a split with some columns."""
    rows, columns = tile.op.tensor("weight").bind({})
    height = tile.tiled.param("run") * tile.config.rows
    first = tile.at[0] * height
    last = min(first + height, rows)
    weight = PackedWeight(tile.buffer("weight"), rows, columns).unpack(first, last).float()
    x = tile.read("x")
    splits = -(-blocks(columns) // tile.tiled.param("span"))
    if splits == 1:
        y = x @ weight.T
    else:
        begin = tile.at[2] * tile.tiled.param("span") * BLOCK
        part = slice(begin, begin + tile.tiled.param("span") * BLOCK)
        added = add_splits(tile, x[:, part] @ weight[:, part].T, splits)
        if added is None:
            return
        y = added[:, : last - first]
    inputs = {"ssq": tile.read("ssq")} if "ssq" in tile.op.inputs else {}
    if "bias" in tile.op.inputs:
        inputs["bias"] = tile.buffer("bias")[first:last]
    if tile.op.attrs["epilogue"] == "residual":
        inputs |= {"h": tile.read("h"), "gamma": tile.buffer("gamma")[first:last]}
    outputs = finish(y, inputs, columns, tile.op.attrs["epilogue"], tile.config.eps)
    if "best_index" in outputs:
        outputs["best_index"] += first
    for role, values in outputs.items():
        tile.write(role, values)


def add_splits(tile: Tile, y: torch.Tensor, splits: int) -> torch.Tensor | None:
    """The sum [tokens, 64] over all splits, in their order, if this is the last to leave its part y [tokens, rows]."""
    row_tile, _, split = tile.at
    tokens = tile.tiled.writes[-1].at(tile.at)[0]
    column = (row_tile * splits + split) * BLOCK
    tile.put("partials", (tokens, slice(column, column + y.shape[1])), y)
    counter = (tokens.start, row_tile * LINE)
    arrived = int(tile.buffer("arrivals")[counter]) + 1
    tile.put("arrivals", counter, arrived % splits)
    if arrived < splits:
        return None
    first = row_tile * splits * BLOCK
    kept = tile.buffer("partials")[tokens, first : first + splits * BLOCK]
    total = kept[:, :BLOCK].clone()
    for other in range(1, splits):
        total += kept[:, other * BLOCK : (other + 1) * BLOCK]
    return total
