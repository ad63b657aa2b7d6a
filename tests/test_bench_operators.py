"""The benchmark of operators alone, on the CPU with small models."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
import operators
import pytest
import roofline
import torch
from benches import as_if_on_a_gpu, interpreter_only  # noqa: F401 (a fixture)
from checking import relative_error
from checkpoints import small_config, small_moe_config
from operator_chains import OWN, copies_for, copies_of, make_chain, operator_bytes, operators_of

from megaflow.models.geometry import Geometry, read_geometry
from megaflow.models.planner import make_plan, program_of
from megaflow.models.qwen3 import qwen3_graph
from megaflow.models.tiling import tiling
from megaflow.scheduler import find_schedule
from megaflow.target import H200, INTERPRETER

CPU = torch.device("cpu")
LINEARS = ["qkv", "o_proj", "gate_up", "down", "lm_head"]


def small(**changes: Any) -> Geometry:
    return read_geometry(small_config(num_hidden_layers=1, **changes))


def published(name: str) -> Geometry:
    return read_geometry(common.qwen3_config(name, num_hidden_layers=1))


def parts(model: Geometry, batch: int, contexts: list[int]) -> list[str]:
    return [op.name.split(".")[-1] for op in operators_of(model, batch, contexts)]


@interpreter_only
@pytest.mark.parametrize("batch", [1, 3])
def test_all_copies_in_the_kernel_and_in_torch_give_what_the_oracle_does(batch: int) -> None:
    model = small()
    cut = tiling(model, batch, INTERPRETER, "float32")
    for op in operators_of(model, batch, [70]):
        chain = make_chain(op, model, cut, 2, CPU)
        assert not torch.equal(*chain.expected), "the copies' weights, or keys and values, are their own"
        engine = chain.kernel("unfused")
        engine.run(2)
        for found, expected in zip(engine.output(), chain.expected, strict=True):
            assert relative_error(found, expected) < 1e-5, op.name
        for way in chain.ways.values():
            recorded = way.engine()
            recorded.run(2)
            for found, expected in zip(recorded.output(), way.expected, strict=True):
                assert found.dtype == torch.bfloat16 and 1e-4 < relative_error(found.float(), expected) < 1e-2, op.name
        assert list(chain.ways.values())[-1].expected is chain.expected or len(chain.ways) == 1


@interpreter_only
@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_whole_run_over_operators(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(operators, "qwen3_config", lambda _, **changes: small_config(**changes))
    monkeypatch.setattr(operators, "copies_for", lambda *_: 1)
    operators.main(["Qwen3-8B"], [1], [20, 70], ["static"], 1, 2, tmp_path / "found.json")
    printed = capsys.readouterr().out.splitlines()
    record = json.loads(printed[-1])
    assert (tmp_path / "found.json").read_text() == printed[-1] + "\n"
    rows = record["rows"]
    measured = [(row["case"]["operator"], row["case"]["context"]) for row in rows if row["engine"] == "megaflow static"]
    assert measured == [*((part, None) for part in LINEARS), ("attention", 20), ("attention", 70)]
    for row in rows:
        result = row["result"]
        assert len(result["repeats_us"]) == 2 and result["us"] == pytest.approx(sum(result["repeats_us"]) / 2)
        assert result["bytes_per_s"] == pytest.approx(row["case"]["bytes"] / (result["us"] / 1e6))
        if row["engine"] in ("torch linear", "torch sdpa"):
            assert row["ratio"] == 1
            alone_us = result["us"]
        assert row["ratio"] == pytest.approx(result["us"] / alone_us)
        if row["engine"].startswith("megaflow"):
            assert result["error"] < 1e-2 * row["bf16_error"]
    assert record["warnings"] == []
    assert any(line.startswith("    1  attention 70    megaflow static") for line in printed)


@interpreter_only
@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_what_no_tile_writes_in_the_timed_runs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    setting = operators.Setting([], [1], [20], ["static"], 1, 1)
    chain = make_chain(operators_of(model, 1, [20])[0], model, tiling(model, 1, INTERPRETER, "float32"), 1, CPU)
    engine = chain.kernel("static")
    engine.run(1)
    monkeypatch.setattr(engine, "run", lambda _: None)  # what was there before must not count
    found = operators.find(lambda: engine, setting, chain.expected, 1)
    case = operators.Case("m", 1, "qkv", None, 1, 1)
    assert operators.Row(case, "megaflow static", found, None, 1.0, 1e-3).warning is not None


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-4B", "Qwen3-8B"])
def test_bytes_of_the_operators_are_those_of_a_step(name: str) -> None:
    model = published(name)
    vectors = 4 * (3 * model.hidden + 2 * model.head_dim)
    embedding = 0 if model.tied else 8 * model.hidden * 2
    total = sum(operator_bytes(op, model, 8) for op in operators_of(model, 8, [512]))
    assert total == roofline.step_bytes(model, 8, 512, None) - vectors - embedding


def test_bytes_of_attention_are_those_of_its_context() -> None:
    model = published("Qwen3-8B")
    *linears, short, long = operators_of(model, 64, [512, 4096])
    assert operator_bytes(short, model, 64) == 64 * 512 * 2 * 8 * 128 * 2 == operator_bytes(long, model, 8)
    assert operator_bytes(linears[0], model, 64) == 6144 * 4096 * 2


def test_copies_are_more_than_four_times_the_l2_cache() -> None:
    for l2_bytes in (50 * 2**20, 126 * 2**20):
        for size in (1, 2**20, 6144 * 4096 * 2, l2_bytes, 4 * l2_bytes):
            assert copies_for(size, l2_bytes) * size > 4 * l2_bytes
        assert copies_for(10**9, l2_bytes) == 4


def test_experts_are_left_to_the_benchmark_of_sparse_layers() -> None:
    assert parts(small(), 1, [16, 32]) == [*LINEARS, "attention", "attention"]
    sparse = read_geometry(small_moe_config(num_hidden_layers=1))
    for batch in (1, 8):
        assert parts(sparse, batch, [16]) == ["qkv", "o_proj", "router", "lm_head", "attention"]


def test_copies_share_all_but_weights_keys_values_and_outputs() -> None:
    for op in operators_of(small(), 2, [64]):
        first, second = copies_of(op, 2).operators
        assert {role for role in op.inputs if first.inputs[role] != second.inputs[role]} == op.inputs.keys() & set(OWN)
        assert not set(first.outputs.values()) & set(second.outputs.values())
        assert first.attrs == second.attrs == op.attrs


@pytest.mark.parametrize("schedule", ["static", "unfused"])
@pytest.mark.parametrize("batch", [1, 64])
def test_chains_of_the_published_size_have_the_models_tiles_in_order(batch: int, schedule: str) -> None:
    model = published("Qwen3-8B")
    cut = tiling(model, batch, H200, "bfloat16")
    whole = {tiled.name: tiled for tiled in program_of(qwen3_graph(model, 512, batch), cut).operators}
    for op in operators_of(model, batch, [512]):
        plan = make_plan(copies_of(op, 3), cut, find_schedule(schedule), H200.workers)
        plan.verify()
        for tiled in plan.graph.operators:
            assert (tiled.grid, tiled.params) == (whole[op.name].grid, whole[op.name].params)


def test_warnings_about_operators_are_about_megaflow_alone() -> None:
    case = operators.Case("Qwen3-8B", 8, "attention", 512, 4, 100)
    result = operators.Result(1.0, (1.0,), 1.0, 0.02)
    row = operators.Row(case, "megaflow static", result, None, 1.0, 0.01)
    assert row.warning.startswith("Qwen3-8B, batch 8, attention 512, megaflow static: relative error 2.00e-02 is above")
    assert replace(row, bf16_error=0.02).warning is None
    assert replace(row, bf16_error=None).warning is not None
    assert replace(row, result=replace(result, error=float("nan"))).warning is not None
    assert replace(row, result=None, error="DeadlockError: why").warning.endswith("DeadlockError: why")
    assert replace(row, engine="torch sdpa").warning is None


def test_a_line_of_the_table_has_time_spread_rate_ratio_and_errors() -> None:
    case = operators.Case("Qwen3-8B", 8, "qkv", None, 4, 100)
    row = operators.Row(case, "megaflow static", operators.Result(12.34, (12.3, 13.0), 4e12, 0.01), None, 0.9, 0.02)
    line = " ".join(operators.row_line(row).split())
    assert line == "8 qkv megaflow static 12.3 12.3 to 13.0 4,000 0.90 1.00e-02 (bf16 2.00e-02)"
    assert operators.row_line(replace(row, result=None, error="OutOfMemoryError: why")).endswith("why")
