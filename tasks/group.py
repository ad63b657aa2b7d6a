"""Grouping the batch's pairs of token and expert by expert: the lists from which experts' tasks take their work.

Pair p is slot p % K of token p // K, where each token has K experts. The lists name the experts that have any pairs, in
order of their number, and the pairs in order of expert and pair: place i of `active` has the pairs that lie from
indptr[i] to indptr[i + 1] in `pairs`.

One tile makes all lists. A thread stands for an expert and goes over the batch's choices, 16 at a time, twice: to count
its pairs and to write them down. Without atomics and without a sort, the lists are the same each time.
"""

import torch

from megaflow.backend import jit, tl
from megaflow.device import await_inputs
from megaflow.graph import Operator
from megaflow.kinds import Buffers, TaskKind, Tile, Tiling
from megaflow.regions import TiledOperator
from megaflow.tasks.common import by_role, number, pointer, whole_access

FIELDS = ("experts", "experts_stride", "batch", "slots", "slot_shift", "count", "active", "active_count", "indptr",
          "pairs")  # fmt: skip
(EXPERTS, EXPERTS_STRIDE, TOKENS, SLOTS, SLOT_SHIFT, COUNT, ACTIVE, ACTIVE_COUNT, INDPTR,
 PAIRS) = map(tl.constexpr, range(len(FIELDS)))  # fmt: skip

LISTS = ("active", "active_count", "indptr", "pairs")
BLOCK = tl.constexpr(128)  # experts at a time, one for each thread
CHOICES = tl.constexpr(16)  # looked at at a time, in the registers of each thread


@jit
def chosen(row, first, o_e):
    """Pairs, int32 [CHOICES, 1], and whether they have the experts o_e, bool [CHOICES, BLOCK].

    Choices are counted as if a token had a power of two of them, so that no division finds the token.
    """
    slots = number(row, SLOTS)
    shift = number(row, SLOT_SHIFT)
    choice = first + tl.arange(0, CHOICES)
    token = choice >> shift
    slot = choice & ((1 << shift) - 1)
    mask = (token < number(row, TOKENS)) & (slot < slots)
    p_expert = pointer(row, EXPERTS, tl.int32) + token * number(row, EXPERTS_STRIDE) + slot
    expert = tl.load(p_expert, mask=mask, other=-1)
    return (token * slots + slot)[:, None], expert[:, None] == o_e[None, :]


@jit
def group_body(row, c_unused1, c_unused2, c_unused3, step, inputs, CONFIG: tl.constexpr):
    count = number(row, COUNT)
    choices = number(row, TOKENS) << number(row, SLOT_SHIFT)
    p_indptr = pointer(row, INDPTR, tl.int32)
    await_inputs(inputs)
    active = 0
    grouped = 0
    for block in range(0, count, BLOCK):
        o_e = block + tl.arange(0, BLOCK)
        size = tl.full([BLOCK], 0, tl.int32)
        for first in range(0, choices, CHOICES):
            _, mine = chosen(row, first, o_e)
            size += tl.sum(mine.to(tl.int32), 0)
        end = grouped + tl.cumsum(size, 0)
        has_pairs = (size > 0).to(tl.int32)
        place = active + tl.cumsum(has_pairs, 0) - 1
        tl.store(pointer(row, ACTIVE, tl.int32) + place, o_e, mask=size > 0)
        tl.store(p_indptr + place, end - size, mask=size > 0)
        active += tl.sum(has_pairs, 0)
        grouped += tl.sum(size, 0)
        listed = end - size
        for first in range(0, choices, CHOICES):
            pair, mine = chosen(row, first, o_e)
            rank = tl.cumsum(mine.to(tl.int32), 0) - 1
            at = pointer(row, PAIRS, tl.int32) + listed[None, :] + rank
            tl.store(at, tl.broadcast_to(pair, (CHOICES, BLOCK)), mask=mine)
            listed += tl.sum(mine.to(tl.int32), 0)
    tl.store(p_indptr + active, grouped)
    tl.store(pointer(row, ACTIVE_COUNT, tl.int32), active)


def tile(op: Operator, tiling: Tiling) -> TiledOperator:
    batch, slots = tiling.shape(op, "experts")
    assert tiling.part is None, "experts' lists are for the whole batch"
    return TiledOperator(
        op.name,
        op.kind,
        grid=(1,),
        reads=(whole_access(op, tiling, "experts"),),
        writes=tuple(whole_access(op, tiling, role) for role in LISTS),
        tile_bytes=batch * slots * 4,
        params=(("batch", batch),),
    )


def row(op: Operator, tiled: TiledOperator, buffers: Buffers) -> dict[str, int]:
    at = by_role(op, buffers)
    slots = op.tensor("experts").width
    return {
        "experts": at("experts").data_ptr(),
        "experts_stride": at("experts").stride(0),
        "batch": tiled.param("batch"),
        "slots": slots,
        "slot_shift": (slots - 1).bit_length(),
        "count": op.attrs["experts"],
        **{role: at(role).data_ptr() for role in LISTS},
    }


def oracle(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The lists for experts [B, K] in torch; active and indptr are as long as there are active experts."""
    by_pair = inputs["experts"].reshape(-1)
    active, sizes = by_pair.unique(return_counts=True)
    return {
        "active": active,
        "active_count": torch.tensor([len(active)]),
        "indptr": torch.nn.functional.pad(sizes.cumsum(0), (1, 0)),
        "pairs": by_pair.sort(stable=True).indices,
    }


def run_tile(tile: Tile) -> None:
    for role, values in oracle({"experts": tile.read("experts")}).items():
        tile.put(role, (slice(0, len(values)),), values)


GROUP = TaskKind("group", group_body, tile, FIELDS, row, oracle, run_tile)
