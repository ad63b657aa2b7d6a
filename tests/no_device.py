"""A program that decodes on a GPU that is not there, and says what Triton compiles for it.

    TRITON_INTERPRET=0 python tests/no_device.py dense|experts SCHEDULE BATCH ...

Kernels are compiled for an H200; launches do nothing. For each batch size, in turn, it prints as JSON how many kernels
were launched, compiled, read from Triton's cache, and loaded.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from checkpoints import small_model, small_moe_model

from megaflow.backend import triton
from megaflow.models.decoder import Decoder
from megaflow.models.geometry import read_geometry
from megaflow.models.kv_cache import PagedKVCache
from megaflow.models.mega_model import rotary_tables
from megaflow.models.weights import load_weights
from megaflow.scheduler import find_schedule
from megaflow.target import H200

CPU, DTYPE = torch.device("cpu"), torch.bfloat16
POSITIONS = 64


class NoDevice:
    """As much of a Triton driver as launches need."""

    def __init__(self, count: Counter[str]) -> None:
        self._count = count
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": 227 * 1024},
            load_binary=lambda *_: (object(), object(), 0, 0, 1024),
        )

    def get_current_target(self) -> Any:
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def launcher_cls(self, _source: Any, _metadata: Any) -> Callable[..., None]:
        self._count.update(["loaded"])
        return lambda *_: self._count.update(["launched"])


def new_decoder(model: str, max_batch_size: int) -> Decoder:
    """A decoder of one layer with random weights."""
    hf = {"dense": small_model, "experts": small_moe_model}[model](num_hidden_layers=1)
    geometry = read_geometry(hf.config)
    weights = load_weights(hf, geometry, DTYPE, CPU, progress=False)
    cache = PagedKVCache(geometry, max_batch_size, POSITIONS, 16, DTYPE, CPU)
    tables = rotary_tables(hf.config, POSITIONS, CPU)
    device = replace(H200, workers=8, tiling_workers=8)
    return Decoder(geometry, weights, cache, *tables, device, max_batch_size, steps_per_launch=1)


def main(model: str, schedule: str, batches: list[int]) -> None:
    count: Counter[str] = Counter()
    triton.runtime.driver.set_active(NoDevice(count))
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: count.update(["read" if cache_hit else "compiled"])
    decoder = new_decoder(model, max(batches))
    for batch in batches:
        count.clear()
        decoder.start([1] * batch)
        decoder.run(torch.zeros(batch, dtype=torch.int64), 1, find_schedule(schedule))
        print(json.dumps(count), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3], [int(batch) for batch in sys.argv[3:]])
