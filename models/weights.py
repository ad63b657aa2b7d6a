"""Reading a checkpoint into packed weights, tensor by tensor, with one copy on the device.

Which checkpoint tensors go into which fused one is told by a table (weight_table). Fused rows are ordered for
the tasks that read them: qkv by KV head (its query heads, its key, its value), gate and up rows alternating.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from megaflow.errors import CheckpointError
from megaflow.models.geometry import Geometry
from megaflow.tasks.packing import PackedWeight

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Target:
    """Where a checkpoint tensor goes: a matrix into rows of a fused weight, or a vector (rows is None)."""

    name: str
    shape: tuple[int, ...]
    rows: torch.Tensor | None


@dataclass(frozen=True)
class Weights:
    """Everything of a checkpoint on the device: packed matrices and float32 vectors, by name."""

    matrices: Mapping[str, PackedWeight]
    vectors: Mapping[str, torch.Tensor]

    def buffers(self) -> dict[str, torch.Tensor]:
        """The device tensors by the names that the graph uses."""
        return {name: weight.data for name, weight in self.matrices.items()} | dict(self.vectors)


def weight_table(model: Geometry) -> dict[str, Target]:
    """Checkpoint name -> target, for all tensors of a Qwen3 dense checkpoint."""
    head = torch.arange(model.head_dim)
    per_group = (model.group + 2) * model.head_dim
    groups = torch.arange(model.kv_heads)[:, None] * per_group

    def head_rows(place: torch.Tensor) -> torch.Tensor:
        return (groups[:, :, None] + place[None, :, None] * model.head_dim + head).reshape(-1)

    hidden, middle = model.hidden, model.intermediate
    table = {
        "model.embed_tokens.weight": Target("embedding", (model.vocab, hidden), torch.arange(model.vocab)),
        "model.norm.weight": Target("final_norm", (hidden,), None),
    }
    if not model.tied:
        table["lm_head.weight"] = Target("lm_head", (model.vocab, hidden), torch.arange(model.vocab))
    q_rows = head_rows(torch.arange(model.group))
    k_rows = head_rows(torch.tensor([model.group]))
    v_rows = head_rows(torch.tensor([model.group + 1]))
    kv_shape = (model.kv_heads * model.head_dim, hidden)
    for i in range(model.layers):
        layer = {
            "input_layernorm": Target("attn_norm", (hidden,), None),
            "self_attn.q_proj": Target("qkv", (model.attention_width, hidden), q_rows),
            "self_attn.k_proj": Target("qkv", kv_shape, k_rows),
            "self_attn.v_proj": Target("qkv", kv_shape, v_rows),
            "self_attn.q_norm": Target("q_norm", (model.head_dim,), None),
            "self_attn.k_norm": Target("k_norm", (model.head_dim,), None),
            "self_attn.o_proj": Target("o_proj", (hidden, model.attention_width), torch.arange(hidden)),
            "post_attention_layernorm": Target("mlp_norm", (hidden,), None),
            "mlp.gate_proj": Target("gate_up", (middle, hidden), 2 * torch.arange(middle)),
            "mlp.up_proj": Target("gate_up", (middle, hidden), 2 * torch.arange(middle) + 1),
            "mlp.down_proj": Target("down", (hidden, middle), torch.arange(hidden)),
        }
        for part, target in layer.items():
            name = f"layers.{i}.{target.name}"
            table[f"model.layers.{i}.{part}.weight"] = Target(name, target.shape, target.rows)
    return table


def checkpoint_files(source: str | Path) -> list[Path]:
    """The safetensors files of a local directory or hub id, all present.

    Raises:
        CheckpointError: if there are none or one that the index names is missing.
    """
    directory = Path(source)
    if not directory.is_dir():
        try:
            directory = Path(huggingface_hub.snapshot_download(str(source), allow_patterns=["*.safetensors", "*.json"]))
        except (OSError, ValueError, HfHubHTTPError) as error:
            raise CheckpointError(f"{source} is no directory and cannot be downloaded ({error})") from error
    if (directory / INDEX).exists():
        try:
            names = sorted(set(json.loads((directory / INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{directory / INDEX} is no index of shards ({error!r}); copy it again") from error
    else:
        names = [SINGLE]
    for name in names:
        if not (directory / name).exists():
            raise CheckpointError(
                f"{directory}: {name} is missing ({len(names)} file{'s' * (len(names) > 1)} needed); "
                "copy the whole checkpoint, in safetensors format"
            )
    return [directory / name for name in names]


def read_files(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor (on the CPU) of everything in the files."""
    for path in files:
        try:
            with safe_open(path, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 (safe_open is no mapping)
                    yield name, shard.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); copy the file again") from error


def load_weights(
    source: str | Path | Any, model: Geometry, dtype: torch.dtype, device: torch.device, progress: bool
) -> Weights:
    """Stream a checkpoint to the device.

    Args:
        source: a local directory, a hub id, or a transformers model in memory.
        dtype: of the packed matrices; vectors become float32.
        progress: whether to show a progress bar.
    Raises:
        CheckpointError: for a missing file or tensor, a tensor of the wrong shape, or one that has no place.
    """
    if hasattr(source, "state_dict"):
        tensors: Iterator[tuple[str, torch.Tensor]] = iter(source.state_dict().items())
    else:
        tensors = read_files(checkpoint_files(source))
    table = weight_table(model)
    matrices: dict[str, PackedWeight] = {}
    vectors: dict[str, torch.Tensor] = {}
    fused_rows: dict[str, int] = {}
    for target in table.values():
        if target.rows is not None:
            fused_rows[target.name] = fused_rows.get(target.name, 0) + target.shape[0]
    missing = set(table)
    with tqdm(total=len(table), desc="weights", unit="tensor", disable=not progress) as bar:
        for name, tensor in tensors:
            if name == "lm_head.weight" and model.tied:
                continue
            if name not in table:
                raise CheckpointError(f"tensor {name} has no place in a Qwen3 dense model; is it the right checkpoint?")
            target = table[name]
            if tuple(tensor.shape) != target.shape:
                raise CheckpointError(
                    f"tensor {name} has shape {list(tensor.shape)}, but the configuration asks for "
                    f"{list(target.shape)}; config.json and the weights are not of the same model"
                )
            if target.rows is None:
                vectors[target.name] = tensor.to(device, torch.float32, copy=True)
            else:
                if target.name not in matrices:
                    shape = (fused_rows[target.name], target.shape[1])
                    matrices[target.name] = PackedWeight.empty(*shape, dtype, device)
                matrices[target.name].write_rows(target.rows, tensor)
            missing.discard(name)
            bar.update()
    if missing:
        raise CheckpointError(f"{len(missing)} tensors are missing, the first is {min(missing)}; copy all shards")
    return Weights(matrices, vectors)
