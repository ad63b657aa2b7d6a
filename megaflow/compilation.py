"""Compiling the persistent kernel without a launch: ahead of one, or for a GPU that need not be there."""

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from megaflow.backend import interpreted, triton
from megaflow.errors import BackendError
from megaflow.kernel import megakernel
from megaflow.kinds import KernelConfig
from megaflow.runtime import COMPILE_OPTIONS, LAUNCH_OPTIONS, constants

# bytes of shared memory that one program may use, by compute capability (CUDA programming guide, table of limits)
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}

Mode = Literal["static", "dynamic", "creating"]

SCALARS = {"n_tasks", "n_initial", "final_event", "steps", "n_queues", "timeout_ns"}
OF_INT64 = {"table", "stamps"}  # other arrays are of int32


@dataclass(frozen=True)
class Resources:
    """Registers of a thread, bytes of its stack (spills live there), bytes of shared memory of a worker."""

    registers: int
    stack: int
    shared: int


def compile_kernel(
    bodies: Sequence[Any], config: KernelConfig, capability: int, *, traced: bool = False, mode: Mode = "static"
) -> tuple[Resources, str]:
    """Compile for compute capability 8.0 (80), 9.0 (90) or 10.0 (100); no GPU is needed.

    Args:
        traced: whether to compile the kernel that writes down when its tasks ran.
        mode: of the plans that it is for: dynamic, or creating tasks at run time too; static for all others.
    Returns:
        What the kernel needs, and its PTX.
    Raises:
        BackendError: in a process whose kernels are interpreted.
    """
    if interpreted():
        raise BackendError("kernels of this process are interpreted; set TRITON_INTERPRET=0 before Python starts")
    names = megakernel.arg_names
    types = {name: "i32" for name in SCALARS} | {name: "*i64" for name in OF_INT64}
    fixed = compiled_in(bodies, config, mode, traced)
    signature = {name: "constexpr" if name in fixed else types.get(name, "*i32") for name in names}
    source = triton.compiler.ASTSource(
        fn=megakernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")},
    )
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=COMPILE_OPTIONS)
    registers, stack = read_cubin(compiled.asm["cubin"])
    return Resources(registers, stack, compiled.metadata.shared), compiled.asm["ptx"]


def compile_ahead(bodies: Sequence[Any], config: KernelConfig, mode: Mode) -> None:
    """Compile and load the kernel that launches on the current device take (traced ones take another).

    Triton keeps it, in this process and on disk, from where it is read the next time. Nothing happens where kernels
    are interpreted.
    """
    if interpreted():
        return
    names = megakernel.arg_names
    numbers = {name: 1 for name in SCALARS}
    arrays = {name: torch.int64 if name in OF_INT64 else torch.int32 for name in names}  # a type stands for an array
    arguments = arrays | numbers | compiled_in(bodies, config, mode, traced=False)
    kernel = megakernel.warmup(*(arguments[name] for name in names), grid=(1,), **LAUNCH_OPTIONS)
    kernel[1,]  # loads it, with code for the host that triton 3.6 compiles for each combination of arguments


def compiled_in(bodies: Sequence[Any], config: KernelConfig, mode: Mode, traced: bool) -> dict[str, Any]:
    """The constants of a kernel, arrays that it does without among them."""
    unused = {"stamps": not traced, "bounds": mode != "creating"}
    return constants(bodies, config, mode != "static") | {name: None for name, is_unused in unused.items() if is_unused}


def read_cubin(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of the kernel in a cubin, by the cuobjdump that Triton carries."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert found, report
    return int(found[1]), int(found[2])
