"""Choosing the next token of one sequence: argmax over the LM head's tiles, end-of-sequence test, bookkeeping.

The request's state lives on the device so that several steps run in one launch: the token to embed next, the
position (number of tokens in the KV cache), whether the sequence has finished, and what was generated.
"""

import torch

from megaflow.backend import jit, tl
from megaflow.device import await_inputs
from megaflow.graph import Operator
from megaflow.kinds import Buffers, TaskKind, Tile, Tiling
from megaflow.lanes import number, pointer
from megaflow.regions import TiledOperator
from megaflow.tasks.common import by_role, token_access

FIELDS = ("best_value", "best_index", "best_stride", "parts", "tokens", "positions", "finished", "unfinished",
          "generated", "generated_stride", "eos", "pad", "stop_step")  # fmt: skip
(BEST_VALUE, BEST_INDEX, BEST_STRIDE, PARTS, TOKENS, POSITIONS, FINISHED, UNFINISHED,
 GENERATED, GENERATED_STRIDE, EOS, PAD, STOP_STEP) = map(tl.constexpr, range(len(FIELDS)))  # fmt: skip

PART_BLOCK = tl.constexpr(1024)
MAX_EOS = 16  # end-of-sequence ids that a request can name
EOS_SLOTS = tl.constexpr(MAX_EOS)


@jit
def select_body(row, c_token, c_unused1, c_unused2, step, inputs, CONFIG: tl.constexpr):
    parts = number(row, PARTS)
    at = c_token * number(row, BEST_STRIDE)
    p_value = pointer(row, BEST_VALUE, tl.float32) + at
    p_index = pointer(row, BEST_INDEX, tl.int32) + at
    await_inputs(inputs)
    best = tl.full([PART_BLOCK], float("-inf"), tl.float32)
    index = tl.full([PART_BLOCK], 2147483647, tl.int32)
    for first in range(0, parts, PART_BLOCK):
        o_p = first + tl.arange(0, PART_BLOCK)
        value = tl.load(p_value + o_p, mask=o_p < parts, other=float("-inf"))
        candidate = tl.load(p_index + o_p, mask=o_p < parts, other=2147483647)
        index = tl.where(value > best, candidate, index)
        best = tl.maximum(best, value)
    # the lowest index among equals, as torch.argmax on the CPU
    token = tl.min(tl.where(best == tl.max(best, 0), index, 2147483647), 0)

    p_finished = pointer(row, FINISHED, tl.int32) + c_token
    was_finished = tl.load(p_finished)
    p_position = pointer(row, POSITIONS, tl.int32) + c_token
    position = tl.load(p_position)
    tl.debug_barrier()  # all threads have read the state before one of them changes it
    o_e = tl.arange(0, EOS_SLOTS)
    is_eos = tl.max((tl.load(pointer(row, EOS, tl.int32) + o_e) == token).to(tl.int32), 0)
    token = tl.where(was_finished != 0, tl.load(pointer(row, PAD, tl.int32)), token)
    p_generated = pointer(row, GENERATED, tl.int32) + c_token * number(row, GENERATED_STRIDE)
    tl.store(p_generated + step, token)
    tl.store(pointer(row, TOKENS, tl.int32) + c_token, token)
    tl.store(p_position, position + (was_finished == 0).to(tl.int32))
    if (was_finished == 0) & (is_eos != 0):
        tl.store(p_finished, 1)
        left = tl.atomic_add(pointer(row, UNFINISHED, tl.int32), -1, sem="acq_rel", scope="gpu")
        if left == 1:
            tl.store(pointer(row, STOP_STEP, tl.int32), step + 1)


def tile(op: Operator, tiling: Tiling) -> TiledOperator:
    return TiledOperator(
        op.name,
        op.kind,
        grid=(tiling.sequences,),
        reads=(token_access(op, tiling, "best_value"), token_access(op, tiling, "best_index")),
        writes=(token_access(op, tiling, "tokens"),),
        tile_bytes=tiling.shape(op, "best_value")[1] * 8,
        params=(("parts", tiling.shape(op, "best_value")[1]),),
    )


def row(op: Operator, tiled: TiledOperator, buffers: Buffers) -> dict[str, int]:
    at = by_role(op, buffers)
    state = ("tokens", "positions", "finished", "unfinished", "generated", "eos", "pad", "stop_step")
    return {
        "best_value": at("best_value").data_ptr(),
        "best_index": at("best_index").data_ptr(),
        "best_stride": at("best_value").stride(0),
        "parts": tiled.param("parts"),
        "generated_stride": at("generated").stride(0),
        **{role: at(role).data_ptr() for role in state},
    }


def oracle(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The choice in torch: the index [B] of the best part; bookkeeping is not part of it."""
    best = inputs["best_value"].argmax(1, keepdim=True)
    return {"tokens": inputs["best_index"].gather(1, best)[:, 0]}


def run_tile(tile: Tile) -> None:
    at = (tile.sequence,)
    token = int(oracle({role: tile.read(role) for role in ("best_value", "best_index")})["tokens"])
    was_finished = bool(tile.buffer("finished")[at])
    is_eos = bool((tile.buffer("eos") == token).any())
    token = int(tile.buffer("pad")[0]) if was_finished else token
    tile.put("generated", (*at, tile.step), token)
    tile.put("tokens", at, token)
    tile.put("positions", at, int(tile.buffer("positions")[at]) + (not was_finished))
    if is_eos and not was_finished:
        left = int(tile.buffer("unfinished")[0]) - 1
        tile.put("finished", at, 1)
        tile.put("unfinished", (0,), left)
        if left == 0:
            tile.put("stop_step", (0,), tile.step + 1)


SELECT = TaskKind("select", select_body, tile, FIELDS, row, oracle, run_tile)
