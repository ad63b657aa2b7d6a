"""The kernel compiles for three GPU generations on a machine without a GPU, and fits them."""

import json
import os
import subprocess
import sys

import pytest

from megaflow.compilation import SHARED_MEMORY
from megaflow.target import WORKERS_PER_SM

# compiled in a process of its own: this one may interpret
PROGRAM = """
import dataclasses, json, sys
from megaflow.compilation import compile_kernel
from megaflow.models.geometry import Experts, Geometry
from megaflow.models.tiling import kernel_config, token_tiles
from megaflow.target import H200
from megaflow.models.planner import bodies_of
from megaflow.models.qwen3 import qwen3_graph
models = {
    "narrow heads": Geometry(1, 4096, 12288, 32, 8, 64, 151936, False, 1e-6, 4096),
    "wide heads": Geometry(1, 4096, 12288, 32, 8, 128, 151936, False, 1e-6, 4096),
    "experts": Geometry(2, 2048, 6144, 32, 4, 128, 151936, False, 1e-6, 4096, Experts(128, 8, 768, True, (1,))),
    "experts, no QK-norm": Geometry(2, 2048, 5632, 16, 16, 128, 151936, False, 1e-6, 4096,
                                    Experts(60, 4, 1408, False, (1,), 5632), qk_norm=False, qkv_bias=True),
}
for name, model in models.items():
    sizes = token_tiles(model)
    whole = model.head_dim == 128 and model.qk_norm  # the variants have the largest tile only: the least room
    for tokens in sizes if whole else sizes[-1:]:
        bodies = bodies_of(qwen3_graph(model, 4096, tokens))
        capability, shared_memory = map(int, sys.argv[1:])
        config = kernel_config(model, tokens, dataclasses.replace(H200, shared_memory=shared_memory), "bfloat16")
        other = ("creating" if model.experts else "dynamic",) if whole and tokens == sizes[-1] else ()
        for mode in ("static", *other):
            resources, _ = compile_kernel(bodies, config, capability, mode=mode)
            print(json.dumps({"model": name, "tokens": tokens} | dataclasses.asdict(resources)))
"""

TRACING = """
import dataclasses, json
from megaflow.compilation import compile_kernel
from megaflow.models.geometry import Geometry
from megaflow.models.tiling import kernel_config
from megaflow.target import H200
from megaflow.models.planner import bodies_of
from megaflow.models.qwen3 import qwen3_graph
model = Geometry(1, 4096, 12288, 32, 8, 128, 151936, False, 1e-6, 4096)
bodies = bodies_of(qwen3_graph(model, 4096, 1))
config = kernel_config(model, 1, H200, "bfloat16")
for traced in (False, True):
    resources, ptx = compile_kernel(bodies, config, 90, traced=traced)
    timer = ptx.count("%globaltimer") - 2 * ptx.count("POLL:")  # a poll reads it before and in its loop
    print(json.dumps({"smid": ptx.count("%smid"), "timer": timer} | dataclasses.asdict(resources)))
"""


def compiled_by(program: str, *arguments: object) -> list[dict[str, int]]:
    """The JSON lines that a program prints."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_registers_hold_what_is_live_and_two_workers_fit_the_shared_memory_of_an_sm(capability):
    compiled = compiled_by(PROGRAM, capability, SHARED_MEMORY[capability] + 1024)
    assert len(compiled) == 11
    for resources in compiled:
        # the products of the largest token tiles need all registers, and some stack beside them
        assert resources["stack"] <= {32: 32, 64: 256}.get(resources["tokens"], 0), resources
        assert resources["registers"] <= 255, resources
        assert WORKERS_PER_SM * (resources["shared"] + 1024) <= SHARED_MEMORY[capability], resources


def test_only_a_traced_launch_reads_the_clock_and_the_sm_and_it_fits_too():
    untraced, traced = compiled_by(TRACING)
    assert (untraced["smid"], untraced["timer"]) == (0, 0)
    assert traced["smid"] == 1
    assert traced["timer"] > 0
    assert traced["stack"] == 0
    assert traced["shared"] == untraced["shared"]
