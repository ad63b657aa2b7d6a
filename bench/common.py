"""What the benchmarks share: real geometries with random weights, timing, and a record of where it ran."""

import gc
import json
import os
import platform
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
import triton
import typer
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

Qwen3 = Qwen3ForCausalLM | Qwen3MoeForCausalLM
T = TypeVar("T")

# hidden, intermediate, layers, heads, KV heads, tied embeddings; head_dim 128 and vocabulary 151936 in all
GEOMETRIES = {
    "Qwen3-0.6B": (1024, 3072, 28, 16, 8, True),
    "Qwen3-4B": (2560, 9728, 36, 32, 8, True),
    "Qwen3-8B": (4096, 12288, 36, 32, 8, False),
    "Qwen3-30B-A3B": (2048, 6144, 48, 32, 4, False),
}
EXPERTS = {"Qwen3-30B-A3B": (128, 8, 768)}  # experts of a layer, of a token; width of each


def qwen3_config(name: str, **changes: Any) -> Qwen3Config | Qwen3MoeConfig:
    """The configuration of a published Qwen3 model, without an eos token; `changes` are fields of it."""
    hidden, intermediate, layers, heads, kv_heads, tied = GEOMETRIES[name]
    fields = {
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "eos_token_id": None,
        "pad_token_id": 0,
        **changes,
    }
    if name not in EXPERTS:
        return Qwen3Config(**fields)
    count, per_token, width = EXPERTS[name]
    return Qwen3MoeConfig(
        **fields,
        num_experts=count,
        num_experts_per_tok=per_token,
        moe_intermediate_size=width,
        norm_topk_prob=True,
    )


def random_model(name: str, seed: int = 0, **changes: Any) -> Qwen3:
    """A transformers model of that geometry, but for `changes`, with random bfloat16 weights, made on the GPU."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            kind = Qwen3MoeForCausalLM if name in EXPERTS else Qwen3ForCausalLM
            model = kind(qwen3_config(name, **changes)).eval()
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    return model


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(run: Callable[[], T]) -> tuple[float, T]:
    """Wall-clock seconds of `run`, synchronised, and what it returned."""
    synchronize()
    start = time.perf_counter()
    result = run()
    synchronize()
    return time.perf_counter() - start, result


def release() -> None:
    """Give back what was held: compiled code, CUDA graphs, memory."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def attempt(run: Callable[[], T]) -> tuple[T | None, str | None]:
    """What `run` returned, or in a line why it failed. The traceback is printed, but for a module that is missing."""
    try:
        return run(), None
    except ModuleNotFoundError as missing:
        return None, f"{missing.name} is not installed"
    except Exception as failure:
        traceback.print_exc()
        return None, f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0]}"


def copy_bandwidth() -> float:
    """Bytes per second of a large device-to-device copy, read and written bytes counted; the median of 5."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.numel() / statistics.median(seconds(lambda: target.copy_(source))[0] for _ in range(5))


def l2_bytes() -> int:
    """Bytes that the L2 cache holds."""
    return torch.cuda.get_device_properties().L2_cache_size


def refuse_unknown(option: str, names: list[str], known: Mapping[str, object]) -> None:
    """Raises typer.BadParameter for a name that is not known."""
    for name in names:
        if name not in known:
            message = f"{name!r} is unknown; choose among {', '.join(known)}"
            raise typer.BadParameter(message, param_hint=option)


def begin() -> dict[str, Any]:
    """Print where a benchmark runs, and return it: the beginning of its record. Raises typer.Exit without a GPU."""
    if not torch.cuda.is_available():
        typer.echo("error: no CUDA device was found; this benchmark needs one", err=True)
        raise typer.Exit(2)
    torch.set_float32_matmul_precision("highest")  # no TF32 in the reference
    facts = environment()
    cached = any(Path(triton.knobs.cache.dir).glob("*"))
    bandwidth, cache = copy_bandwidth(), l2_bytes()
    torch.cuda.empty_cache()
    for fact, value in facts.items():
        typer.echo(f"{fact:<14} {value}")
    typer.echo(f"{'copy bandwidth':<14} {bandwidth / 1e12:.3f} TB/s")
    typer.echo(f"{'L2 cache':<14} {cache / 2**20:.0f} MiB")
    typer.echo(f"{'Triton cache':<14} {'in use' if cached else 'empty'} at the start")
    return {"environment": facts, "copy_bytes_per_s": bandwidth, "l2_bytes": cache, "kernels_cached_at_start": cached}


def end(record: dict[str, Any], warnings: list[str], json_file: Path | None) -> None:
    """Print the warnings, then the record with them as JSON, which goes to the file too.

    Raises:
        typer.Exit: with code 1 if there are warnings.
    """
    for warning in warnings:
        typer.echo(f"warning: {warning}")
    line = json.dumps(record | {"warnings": warnings})
    if json_file is not None:
        json_file.write_text(line + "\n")
    typer.echo(line)
    if warnings:
        raise typer.Exit(1)


def commit() -> str:
    """The commit of this checkout, or what MEGAFLOW_COMMIT says; "unknown" where there is no git to ask."""
    if given := os.environ.get("MEGAFLOW_COMMIT"):
        return given
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def environment() -> dict[str, Any]:
    """Device, versions and commit, for the record."""
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": commit(),
    }
