"""What several task kinds share in their tiling and rows."""

from collections.abc import Callable

import torch

from megaflow.graph import Operator
from megaflow.kinds import Buffers, Tiling
from megaflow.regions import Access, Span

LINE = 32  # int32 in a 128-byte line, which each counter has to itself


def token_access(op: Operator, tiling: Tiling, role: str) -> Access:
    """The region of a tensor [B, ...] that the tile of one token touches: all of that token's row."""
    shape = tiling.shape(op, role)
    spans = (tiling.along_batch(0, 1), *(Span.whole(extent) for extent in shape[1:]))
    return Access(op.tensor(role).name, shape, spans)


def whole_access(op: Operator, tiling: Tiling, role: str) -> Access:
    """All of a tensor, which every tile touches."""
    shape = tiling.shape(op, role)
    return Access(op.tensor(role).name, shape, tuple(map(Span.whole, shape)))


def by_role(op: Operator, buffers: Buffers) -> Callable[[str], torch.Tensor]:
    """A function from a role in the operator to the tensor that plays it."""
    return lambda role: buffers[op.tensor(role).name]
