"""What a plan is made for: how many workers a device holds."""

from dataclasses import dataclass

import torch

WORKERS_PER_SM = 2
SYSTEM_SHARED_MEMORY = 1024  # bytes of each program (CUDA programming guide, table of technical specifications)


@dataclass(frozen=True)
class Device:
    """What planning needs to know of a device.

    Attributes:
        workers: resident programs of the persistent kernel.
        tiling_workers: workers that the tile sizes are chosen for.
        shared_memory: bytes of shared memory of an SM that programs can have.
        interpreted: whether the kernel runs in Triton's interpreter.
    """

    workers: int
    tiling_workers: int
    shared_memory: int
    interpreted: bool

    @property
    def worker_shared_memory(self) -> int:
        """Bytes of shared memory of a worker: its part of an SM's, less what the system keeps of it."""
        return self.shared_memory // WORKERS_PER_SM - SYSTEM_SHARED_MEMORY


H200 = Device(workers=264, tiling_workers=264, shared_memory=228 * 1024, interpreted=False)
# The interpreter runs programs one after another, so there is one worker. Operators are still cut as if there
# were a few, so that tests see several tiles.
INTERPRETER = Device(workers=1, tiling_workers=2, shared_memory=0, interpreted=True)


def current_device(device: torch.device) -> Device:
    """The device that a model was put on."""
    if device.type == "cpu":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    workers = WORKERS_PER_SM * properties.multi_processor_count
    return Device(workers, workers, properties.shared_memory_per_multiprocessor, False)
