"""What a task kind is: the code and the rules for one sort of tile task.

A kind is registered in megaflow.tasks.KINDS; its number is its place among those that a model uses. `row` fills an
operator's row of the operator table. The persistent kernel calls `body` with that row, held as megaflow.lanes says.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megaflow.backend import tl
from megaflow.errors import PlanError
from megaflow.graph import BATCH, Operator
from megaflow.regions import Access, MicroBatch, Span, TiledOperator

ROW_WIDTH = 32  # int64 fields in a row of the operator table
ROUTING_FIELDS = 3  # the last ones, of operators with a routing: where its count, indptr and items lie
Buffers = Mapping[str, torch.Tensor]
Place = tuple[int | slice | torch.Tensor, ...]  # an index into a tensor


@dataclass(frozen=True)
class KernelConfig:
    """Numbers compiled into the kernel. One compiled kernel serves all batch sizes and contexts of a token tile.

    Attributes:
        tokens: token rows of a tile (T), 1 or a multiple of 16; from there on products use the tensor cores.
        rows: weight rows of a sub-tile: a power of two up to 64, with several tokens 64.
        experts: of a sparse layer, padded to a power of two from 128 up; 0 without any.
        expert_tokens: token rows of a tile of an expert's linear layer.
        k_blocks: 64-column weight blocks that one iteration of the product takes, a power of two.
        stages: depth of the load pipeline in the product.
        prefetch: weight blocks along a row that a task brings into the L2 cache while it waits for its inputs.
        head_dim: of attention, a power of two.
        heads: query heads per KV head, padded to a power of two.
        group: the same, padded to at least 16 (a tensor-core tile).
        kv_block: KV positions that attention takes at once.
        qk_norm: whether attention takes an RMSNorm of each query and key.
        eps: of every RMSNorm.
        dtype: name of the model's dtype in Triton ("bfloat16", "float32").
    """

    tokens: int
    rows: int
    experts: int
    expert_tokens: int
    k_blocks: int
    stages: int
    prefetch: int
    head_dim: int
    heads: int
    group: int
    kv_block: int
    qk_norm: bool
    eps: float
    dtype: str

    @property
    def element(self) -> tl.dtype:
        """The model's dtype as Triton names it."""
        return {"bfloat16": tl.bfloat16, "float32": tl.float32}[self.dtype]

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[self.dtype]


@dataclass(frozen=True)
class Tiling:
    """How operators are cut: the kernel's tile sizes, the number of workers to keep busy, bound symbols.

    With `part` only that part of the batch is cut. Sizes of tiles follow from the whole batch all the same, so that
    tiles of a part compute what those of the whole would.
    """

    config: KernelConfig
    workers: int
    symbols: Mapping[str, int]
    part: MicroBatch | None = None

    @property
    def batch(self) -> int:
        """Sequences of the whole batch."""
        return self.symbols[BATCH.name]

    @property
    def sequences(self) -> int:
        """Sequences that are cut."""
        return self.part.size if self.part else self.batch

    @property
    def token_tiles(self) -> int:
        """Tiles along the whole batch."""
        return -(-self.batch // self.config.tokens)

    def along_batch(self, axis: int, size: int) -> Span:
        """Tiles of `size` sequences, side by side along `axis`, over the sequences that are cut."""
        if self.part is None:
            return Span.tiles(axis, size)
        return Span(axis, size, size, self.part.start, self.part.stop)

    def shape(self, op: Operator, role: str) -> tuple[int, ...]:
        """The bound shape of the tensor that plays `role` in an operator."""
        return op.tensor(role).bind(self.symbols)


@dataclass(frozen=True)
class Tile:
    """One tile on a model's buffers, to be computed in torch.

    Arithmetic is in float32; what is written is rounded to the dtype of its buffer, as in the kernel.

    Attributes:
        op, tiled: the operator, and how it is cut.
        at: the grid point; missing axes are 0.
        step: of the launch, from 0.
        config: what the kernel is compiled with.
        buffers: all tensors by name; those of a part of the batch are whole.
        written: the names and places of what was written so far.
    """

    op: Operator
    tiled: TiledOperator
    at: tuple[int, int, int]
    step: int
    config: KernelConfig
    buffers: Buffers
    written: list[tuple[str, Place]] = field(default_factory=list)

    @property
    def sequence(self) -> int:
        """Number in the batch of the sequence of a tile whose first axis runs over sequences."""
        return self.at[0] + (self.tiled.part.start if self.tiled.part else 0)

    def buffer(self, role: str) -> torch.Tensor:
        """The whole tensor that plays `role` in the operator."""
        return self.buffers[self.op.tensor(role).name]

    def read(self, role: str) -> torch.Tensor:
        """What the tile reads of a tensor according to its region; floating-point numbers as float32."""
        values = self.buffer(role)[self._region(self.tiled.reads, role)]
        return values.float() if values.is_floating_point() else values

    def write(self, role: str, values: torch.Tensor) -> None:
        """Write the tile's region of a tensor."""
        self.put(role, self._region(self.tiled.writes, role), values)

    def put(self, role: str, place: Place, values: torch.Tensor | int) -> None:
        """Write something of which the tiling declares no region: the cache, the workspace, the request's state."""
        self.buffer(role)[place] = values
        self.written.append((self.op.tensor(role).name, place))

    def _region(self, accesses: tuple[Access, ...], role: str) -> Place:
        name = self.op.tensor(role).name
        return next(access for access in accesses if access.tensor == name).at(self.at)


@dataclass(frozen=True)
class TaskKind:
    """One sort of tile task.

    Attributes:
        name: as operators name it.
        body: Triton function (row, c0, c1, c2, step, inputs, CONFIG): computes the tile at grid point
            (c0, c1, c2); it calls device.await_inputs(inputs) once, before it reads other tasks' results.
        tile: cuts an operator into tiles.
        fields: names of the fields of the operator's row, in order; at most ROW_WIDTH, without those of a routing.
        row: the value of each field: pointers, sizes, strides in elements.
        oracle: the same operator in torch: maps input tensors by role and attrs to output tensors by role.
        run_tile: computes one tile in torch, by means of the oracle; it does all that the body does to the buffers.
    """

    name: str
    body: Any
    tile: Callable[[Operator, Tiling], TiledOperator]
    fields: tuple[str, ...]
    row: Callable[[Operator, TiledOperator, Buffers], dict[str, int]]
    oracle: Callable[..., dict[str, torch.Tensor]]
    run_tile: Callable[[Tile], None]

    def cut(self, op: Operator, tiling: Tiling) -> TiledOperator:
        """`tile`, and the name of the part where only a part of the batch is cut."""
        tiled, part = self.tile(op, tiling), tiling.part
        name = op.name if part is None else f"{op.name}[{part.start}:{part.stop}]"
        return replace(tiled, name=name, source=op.name, part=part)

    def packed_row(self, op: Operator, tiled: TiledOperator, buffers: Buffers) -> list[int]:
        """The operator's row as ROW_WIDTH ints. Fields that `row` leaves out are 0 (a null pointer).

        The row of a part of the batch points at its first sequence in every tensor [B, ...].
        """
        if tiled.part is not None:
            tensors = (*op.inputs.values(), *op.outputs.values())
            first = tiled.part.start
            buffers = {**buffers, **{t.name: buffers[t.name][first:] for t in tensors if t.shape[:1] == (BATCH,)}}
        values = self.row(op, tiled, buffers)
        unknown = set(values) - set(self.fields)
        lists = [buffers[name].data_ptr() for name in tiled.routing.tensors] if tiled.routing else []
        assert len(lists) in (0, ROUTING_FIELDS)
        if unknown or len(self.fields) + len(lists) > ROW_WIDTH:
            raise PlanError(f"task kind {self.name}: fields {sorted(unknown)} unknown, {len(self.fields)} in all")
        row = [values.get(field, 0) for field in self.fields]
        return row + [0] * (ROW_WIDTH - len(row) - len(lists)) + lists
