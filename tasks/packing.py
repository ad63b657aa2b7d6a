"""The one layout of weights on the device: 64-row by 64-column blocks, each contiguous.

A matrix [rows, columns] (torch's Linear layout) becomes data[rows / 64, columns / 64, 64, 64], zero-padded to
whole blocks. A row of a block is one full 128-byte line in bfloat16, the blocks along a row of blocks are
contiguous (four of them are a 32 KB run), and a [64, 64] block is a tensor-core left operand. The persistent
kernel, the embedding look-up and prefill all read this one copy.
"""

from dataclasses import dataclass

import torch

BLOCK = 64


def blocks(extent: int) -> int:
    """Number of blocks that cover `extent` rows or columns."""
    return -(-extent // BLOCK)


def padded(extent: int) -> int:
    """`extent` rounded up to whole blocks."""
    return blocks(extent) * BLOCK


@dataclass(frozen=True)
class PackedWeight:
    """A packed matrix; `data` is [row blocks, column blocks, 64, 64]."""

    data: torch.Tensor
    rows: int
    columns: int

    @staticmethod
    def empty(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> "PackedWeight":
        """A packed matrix of zeros, to be filled with write_rows."""
        shape = (blocks(rows), blocks(columns), BLOCK, BLOCK)
        return PackedWeight(torch.zeros(shape, dtype=dtype, device=device), rows, columns)

    def _by_row(self) -> torch.Tensor:
        return self.data.permute(0, 2, 1, 3)  # [row block, row, column block, column]

    def write_rows(self, index: torch.Tensor, matrix: torch.Tensor) -> None:
        """Put matrix [n, columns] at rows `index` (int64 [n])."""
        matrix = matrix.to(self.data.device, self.data.dtype)
        matrix = torch.nn.functional.pad(matrix, (0, padded(self.columns) - self.columns))
        index = index.to(self.data.device)
        self._by_row()[index // BLOCK, index % BLOCK] = matrix.view(len(index), -1, BLOCK)

    def unpack(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows start to stop as an ordinary matrix [stop - start, columns]."""
        stop = self.rows if stop is None else min(stop, self.rows)
        part = self._by_row()[start // BLOCK : blocks(stop)].reshape(-1, padded(self.columns))
        return part[start % BLOCK : start % BLOCK + stop - start, : self.columns]

    def gather_rows(self, index: torch.Tensor) -> torch.Tensor:
        """Rows `index` (int64 [n]) as a matrix [n, columns]."""
        rows = self._by_row()[index // BLOCK, index % BLOCK]
        return rows.reshape(len(index), -1)[:, : self.columns]


def pack(matrix: torch.Tensor) -> PackedWeight:
    """Pack a matrix [rows, columns] on its own device and dtype."""
    packed = PackedWeight.empty(matrix.shape[0], matrix.shape[1], matrix.dtype, matrix.device)
    packed.write_rows(torch.arange(matrix.shape[0]), matrix)
    return packed
