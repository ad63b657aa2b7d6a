"""Grouping the batch's pairs of token and expert by expert: the lists from which experts' tasks take their work.

Pair p is slot p % K of token p // K, where each token has K experts. The lists name the experts that have any pairs, in
order of their number, and the pairs in order of expert and pair: place i of `active` has the pairs that lie from
indptr[i] to indptr[i + 1] in `pairs`.

One tile makes all lists. A thread stands for an expert and goes over the batch's tokens, 16 at a time, twice: to count
its pairs and to write them down. Without atomics and without a sort, the lists are the same each time.
"""

import torch

from megaflow.backend import jit, tl
from megaflow.device import await_inputs
from megaflow.graph import Operator
from megaflow.kinds import Buffers, TaskKind, Tile, Tiling
from megaflow.lanes import number, pointer
from megaflow.regions import TiledOperator
from megaflow.tasks.common import by_role, whole_access

FIELDS = ("slot_of", "slot_of_stride", "batch", "slots", "count", "active", "active_count", "indptr", "pairs")
(SLOT_OF, SLOT_OF_STRIDE, TOKENS, SLOTS, COUNT, ACTIVE, ACTIVE_COUNT, INDPTR,
 PAIRS) = map(tl.constexpr, range(len(FIELDS)))  # fmt: skip

LISTS = ("active", "active_count", "indptr", "pairs")
BLOCK = tl.constexpr(128)  # experts at a time, one for each thread
LOADED = tl.constexpr(16)  # tokens at a time


@jit
def chosen(row, first, o_e):
    """The slots in which tokens from `first` on have experts o_e, and whether they do: [LOADED, BLOCK] each."""
    o_t = first + tl.arange(0, LOADED)
    mask = (o_t < number(row, TOKENS))[:, None] & (o_e < number(row, COUNT))[None, :]
    p_slot = pointer(row, SLOT_OF, tl.int32) + o_t[:, None] * number(row, SLOT_OF_STRIDE) + o_e[None, :]
    slot = tl.load(p_slot, mask=mask, other=-1)
    return slot, slot >= 0


@jit
def group_body(row, c_unused1, c_unused2, c_unused3, step, inputs, CONFIG: tl.constexpr):
    count = number(row, COUNT)
    tokens = number(row, TOKENS)
    slots = number(row, SLOTS)
    p_indptr = pointer(row, INDPTR, tl.int32)
    await_inputs(inputs)
    active = 0
    grouped = 0
    for block in range(0, count, BLOCK):
        o_e = block + tl.arange(0, BLOCK)
        size = tl.full([BLOCK], 0, tl.int32)
        for first in range(0, tokens, LOADED):
            _, mine = chosen(row, first, o_e)
            size += tl.sum(mine.to(tl.int32), 0)
        # pairs and active experts up to each one, added up at once
        both = tl.cumsum(size << 16 | (size > 0).to(tl.int32), 0)
        end = grouped + (both >> 16)
        place = active + (both & 0xFFFF) - 1
        tl.store(pointer(row, ACTIVE, tl.int32) + place, o_e, mask=size > 0)
        tl.store(p_indptr + place, end - size, mask=size > 0)
        total = tl.max(both, 0)
        active += total & 0xFFFF
        grouped += total >> 16
        listed = end - size
        for first in range(0, tokens, LOADED):
            slot, mine = chosen(row, first, o_e)
            at = listed[None, :] + tl.cumsum(mine.to(tl.int32), 0) - 1
            pair = (first + tl.arange(0, LOADED))[:, None] * slots + slot
            tl.store(pointer(row, PAIRS, tl.int32) + at, pair, mask=mine)
            listed += tl.sum(mine.to(tl.int32), 0)
    tl.store(p_indptr + active, grouped)
    tl.store(pointer(row, ACTIVE_COUNT, tl.int32), active)


def tile(op: Operator, tiling: Tiling) -> TiledOperator:
    batch, experts = tiling.shape(op, "slot_of")
    assert tiling.part is None, "experts' lists are for the whole batch"
    return TiledOperator(
        op.name,
        op.kind,
        grid=(1,),
        reads=(whole_access(op, tiling, "slot_of"),),
        writes=tuple(whole_access(op, tiling, role) for role in LISTS),
        tile_bytes=batch * experts * 4,
        params=(("batch", batch),),
    )


def row(op: Operator, tiled: TiledOperator, buffers: Buffers) -> dict[str, int]:
    at = by_role(op, buffers)
    return {
        "slot_of": at("slot_of").data_ptr(),
        "slot_of_stride": at("slot_of").stride(0),
        "batch": tiled.param("batch"),
        "slots": op.attrs["slots"],
        "count": op.tensor("slot_of").width,
        **{role: at(role).data_ptr() for role in LISTS},
    }


def oracle(inputs: dict[str, torch.Tensor], slots: int) -> dict[str, torch.Tensor]:
    """The lists for slot_of [B, E] in torch; active and indptr are as long as there are active experts."""
    expert, token = (inputs["slot_of"].T >= 0).nonzero().T
    active, sizes = expert.unique(return_counts=True)
    return {
        "active": active,
        "active_count": torch.tensor([len(active)]),
        "indptr": torch.nn.functional.pad(sizes.cumsum(0), (1, 0)),
        "pairs": token * slots + inputs["slot_of"][token, expert],
    }


def run_tile(tile: Tile) -> None:
    for role, values in oracle({"slot_of": tile.read("slot_of")}, tile.op.attrs["slots"]).items():
        tile.put(role, (slice(0, len(values)),), values)


GROUP = TaskKind("group", group_body, tile, FIELDS, row, oracle, run_tile)
