"""The benchmark of sparse layers alone, on the CPU with small layers."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import common
import pytest
import sparse_engines
import sparse_layers
import torch
from benches import as_if_on_a_gpu, interpreter_only, uncompiled  # noqa: F401 (a fixture)
from checkpoints import small_moe_model
from transformers import Qwen3MoeForCausalLM

from megaflow.models.geometry import read_geometry
from megaflow.models.planner import make_plan
from megaflow.models.tiling import tiling
from megaflow.scheduler import find_schedule
from megaflow.target import H200


def layers_model(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Qwen3MoeForCausalLM:
    """Layers of which the benchmark takes the experts; transformers' embedding of token 0 would be zero."""
    model = small_moe_model(num_experts=8, norm_topk_prob=True, **changes).to(dtype)
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    return model


@interpreter_only
@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_whole_run_of_sparse_layers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sparse_layers, "random_model", lambda _, **changes: layers_model(**changes))
    with uncompiled():
        sparse_layers.main([3], 2, 1, 2, ["static"], tmp_path / "found.json")
    printed = capsys.readouterr().out.splitlines()
    record = json.loads(printed[-1])
    assert (tmp_path / "found.json").read_text() == printed[-1] + "\n"
    kernel, *others, fused = record["rows"]
    assert kernel["engine"] == "megaflow static" and kernel["result"]["error"] < 1e-5
    assert len(others) == 4
    for row in (kernel, *others):
        result = row["result"]
        assert len(result["repeats_us"]) == 2 and result["layer_us"] == pytest.approx(sum(result["repeats_us"]) / 2)
        assert result["bytes_per_s"] == pytest.approx(row["bytes"] / (result["layer_us"] / 1e6))
        assert result["mbu"] == pytest.approx(result["bytes_per_s"] / 1e9)
    for row in others:
        assert 0 < row["result"]["error"] < 3 * row["bf16_error"] < 0.1
    assert fused["result"] is None and fused["error"] == "vllm is not installed"
    assert 2 <= kernel["active_experts"] <= 8
    assert record["warnings"] == []


@pytest.mark.parametrize("batch", [1, 6])
def test_ways_to_compute_sparse_layers_agree(batch: int) -> None:
    model = layers_model(torch.float32)
    with torch.no_grad(), uncompiled():
        expected = sparse_engines.chain(model.model.layers, sparse_engines.start_of(model, batch))
        for engine in (
            sparse_engines.transformers(model, batch, "grouped_mm"),
            sparse_engines.transformers(model, batch, "batched_mm"),
            sparse_engines.compiled(model, batch, sparse_engines.grouped),
            sparse_engines.compiled(model, batch, sparse_engines.gathered),
        ):
            engine.run(2)
            assert torch.allclose(engine.output(), expected, atol=1e-5)


def test_fused_experts_of_vllm_are_called_with_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    def fused_experts(**given: torch.Tensor) -> torch.Tensor:
        x, chosen = given["hidden_states"], given["topk_ids"].long()
        middle = sparse_engines.gated(torch.einsum("bi,bkoi->bko", x, given["w1"][chosen]))
        return torch.einsum("bki,bkoi,bk->bo", middle, given["w2"][chosen], given["topk_weights"])

    module = SimpleNamespace(fused_experts=fused_experts)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.fused_moe", module)
    for parent in ("vllm", "vllm.model_executor", "vllm.model_executor.layers"):
        monkeypatch.setitem(sys.modules, parent, SimpleNamespace(__path__=[]))
    model = layers_model(torch.float32)
    with torch.no_grad():
        expected = sparse_engines.chain(model.model.layers, sparse_engines.start_of(model, 4))
    engine = sparse_engines.vllm(model, 4)
    engine.run(1)
    assert torch.allclose(engine.output(), expected, atol=1e-5)


@pytest.mark.parametrize("layer", [sparse_engines.grouped, sparse_engines.gathered])
def test_a_layer_is_one_graph_for_all_layers(monkeypatch: pytest.MonkeyPatch, layer: Callable[..., Any]) -> None:
    compile_for_gpu, graphs = torch.compile, []

    def traced(function: Any, **options: Any) -> Any:
        del options["options"]  # of inductor
        return compile_for_gpu(function, backend=lambda graph, _: graphs.append(graph) or graph, **options)

    monkeypatch.setattr(torch, "compile", traced)
    model = layers_model(num_hidden_layers=3)
    engine = sparse_engines.compiled(model, 2, layer)
    engine.run(2)
    assert len(graphs) == 1
    assert torch.isfinite(engine.output()).all()
    torch.compiler.reset()


@pytest.mark.parametrize("schedule", ["static", "dynamic", "hybrid"])
def test_sparse_layers_of_the_published_size_are_ordered_right(schedule: str) -> None:
    geometry = read_geometry(common.qwen3_config("Qwen3-30B-A3B", num_hidden_layers=3, vocab_size=128))
    graph, h = sparse_engines.sparse_graph(geometry, 8)
    assert h.name == "h_attended"  # three layers, each of which writes the other one of two
    make_plan(graph, tiling(geometry, 8, H200, "bfloat16"), find_schedule(schedule), H200.workers).verify()


def test_warnings_about_sparse_layers_are_about_megaflow_alone() -> None:
    result = sparse_layers.Result(1.0, (1.0,), 1.0, 0.5, 0.02)
    row = sparse_layers.Row(8, "megaflow static", 3.0, 1.0, 0.01, result, None)
    assert row.warning.startswith("batch 8, megaflow static: relative error 2.00e-02 is above 1.5 times")
    assert replace(row, bf16_error=0.02).warning is None
    assert replace(row, result=replace(result, error=float("nan"))).warning is not None
    assert replace(row, result=None, error="DeadlockError: why").warning.endswith("DeadlockError: why")
    assert replace(row, engine="transformers grouped_mm").warning is None
