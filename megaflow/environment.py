"""What this installation is and what it would run on: the facts that a bug report needs."""

import platform
from dataclasses import dataclass
from importlib.metadata import version

import torch

import megaflow
from megaflow.backend import interpreted, kernel_device
from megaflow.errors import BackendError
from megaflow.target import current_device


@dataclass(frozen=True)
class Environment:
    """Versions, the GPU and what decodes.

    Attributes:
        megaflow, python, torch, triton, transformers, numpy: versions.
        device: name of the current CUDA device, None without one.
        multiprocessors: its number of SMs; memory_bytes: its memory. None without a device.
        runs: what decodes here, in words.
        workers: resident programs of the persistent kernel, 0 where it cannot run.
    """

    megaflow: str
    python: str
    torch: str
    triton: str
    transformers: str
    numpy: str
    device: str | None
    multiprocessors: int | None
    memory_bytes: int | None
    runs: str
    workers: int


def current_environment() -> Environment:
    """The facts of this process. Raises nothing: a kernel that cannot run is one of the facts."""
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device()) if torch.cuda.is_available() else None
    try:
        workers = current_device(kernel_device()).workers
        what = "Triton's interpreter on the CPU" if interpreted() else "persistent kernel"
        runs = f"{what}, {workers} worker{'s' * (workers != 1)}"
    except BackendError as error:
        workers = 0
        runs = f"nothing: {error}"
    return Environment(
        megaflow=megaflow.__version__,
        python=platform.python_version(),
        # not imported for their versions: transformers alone takes seconds
        torch=version("torch"),
        triton=version("triton"),
        transformers=version("transformers"),
        numpy=version("numpy"),
        device=gpu.name if gpu else None,
        multiprocessors=gpu.multi_processor_count if gpu else None,
        memory_bytes=gpu.total_memory if gpu else None,
        runs=runs,
        workers=workers,
    )
