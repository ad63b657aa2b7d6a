"""The packed weight layout."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megaflow.tasks.packing import BLOCK, PackedWeight, pack


@given(st.integers(1, 200), st.integers(1, 200))
def test_unpack_gives_back_what_was_packed_and_padding_is_zero(rows, columns):
    matrix = torch.randn(rows, columns)
    packed = pack(matrix)
    assert torch.equal(packed.unpack(), matrix)
    assert packed.data.abs().sum().item() == pytest.approx(matrix.abs().sum().item(), rel=1e-4)


@given(st.integers(65, 200), st.data())
def test_rows_can_be_read_in_parts_and_one_by_one(rows, data):
    matrix = torch.randn(rows, 70)
    packed = pack(matrix)
    assert torch.equal(packed.unpack(BLOCK, 2 * BLOCK), matrix[BLOCK : 2 * BLOCK])
    index = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=5)))
    assert torch.equal(packed.gather_rows(index), matrix[index])


def test_rows_can_be_written_in_any_order():
    matrix = torch.randn(96, 80)
    packed = PackedWeight.empty(96, 80, torch.float32, torch.device("cpu"))
    order = torch.randperm(96)
    packed.write_rows(order[:40], matrix[order[:40]])
    packed.write_rows(order[40:], matrix[order[40:]])
    assert torch.equal(packed.unpack(), matrix)


def test_a_block_is_contiguous_and_its_row_is_a_line():
    matrix = torch.arange(128 * 128, dtype=torch.float32).view(128, 128)
    flat = pack(matrix).data.flatten()
    row, column = 70, 65  # row block 1, column block 1, row 6, column 1 of the block
    assert flat[(1 * 2 + 1) * BLOCK * BLOCK + 6 * BLOCK + 1] == matrix[row, column]
