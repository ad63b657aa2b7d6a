"""What a plan is made for: how many workers a device holds."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    """What planning needs to know of a device.

    Attributes:
        workers: resident programs of the persistent kernel.
        tiling_workers: workers that the tile sizes are chosen for.
        interpreted: whether the kernel runs in Triton's interpreter.
    """

    workers: int
    tiling_workers: int
    interpreted: bool


H200 = Device(workers=264, tiling_workers=264, interpreted=False)
# The interpreter runs programs one after another, so there is one worker. Operators are still cut as if there
# were a few, so that tests see several tiles.
INTERPRETER = Device(workers=1, tiling_workers=2, interpreted=True)
WORKERS_PER_SM = 2


def current_device(device: torch.device) -> Device:
    """The device that a model was put on."""
    if device.type == "cpu":
        return INTERPRETER
    workers = WORKERS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
    return Device(workers, workers, False)
