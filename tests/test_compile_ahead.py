"""Before the first step all kernels are compiled that later ones can need; another process finds them on the disk."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import small_model, small_moe_model

from megaflow import MegaModel
from megaflow.kinds import KernelConfig
from megaflow.scheduler import Auto, Dynamic, Static

# of each token tile the fewest and the most, one token and the largest batch among them; one needs no experts' lists
BATCHES = (1, 20, 2, 8, 9, 16, 17)


@pytest.mark.parametrize(("model", "schedule", "kernels"), [("dense", "static", 3), ("experts", "dynamic", 4)])
def test_only_the_first_step_compiles_and_in_a_second_process_none_does(
    tmp_path: Path, model: str, schedule: str, kernels: int
):
    command = [sys.executable, str(Path(__file__).parent / "no_device.py"), model, schedule, *map(str, BATCHES)]
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}

    def steps() -> list[dict[str, int]]:
        run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
        assert run.returncode == 0, run.stderr[-2000:]
        return [json.loads(line) for line in run.stdout.splitlines()]

    later = [{"launched": 1}] * (len(BATCHES) - 1)
    assert steps() == [{"launched": 1, "compiled": kernels, "loaded": kernels}, *later]
    assert steps() == [{"launched": 1, "read": kernels, "loaded": kernels}, *later]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Token tile and mode of each kernel that a decoder has asked for."""
    found: list[tuple[int, str]] = []

    def ask(_bodies: object, config: KernelConfig, mode: str) -> None:
        found.append((config.tokens, mode))

    monkeypatch.setattr("megaflow.models.decoder.compile_ahead", ask)
    return found


def kernels(mode: str, *tiles: int) -> list[tuple[int, str]]:
    return [(tile, mode) for tile in tiles]


@pytest.mark.interpreter
def test_tiles_of_larger_batches_than_the_largest_are_left_out(compiled: list[tuple[int, str]]):
    model = MegaModel.from_hf(small_model(num_hidden_layers=1), max_batch_size=2, max_seq_len=32, progress=False)
    model.generate([[5]], 2)
    assert compiled == kernels("static", 1, 16)
    model.generate([[5], [7, 8]], 2)
    assert compiled == kernels("static", 1, 16)
    model.set_schedule("dynamic")
    model.generate([[5]], 2)
    assert compiled == kernels("static", 1, 16) + kernels("dynamic", 1, 16)


@pytest.mark.interpreter
def test_a_graph_of_one_token_creates_no_tasks(compiled: list[tuple[int, str]]):
    source = small_moe_model(num_hidden_layers=1)
    model = MegaModel.from_hf(source, schedule="dynamic", max_batch_size=20, max_seq_len=32, progress=False)
    model.generate([[5]], 2)
    assert compiled == kernels("dynamic", 1) + kernels("creating", 8, 16, 32)


@pytest.mark.interpreter
@pytest.mark.parametrize("tune", [False, True])
def test_a_schedule_that_chooses_can_choose_otherwise_for_another_batch(
    compiled: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tune: bool
):
    monkeypatch.setattr("megaflow.models.decoder.Decoder._seconds_of_step", lambda *_: 1.0)
    source = small_model(num_hidden_layers=1)
    auto = Auto(tune=tune, candidates=(Static(), Dynamic()), file=tmp_path / "tuning.json")
    for _ in range(2):  # the second time a tuned choice is remembered
        compiled.clear()
        MegaModel.from_hf(source, schedule=auto, max_seq_len=32, progress=False).generate([[5]], 2)
        assert sorted(compiled) == kernels("dynamic", 1) + kernels("static", 1)
