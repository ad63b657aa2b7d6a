"""Decode attention in torch: what megaflow.tasks.attention computes, for a whole operator and for one tile."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megaflow.kinds import Tile


def norm_rope(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMSNorm and rotary embedding (rotate-half convention) of vectors [..., D]."""
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


@dataclass(frozen=True)
class Split:
    """What attention over some of the positions leaves: a sum [group, D] and statistics [group] of its softmax.

    Attributes:
        partial: values weighted with exp(score - top).
        top: the largest score.
        total: sum of the weights.
    """

    partial: torch.Tensor
    top: torch.Tensor
    total: torch.Tensor


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Split:
    """Attention of the query heads q [group, D] over keys and values [length, D]."""
    scores = q @ keys.T * q.shape[-1] ** -0.5
    top = scores.max(1).values
    weights = torch.exp(scores - top[:, None])
    return Split(weights @ values, top, weights.sum(1))


def combine(splits: Sequence[Split]) -> torch.Tensor:
    """Attention over all positions, [group, D]; the splits are added up in their order."""
    top = torch.stack([split.top for split in splits]).max(0).values
    partial, total = torch.zeros_like(splits[0].partial), torch.zeros_like(top)
    for split in splits:
        fade = torch.exp(split.top - top)
        partial += fade[:, None] * split.partial
        total += fade * split.total
    return partial / total[:, None]


def oracle(inputs: dict[str, torch.Tensor], kv_heads: int, group: int, eps: float) -> dict[str, torch.Tensor]:
    """The operator in torch for sequences whose earlier keys and values are given as dense lists.

    Args:
        inputs: qkv [B, kv_heads * (group + 2) * D]; q_norm, k_norm [D]; cos, sin [B, D] of each position;
            keys, values: lists of B tensors [kv_heads, length, D].
    Returns:
        out [B, kv_heads * group * D]; new_key, new_value [B, kv_heads, D].
    """
    q, new_key, new_value = prepare(inputs, kv_heads, group, eps)
    out = []
    for b in range(len(q)):
        keys = torch.cat((inputs["keys"][b], new_key[b][:, None]), 1)
        values = torch.cat((inputs["values"][b], new_value[b][:, None]), 1)
        out.append(torch.cat([combine([attend(q[b, h], keys[h], values[h])]).reshape(-1) for h in range(kv_heads)]))
    return {"out": torch.stack(out), "new_key": new_key, "new_value": new_value}


def prepare(
    inputs: dict[str, torch.Tensor], kv_heads: int, group: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [B, kv_heads, group, D], keys and values [B, kv_heads, D] of the new position, normalised and rotated."""
    qkv = inputs["qkv"].view(len(inputs["qkv"]), kv_heads, group + 2, -1)
    cos, sin = inputs["cos"][:, None, None], inputs["sin"][:, None, None]
    q = norm_rope(qkv[:, :, :group], inputs["q_norm"], cos, sin, eps)
    return q, norm_rope(qkv[:, :, group:-1], inputs["k_norm"], cos, sin, eps)[:, :, 0], qkv[:, :, -1]


def run_tile(tile: Tile) -> None:
    """A tile is one split of one sequence and KV head; the one that arrives last combines them."""
    sequence, (_, head, split) = tile.sequence, tile.at
    splits, block = tile.tiled.param("splits"), tile.config.kv_block
    position = int(tile.buffer("positions")[sequence])
    length = position + 1
    chunk = math.ceil(math.ceil(length / splits) / block) * block
    active = math.ceil(length / chunk)
    if split >= active:
        return
    inputs = {"qkv": tile.read("qkv"), "q_norm": tile.buffer("q_norm"), "k_norm": tile.buffer("k_norm")}
    inputs |= {role: tile.buffer(role)[position : position + 1] for role in ("cos", "sin")}
    q, key, value = prepare(inputs, 1, tile.op.attrs["group"], tile.config.eps)

    page_size = tile.buffer("k_cache").shape[2]
    pages = tile.buffer("block_table")[sequence]
    if split == active - 1:
        new = (int(pages[position // page_size]), head, position % page_size)
        tile.put("k_cache", new, key[0, 0])
        tile.put("v_cache", new, value[0, 0])
    places = torch.arange(split * chunk, min((split + 1) * chunk, length), device=pages.device)
    index = (pages[places // page_size].long(), head, places % page_size)
    part = attend(q[0, 0], tile.buffer("k_cache")[index].float(), tile.buffer("v_cache")[index].float())
    if active == 1:
        tile.write("out", combine([part]).reshape(1, -1))
        return
    workspace = Workspace(tile, sequence * tile.op.attrs["kv_heads"] + head)
    workspace.leave(split, part)
    arrived = int(tile.buffer("arrived")[sequence, head, 0]) + 1
    tile.put("arrived", (sequence, head, 0), arrived % active)
    if arrived == active:
        tile.write("out", combine([workspace.take(other) for other in range(active)]).reshape(1, -1))


class Workspace:
    """Where the splits of one sequence and KV head (a unit) leave their results: the kernel's layout."""

    def __init__(self, tile: Tile, unit: int) -> None:
        self._tile = tile
        self._first = unit * tile.tiled.param("splits")

    def _places(self, split: int) -> tuple[slice, slice, slice]:
        """Of the partial sum, in "partial", and of the two statistics, in "statistics"."""
        group, padded = self._tile.op.attrs["group"], self._tile.config.group
        width = self._tile.config.head_dim
        start = (self._first + split) * padded
        return (
            slice(start * width, (start + group) * width),
            slice(2 * start, 2 * start + group),
            slice(2 * start + padded, 2 * start + padded + group),
        )

    def leave(self, split: int, part: Split) -> None:
        partial, top, total = self._places(split)
        self._tile.put("partial", (partial,), part.partial.reshape(-1))
        self._tile.put("statistics", (top,), part.top)
        self._tile.put("statistics", (total,), part.total)

    def take(self, split: int) -> Split:
        partial, top, total = self._places(split)
        statistics = self._tile.buffer("statistics")
        sums = self._tile.buffer("partial")[partial].view(-1, self._tile.config.head_dim)
        return Split(sums, statistics[top], statistics[total])
