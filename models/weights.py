"""Reading a checkpoint into packed weights, tensor by tensor, with one copy on the device."""

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
from megaflow.models.weighttable import fused_experts, weight_table
from megaflow.tasks.packing import PackedWeight

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Weights:
    """Everything of a checkpoint on the device: packed matrices and float32 vectors, by name."""

    matrices: Mapping[str, PackedWeight]
    vectors: Mapping[str, torch.Tensor]

    def buffers(self) -> dict[str, torch.Tensor]:
        """The device tensors by the names that the graph uses."""
        return {name: weight.data for name, weight in self.matrices.items()} | dict(self.vectors)


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
    required = weight_table(model)
    table = required | fused_experts(model)
    matrices: dict[str, PackedWeight] = {}
    vectors: dict[str, torch.Tensor] = {}
    heights: dict[str, int] = {}
    for target in table.values():
        heights[target.name] = max(heights.get(target.name, 0), target.end)
    missing = set(required)
    with tqdm(total=len(required), desc="weights", unit="tensor", disable=not progress) as bar:
        for name, tensor in tensors:
            if name == "lm_head.weight" and model.tied:
                continue
            if name not in table:
                raise CheckpointError(
                    f"tensor {name} has no place in a model of this configuration; is it the right checkpoint?"
                )
            target = table[name]
            if tuple(tensor.shape) != target.shape:
                raise CheckpointError(
                    f"tensor {name} has shape {list(tensor.shape)}, but the configuration asks for "
                    f"{list(target.shape)}; config.json and the weights are not of the same model"
                )
            rows, height = target.first + target.rows, heights[target.name]
            if len(target.shape) == 1:
                if target.name not in vectors:
                    vectors[target.name] = torch.zeros(height, dtype=torch.float32, device=device)
                vectors[target.name][rows.to(device)] = tensor.to(device, torch.float32)
            else:
                if target.name not in matrices:
                    matrices[target.name] = PackedWeight.empty(height, target.shape[-1], dtype, device)
                matrices[target.name].write_rows(rows, tensor.flatten(0, -2))
            missing.difference_update(target.instead_of or {name})
            bar.update(len(required) - len(missing) - bar.n)
    if missing:
        raise CheckpointError(f"{len(missing)} tensors are missing, the first is {min(missing)}; copy all shards")
    return Weights(matrices, vectors)
