"""Linear layers of experts in torch: what megaflow.tasks.expert_linear computes, for an operator and for one tile."""

import torch

from megaflow.kinds import Tile
from megaflow.tasks import linear_oracle
from megaflow.tasks.group import LISTS
from megaflow.tasks.packing import PackedWeight, padded


def oracle(inputs: dict[str, torch.Tensor], epilogue: str, eps: float) -> dict[str, torch.Tensor]:
    """The operator in torch, in the dtype of its inputs.

    Args:
        inputs: weight [E, rows, columns]; active, active_count, indptr, pairs as `group` leaves them; x and, if it is
            an RMSNorm's, ssq: with a row for each pair, or for each token.
    Returns:
        out [pairs, rows], [pairs, rows / 2] for the epilogue "silu".
    """
    pairs = inputs["pairs"].long()
    x_rows = pairs // (len(pairs) // len(inputs["x"]))
    out = None
    for place in range(int(inputs["active_count"])):
        mine = slice(*inputs["indptr"][place : place + 2].tolist())
        given = {role: inputs[role][x_rows[mine]] for role in ("x", "ssq") if role in inputs}
        weight = inputs["weight"][int(inputs["active"][place])]
        y = linear_oracle.oracle(given | {"weight": weight}, epilogue, eps)["out"]
        out = y.new_empty(len(pairs), y.shape[1]) if out is None else out
        out[pairs[mine]] = y
    assert out is not None, "each pair has an expert"
    return {"out": out}


def run_tile(tile: Tile) -> None:
    """A tile is some rows of the weight of the expert at one place of the list."""
    place, tile_row, _ = tile.at
    lists = {role: tile.buffer(role) for role in LISTS}
    if place >= int(lists["active_count"]):
        return
    experts, rows, columns = tile.op.tensor("weight").bind({})
    height = tile.tiled.param("run") * tile.config.rows
    first = tile_row * height
    last = min(first + height, rows)
    begin, end = lists["indptr"][place : place + 2].tolist()
    pairs = lists["pairs"][begin:end].long()
    x_rows = pairs // tile.tiled.param("pairs_per_row")
    packed = PackedWeight(tile.buffer("weight"), experts * padded(rows), columns)
    start = int(lists["active"][place]) * padded(rows)
    inputs = {"x": tile.buffer("x")[x_rows, :columns].float()}
    inputs["weight"] = packed.unpack(start + first, start + last).float()
    if "ssq" in tile.op.inputs:
        inputs["ssq"] = tile.buffer("ssq")[x_rows, : tile.tiled.param("parts")]
    y = linear_oracle.oracle(inputs, tile.op.attrs["epilogue"], tile.config.eps)["out"]
    scale = 2 if tile.op.attrs["epilogue"] == "silu" else 1
    tile.put("out", (pairs, slice(first // scale, last // scale)), y)
