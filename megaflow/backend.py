"""Where kernels run: on a CUDA GPU, or in Triton's interpreter on the CPU.

`@triton.jit` compiles or interprets as TRITON_INTERPRET says when a function is decorated, Triton's own library
functions included. So this module, which every kernel module imports first, sets the variable where there is no
GPU; where somebody (transformers, for one) has imported Triton before, its library is decorated anew.
"""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from megaflow.errors import BackendError

if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"
    for _module in ("triton.language.standard", "triton.language"):
        if _module in sys.modules:
            importlib.reload(sys.modules[_module])

import triton
import triton.language as tl


def interpreted() -> bool:
    """Whether kernels defined in this process run in Triton's interpreter (one worker, on the CPU)."""
    return type(tl.sum).__name__ == "InterpretedFunction"


if interpreted():
    from triton.runtime.interpreter import InterpreterOptions, interpreter_builder

    # event counters wrap around by design, which the interpreter would report; it is also a third of its time
    interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)


def jit(function: Callable[..., Any]) -> Any:
    """A Triton function that other Triton functions call; launched kernels use triton.jit itself.

    In the interpreter a call through triton.jit patches Triton's language modules again each time, which costs
    more than most functions here do. The kernel has patched them already, so the rewritten function is enough.
    """
    decorated = triton.jit(function)
    return decorated.rewrite() if interpreted() else decorated


def kernel_device(device: str | torch.device | None = None) -> torch.device:
    """The device that kernels of this process run on; `device` must agree with it when it is given.

    Raises:
        BackendError: for a device that this process cannot launch kernels on.
    """
    if interpreted():
        default = torch.device("cpu")
    elif torch.cuda.is_available():
        default = torch.device("cuda", torch.cuda.current_device())
    else:
        raise BackendError(
            f"no CUDA device was found, and TRITON_INTERPRET is {os.environ.get('TRITON_INTERPRET')!r}; "
            "unset it, or set it to 1, before Python starts"
        )
    if device is None:
        return default
    device = torch.device(device)
    if device.type != default.type:
        raise BackendError(
            f"device {device} was asked for, but kernels in this process run on {default}; "
            f"{'unset TRITON_INTERPRET' if interpreted() else 'set TRITON_INTERPRET=1'} before Python starts"
        )
    return default if device.index is None else device


__all__ = ["interpreted", "jit", "kernel_device", "tl", "triton"]
