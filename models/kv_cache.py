"""The paged KV cache: fixed-size pages from one pool, found through a block table."""

import torch

from megaflow.errors import CapacityError, ConfigError
from megaflow.models.geometry import Geometry


class PagedKVCache:
    """Keys and values of up to `max_batch_size` sequences of up to `max_seq_len` tokens.

    Attributes:
        keys, values: by layer, [pages, kv_heads, page_size, head_dim].
        block_table: int32 [max_batch_size, pages of a sequence]: the page of each run of page_size positions.

    Raises:
        ConfigError: if page_size is not a power of two of at least 16.
    """

    def __init__(
        self,
        model: Geometry,
        max_batch_size: int,
        max_seq_len: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if page_size < 16 or page_size & (page_size - 1):
            raise ConfigError(f"page_size is {page_size}; it must be a power of two of at least 16, such as 64")
        self.page_size = page_size
        self.max_seq_len = max_seq_len
        pages_each = -(-max_seq_len // page_size)
        pages = max_batch_size * pages_each
        shape = (model.layers, pages, model.kv_heads, page_size, model.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device).unbind(0)
        self.values = torch.zeros(shape, dtype=dtype, device=device).unbind(0)
        self.block_table = torch.zeros((max_batch_size, pages_each), dtype=torch.int32, device=device)
        self._free = list(range(pages))
        self._pages: list[list[int]] = [[] for _ in range(max_batch_size)]

    def reserve(self, sequence: int, length: int) -> None:
        """Make room for `length` positions of a sequence. Raises CapacityError beyond max_seq_len."""
        if length > self.max_seq_len:
            raise CapacityError(
                f"sequence {sequence} needs {length} positions, max_seq_len is {self.max_seq_len}; "
                "create the model with a larger max_seq_len"
            )
        own = self._pages[sequence]
        first_new = len(own)
        while len(own) * self.page_size < length:
            own.append(self._free.pop())
        if len(own) > first_new:
            new = torch.tensor(own[first_new:], dtype=torch.int32)
            self.block_table[sequence, first_new : len(own)] = new.to(self.block_table.device)

    def release_all(self) -> None:
        """Give all pages back."""
        for own in self._pages:
            self._free.extend(own)
            own.clear()

    def write(self, layer: int, sequence: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store positions 0 to n of a sequence: keys and values are [n, kv_heads, head_dim]."""
        positions = torch.arange(keys.shape[0], device=keys.device)
        page = self.block_table[sequence, positions // self.page_size].long()
        self.keys[layer][page, :, positions % self.page_size] = keys.to(self.keys[layer].dtype)
        self.values[layer][page, :, positions % self.page_size] = values.to(self.values[layer].dtype)
