"""The benchmark of cold and warm start: its parts on the CPU, and what it says of starts that are wrong."""

import json
import subprocess
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import first_token
import pytest
import start
import typer
from benches import as_if_on_a_gpu, interpreter_only  # noqa: F401 (a fixture)
from checkpoints import small_model

GOOD = first_token.Start(
    packing_s=9.0, prefill_s=0.5, compile_s=1.0, planning_s=0.25, step_s=0.25, first_token_s=2.0, compiled=0, read=3,
    later_s={"2": 0.5, "16": 0.75}, compiled_later=0,
)  # fmt: skip
SETTING = start.Setting(["Qwen3-0.6B"], ["static"], 16, 8, timeout_s=60)


@pytest.mark.parametrize(
    ("largest", "batches"),
    [(1, []), (2, [2]), (16, [2, 16]), (20, [2, 16, 17, 20]), (64, [2, 16, 17, 64]), (128, [2, 16, 17, 64, 65, 128])],
)
def test_later_steps_have_the_first_and_the_last_batch_size_of_each_kernel(largest: int, batches: list[int]) -> None:
    assert first_token.edges((1, 16, 64), largest) == batches


@interpreter_only
def test_the_parts_of_a_start_are_timed() -> None:
    found = first_token.start(small_model(num_hidden_layers=1), "static", max_batch=2, prompt=4)
    assert min(found.packing_s, found.prefill_s, found.planning_s, found.step_s) > 0
    parts = (found.prefill_s, found.compile_s, found.planning_s, found.step_s)
    assert found.first_token_s == pytest.approx(sum(parts))
    assert (found.compiled, found.read, found.compiled_later) == (0, 0, 0)  # interpreted
    assert found.later_s.keys() == {"2"}


def test_each_process_gets_the_setting_and_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], env: dict[str, str], timeout: int, **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[2:] == ["Qwen3-8B", "--schedule", "dynamic", "--max-batch", "16", "--prompt", "8"]
        assert env["TRITON_CACHE_DIR"] == "/caches/one" and timeout == 60
        return subprocess.CompletedProcess(command, 0, "weights\n" + json.dumps(asdict(GOOD)) + "\n")

    monkeypatch.setattr(subprocess, "run", run)
    assert start.in_new_process("Qwen3-8B", "dynamic", SETTING, "/caches/one") == GOOD


def test_a_process_that_fails_or_takes_too_long_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        start.in_new_process("no such model", "static", SETTING, str(tmp_path))
    with pytest.raises(subprocess.TimeoutExpired):
        start.in_new_process("Qwen3-0.6B", "static", replace(SETTING, timeout_s=0.1), str(tmp_path))


@pytest.mark.parametrize(
    ("cache", "changes", "warnings"),
    [
        ("cold", {"compiled": 3, "read": 0, "first_token_s": 60.0}, []),
        ("warm", {}, []),
        ("warm", {"compiled": 1}, ["1 kernels were compiled again"]),
        ("warm", {"first_token_s": 5.5}, ["5.50 s are more than 5"]),
        ("cold", {"compiled": 3, "compiled_later": 2}, ["2 kernels were compiled after the first token"]),
    ],
)
def test_warnings(cache: str, changes: dict[str, Any], warnings: list[str]) -> None:
    row = start.Row("Qwen3-8B", "static", cache, replace(GOOD, **changes), None)
    assert row.warnings == [f"Qwen3-8B, static, {cache}: {warning}" for warning in warnings]


@pytest.mark.usefixtures("as_if_on_a_gpu")
@pytest.mark.parametrize("fails", [False, True])
def test_whole_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, fails: bool
) -> None:
    caches: list[str] = []

    def in_new_process(_model: str, _schedule: str, _setting: start.Setting, cache: str) -> first_token.Start:
        assert Path(cache).is_dir()
        caches.append(cache)
        if len(caches) == 1:
            return replace(GOOD, compiled=3, read=0)
        if fails:
            raise subprocess.TimeoutExpired("start", 300)
        return GOOD

    monkeypatch.setattr(start, "in_new_process", in_new_process)
    with pytest.raises(typer.Exit) if fails else nullcontext() as stop:
        start.main(["Qwen3-8B"], ["static"], 64, 512, 300, tmp_path / "found.json")
    assert (stop.value.exit_code if stop else 0) == fails
    assert len(caches) == 2 and caches[0] == caches[1] and not Path(caches[0]).exists()
    printed = capsys.readouterr().out.splitlines()
    record = json.loads(printed[-1])
    assert (tmp_path / "found.json").read_text() == printed[-1] + "\n"
    cold, warm = record["starts"]
    assert (cold["cache"], warm["cache"]) == ("cold", "warm")
    assert cold["result"] == asdict(replace(GOOD, compiled=3, read=0))
    assert warm["result"] == (None if fails else asdict(GOOD))
    row = next(" ".join(line.split()) for line in printed if line.startswith("Qwen3-8B"))
    assert row == "Qwen3-8B static cold 9.000 0.500 1.000 0.250 0.250 2.000 0.750 3 0"
    assert any("failed: TimeoutExpired" in line for line in printed) == fails
    assert len(record["warnings"]) == fails
