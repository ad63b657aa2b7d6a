"""Compiling the persistent kernel for a GPU that need not be there, and what the compiler says of it."""

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megaflow.backend import interpreted, triton
from megaflow.errors import BackendError
from megaflow.kernel import fingerprint, megakernel
from megaflow.kinds import ROW_WIDTH, KernelConfig
from megaflow.runtime import COMPILE_OPTIONS

# bytes of shared memory that one program may use, by compute capability (CUDA programming guide, table of limits)
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}

Mode = Literal["static", "dynamic", "creating"]


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
    scalars = {"n_tasks", "n_initial", "final_event", "steps", "n_queues"}
    types = {name: "i32" for name in scalars} | {"timeout_ns": "i64", "table": "*i64", "stamps": "*i64"}
    constants = {"ROW": ROW_WIDTH, "BODIES": tuple(bodies), "CONFIG": config, "FINGERPRINT": fingerprint(bodies)}
    if not traced:
        constants["stamps"] = None
    constants["DYNAMIC"] = mode != "static"
    if mode != "creating":
        constants["bounds"] = None
    signature = {name: "constexpr" if name in constants else types.get(name, "*i32") for name in names}
    source = triton.compiler.ASTSource(
        fn=megakernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")},
    )
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=COMPILE_OPTIONS)
    registers, stack = read_cubin(compiled.asm["cubin"])
    return Resources(registers, stack, compiled.metadata.shared), compiled.asm["ptx"]


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
