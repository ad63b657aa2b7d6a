"""What a task kind is: the code and the rules for one sort of tile task.

A kind is registered in megaflow.tasks.KINDS; its number is its place there. The persistent kernel calls `body`
with a pointer to the operator's row of the operator table; `row` fills that row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megaflow.backend import tl
from megaflow.errors import PlanError
from megaflow.graph import BATCH, Operator
from megaflow.regions import TiledOperator

ROW_WIDTH = 24  # int64 fields in a row of the operator table
Buffers = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class KernelConfig:
    """Numbers compiled into the kernel. One compiled kernel serves all batch sizes and contexts.

    Attributes:
        tokens: token rows of a tile (T); a tile's products use the tensor cores from 8 up.
        rows: weight rows of a sub-tile, a power of two up to 64.
        k_blocks: 64-column weight blocks that one iteration of the product takes, a power of two.
        stages: depth of the load pipeline in the product.
        prefetch: weight blocks along a row that a task brings into the L2 cache while it waits for its inputs.
        head_dim: of attention, a power of two.
        group: query heads per KV head, padded to a power of two of at least 16 (a tensor-core tile).
        kv_block: KV positions that attention takes at once.
        eps: of every RMSNorm.
        dtype: name of the model's dtype in Triton ("bfloat16", "float32").
    """

    tokens: int
    rows: int
    k_blocks: int
    stages: int
    prefetch: int
    head_dim: int
    group: int
    kv_block: int
    eps: float
    dtype: str

    @property
    def element(self) -> tl.dtype:
        """The model's dtype as Triton names it."""
        return {"bfloat16": tl.bfloat16, "float32": tl.float32}[self.dtype]


@dataclass(frozen=True)
class Tiling:
    """How operators are cut: the kernel's tile sizes, the number of workers to keep busy, bound symbols."""

    config: KernelConfig
    workers: int
    symbols: Mapping[str, int]

    @property
    def token_tiles(self) -> int:
        """Tiles along the batch."""
        return -(-self.symbols[BATCH.name] // self.config.tokens)

    def shape(self, op: Operator, role: str) -> tuple[int, ...]:
        """The bound shape of the tensor that plays `role` in an operator."""
        return op.tensor(role).bind(self.symbols)


@dataclass(frozen=True)
class TaskKind:
    """One sort of tile task.

    Attributes:
        name: as operators name it.
        body: Triton function (row, c0, c1, c2, step, inputs, CONFIG): computes the tile at grid point
            (c0, c1, c2); it calls device.await_inputs(inputs) once, before it reads other tasks' results.
        tile: cuts an operator into tiles.
        fields: names of the fields of the operator's row, in order; at most ROW_WIDTH.
        row: the value of each field: pointers, sizes, strides in elements.
        oracle: the same operator in torch: maps input tensors by role and attrs to output tensors by role.
    """

    name: str
    body: Any
    tile: Callable[[Operator, Tiling], TiledOperator]
    fields: tuple[str, ...]
    row: Callable[[Operator, TiledOperator, Buffers], dict[str, int]]
    oracle: Callable[..., dict[str, torch.Tensor]]

    def packed_row(self, op: Operator, tiled: TiledOperator, buffers: Buffers) -> list[int]:
        """The operator's row as ROW_WIDTH ints. Fields that `row` leaves out are 0 (a null pointer)."""
        values = self.row(op, tiled, buffers)
        unknown = set(values) - set(self.fields)
        if unknown or len(self.fields) > ROW_WIDTH:
            raise PlanError(f"task kind {self.name}: fields {sorted(unknown)} unknown, {len(self.fields)} in all")
        row = [values.get(field, 0) for field in self.fields]
        return row + [0] * (ROW_WIDTH - len(row))
