"""Models with experts decode to transformers' greedy tokens, load from both layouts, and say what they lack."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SCHEDULES, check_tokens, reference_tokens, small_config, small_moe_config, small_moe_model
from safetensors.torch import load_file, save_file
from test_deadlock import broken
from transformers import Qwen3MoeForCausalLM
from typer.testing import CliRunner

from megaflow import CheckpointError, ConfigError, DeadlockError, MegaModel, ScheduleError
from megaflow.cli import app
from megaflow.models.comparison import compare
from megaflow.models.geometry import read_geometry
from megaflow.models.prefill import mix_experts
from megaflow.models.reference import ReferenceVM
from megaflow.records import FIELDS
from megaflow.scheduler import Context, Schedule

GEOMETRIES = {
    "2-of-5": {},
    "3-of-12-norm-untied-width80": {
        "num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 80, "norm_topk_prob": True,
        "tie_word_embeddings": False, "num_hidden_layers": 1,
    },
    "1-of-3-width16": {"num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "num_hidden_layers": 1},
    "4-of-4-norm-last-layer-dense": {
        "num_experts": 4, "num_experts_per_tok": 4, "norm_topk_prob": True, "mlp_only_layers": [1],
    },
    "4-of-9-every-second-layer-sparse": {
        "num_experts": 9, "num_experts_per_tok": 4, "decoder_sparse_step": 2, "tie_word_embeddings": False,
    },
}  # fmt: skip


@pytest.mark.interpreter
@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_greedy_tokens_equal_transformers_in_all_schedules(geometry, batch):
    new = 3 if batch == 2 else 2  # steps of a launch that follow each other, too
    check_tokens(small_moe_model(seed=batch, **GEOMETRIES[geometry]), batch, new)


@pytest.mark.interpreter
def test_sixteen_sequences():
    check_tokens(small_moe_model(num_hidden_layers=1, num_experts=9), 16)


@pytest.mark.interpreter
def test_two_token_tiles_whose_pairs_are_counted_apart():
    check_tokens(small_moe_model(num_hidden_layers=2, num_experts=7), 35, 3, ("dynamic",))


@pytest.mark.interpreter
@pytest.mark.parametrize("limit", [{}, {"stop_after": "layers.0.router"}, {"stop_after": "layers.0.expert_gate_up"}])
def test_every_tile_agrees_where_tasks_are_created_at_run_time(limit):
    model = MegaModel.from_hf(small_moe_model(num_hidden_layers=1), max_batch_size=2, max_seq_len=16, progress=False)
    first = model.prefill([[1, 2, 3], [4]]).argmax(1)
    assert compare(model, first, schedule="dynamic", **limit).difference is None


@pytest.mark.interpreter
def test_a_trace_has_the_tasks_of_active_experts_only(tmp_path):
    hf = small_moe_model(num_hidden_layers=1, num_experts=12, num_experts_per_tok=2)
    model = MegaModel.from_hf(hf, max_batch_size=3, max_seq_len=16, schedule="dynamic", progress=False)
    model.prefill([[1], [1], [1]])  # all choose the same experts
    with model.trace(tmp_path / "out.json") as trace:
        model.decode(torch.tensor([5, 5, 5]))
    launch = trace.launches[0]
    graph = launch.plan.graph
    created = graph.created[graph.operator]
    assert (launch.ran[0] == (~created | (graph.coordinates[:, 0] < 2))).all()
    rows = {row.name: row for row in trace.by_operator()}
    down = next(op for op in graph.operators if op.name == "layers.0.expert_down")
    assert rows["expert_down"].tiles == 2 * down.grid[1]
    assert rows["expert_down"].bytes == 2 * down.grid[1] * down.tile_bytes
    assert sum(row.time for row in rows.values()) == pytest.approx(trace.step_time)
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    assert len([e for e in events if e.get("cat") == "run"]) == launch.ran.sum()


@pytest.mark.interpreter
def test_a_task_that_is_never_created_is_not_blamed_for_a_deadlock():
    hf = small_moe_model(num_hidden_layers=1, num_experts=12, num_experts_per_tok=2)
    model = MegaModel.from_hf(hf, max_batch_size=3, max_seq_len=16, schedule="dynamic", progress=False)
    model.prefill([[1], [1], [1]])
    good = model.decoder.plan(model.schedule)
    records = good.plan.records.copy()
    graph = good.plan.graph
    names = [graph.task_name(task) for task in range(graph.tasks)]
    records[names.index("layers.0.expert_down[1, 0, 0]"), FIELDS.index("notify0")] = -1
    model.decoder._plans[3, model.schedule] = broken(good, replace(good.plan, records=records))
    with pytest.raises(
        DeadlockError, match=r"first in line is layers.0.combine\[.*, which waits for event .*expert_down"
    ):
        model.decode(torch.tensor([5, 5, 5]))


@pytest.mark.interpreter
def test_all_tokens_go_to_the_same_experts():
    hf = small_moe_model(num_hidden_layers=1, num_experts=9, num_experts_per_tok=2)
    shared = torch.rand(hf.config.hidden_size) + 0.5
    layer = hf.model.layers[0]
    with torch.no_grad():  # a column that all tokens have, and two experts that look at it alone
        hf.model.embed_tokens.weight += shared
        layer.mlp.gate.weight[3] = shared
        layer.mlp.gate.weight[7] = 2 * shared
    check_tokens(hf, 5)
    model = MegaModel.from_hf(hf, max_batch_size=5, max_seq_len=32, progress=False)
    model.prefill([[1], [2], [3], [4], [5]])
    model.decode(torch.arange(5))
    chosen = model.decoder.working["topk_experts"][:5, :2]
    assert chosen.tolist() == [[7, 3]] * 5
    assert model.decoder.working["active_count"][0] == 2


@pytest.mark.interpreter
def test_the_reference_vm_runs_experts_in_any_order():
    hf = small_moe_model(mlp_only_layers=[1], num_hidden_layers=3)
    prompts = [torch.tensor(p) for p in ([1, 2, 3], [4], [5, 6])]
    wanted = torch.stack([reference_tokens(hf, p, 3)[len(p) :] for p in prompts])
    model = MegaModel.from_hf(hf, max_batch_size=4, max_seq_len=16, progress=False)
    model.prefill([p.tolist() for p in prompts])
    for schedule in SCHEDULES:
        assert torch.equal(ReferenceVM(model, schedule=schedule).run(wanted[:, 0], 2), wanted[:, 1:]), schedule


@pytest.mark.interpreter
def test_logits_equal_transformers_after_each_step():
    hf = small_moe_model(norm_topk_prob=True, hidden_size=112)
    ids = torch.randint(0, hf.config.vocab_size, (2, 19))
    model = MegaModel.from_hf(hf, max_batch_size=2, max_seq_len=64, progress=False)
    with torch.no_grad():
        wanted = hf(ids).logits[:, -3:]
    got = [model.prefill(ids[:, :-2])] + [model.decode(ids[:, i]) for i in range(-2, 0)]
    assert torch.allclose(torch.stack(got, 1), wanted, atol=2e-5)


@dataclass(frozen=True)
class Halves(Schedule):
    """Two micro-batches."""

    def schedule(self, ctx: Context) -> None:
        ctx.split([1, ctx.batch - 1])


@pytest.mark.interpreter
def test_the_batch_cannot_be_split():
    model = MegaModel.from_hf(small_moe_model(num_hidden_layers=1), max_batch_size=2, max_seq_len=16, progress=False)
    model.prefill([[1], [2]])
    model.set_schedule(Halves())
    with pytest.raises(ScheduleError, match=r"this program's batch cannot be split"):
        model.decode(torch.tensor([1, 2]))


def test_no_expert_is_run_for_tokens_that_did_not_choose_it(monkeypatch):
    hf = small_moe_model(num_hidden_layers=1, num_experts=12, num_experts_per_tok=1)
    model = MegaModel.from_hf(hf, max_seq_len=16, progress=False)
    experts = model.geometry.experts
    rows = []
    monkeypatch.setattr("megaflow.models.prefill.gated", lambda x: (rows.append(len(x)), x[:, ::2])[1])
    x = torch.randn(7, hf.config.hidden_size)
    mix_experts(experts, model._weights, "layers.0.", x)
    chosen = (x @ hf.model.layers[0].mlp.gate.weight.T).argmax(1)
    assert rows == chosen.bincount()[chosen.bincount() > 0].tolist()


def fused_checkpoint(hf: Qwen3MoeForCausalLM, directory: Path) -> Path:
    """A checkpoint whose tensors are as transformers keeps them in memory: all experts of a layer in one."""
    directory.mkdir()
    hf.config.save_pretrained(directory)
    tensors = {name: tensor for name, tensor in hf.state_dict().items() if name != "lm_head.weight"}
    assert any(tensor.dim() == 3 for tensor in tensors.values())
    save_file(tensors, directory / "model.safetensors")
    return directory


def separate_checkpoint(hf: Qwen3MoeForCausalLM, directory: Path) -> Path:
    """A checkpoint as published: a tensor for each matrix of each expert."""
    hf.save_pretrained(directory)
    return directory


@pytest.fixture
def checkpoints(tmp_path: Path) -> dict[str, Path]:
    """The same model, whose second layer alone is sparse, in both layouts."""
    hf = small_moe_model(decoder_sparse_step=2)
    return {
        "fused": fused_checkpoint(hf, tmp_path / "fused"),
        "separate": separate_checkpoint(hf, tmp_path / "separate"),
    }


@pytest.mark.interpreter
def test_both_layouts_on_disk_give_the_same_tokens(checkpoints):
    prompts = [[1, 2, 3], [4]]
    models = [
        MegaModel.from_hf(path, max_batch_size=2, max_seq_len=16, progress=False) for path in checkpoints.values()
    ]
    models.append(MegaModel.from_hf(small_moe_model(decoder_sparse_step=2), max_batch_size=2, max_seq_len=16))
    first, *others = [model.generate(prompts, 2) for model in models]
    assert all(torch.equal(first, other) for other in others)
    buffers = models[0].decoder.constants
    for model in models[1:]:
        assert all(torch.equal(tensor, buffers[name]) for name, tensor in model.decoder.constants.items())


def without(path: Path, name: str) -> None:
    """Take a tensor out of a checkpoint."""
    tensors = load_file(path / "model.safetensors")
    del tensors[name]
    save_file(tensors, path / "model.safetensors")


MISSING = {
    "an expert's matrix": ("separate", "experts.3.up_proj.weight", r"1 tensors are missing, the first is .*3.up_proj"),
    "a fused tensor": (
        "fused",
        "experts.down_proj",
        r"5 tensors are missing, the first is .*experts.0.down_proj.weight",
    ),
    "the router": ("separate", "gate.weight", r"1 tensors are missing, the first is model.layers.1.mlp.gate.weight"),
}


@pytest.mark.parametrize("case", MISSING)
def test_a_missing_tensor_is_named(checkpoints, case):
    layout, name, message = MISSING[case]
    without(checkpoints[layout], f"model.layers.1.mlp.{name}")
    with pytest.raises(CheckpointError, match=message):
        MegaModel.from_hf(checkpoints[layout], progress=False)


CHANGES = {
    "another width": (
        {"moe_intermediate_size": 64},
        {
            "separate": r"experts.0.down_proj.weight has shape \[80, 48\], .* asks for \[80, 64\]",
            "fused": r"experts.down_proj has shape \[5, 80, 48\], .* asks for \[5, 80, 64\]",
        },
    ),
    "fewer experts": (
        {"num_local_experts": 4},
        {
            "separate": r"experts.4.down_proj.weight has no place",
            "fused": r"experts.down_proj has shape \[5, 80, 48\], .* asks for \[4, 80, 48\]",
        },
    ),
    "more experts": (
        {"num_local_experts": 6},
        {
            "separate": r"gate.weight has shape \[5, 80\], .* \[6, 80\]",
            "fused": r"experts.down_proj has shape \[5, 80, 48\], .* asks for \[6, 80, 48\]",
        },
    ),
    "another sparse layer": (
        {"decoder_sparse_step": 1},
        dict.fromkeys(("separate", "fused"), r"layers.0.mlp.down_proj.weight has no place in a model of this"),
    ),
}


@pytest.mark.parametrize("layout", ["separate", "fused"])
@pytest.mark.parametrize("case", CHANGES)
def test_weights_that_do_not_fit_the_configuration_are_named(checkpoints, case, layout):
    changes, messages = CHANGES[case]
    path = checkpoints[layout] / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=messages[layout]):
        MegaModel.from_hf(checkpoints[layout], progress=False)


CONFIGS = {
    "too many experts": ({"num_experts": 513}, r"num_experts is 513; supported: 0 to 512"),
    "too many a token": (
        {"num_experts": 32, "num_experts_per_tok": 17},
        r"num_experts_per_tok is 17; supported: 1 to 16",
    ),
    "more a token than there are": ({"num_experts_per_tok": 6}, r"num_experts_per_tok is 6; supported: 1 to 5"),
    "none a token": ({"num_experts_per_tok": 0}, r"num_experts_per_tok is 0; supported: 1 to 5"),
    "width": ({"moe_intermediate_size": 40}, r"moe_intermediate_size is 40; supported: a multiple of 16"),
    "activation": ({"hidden_act": "gelu"}, r"hidden_act is 'gelu'; supported: 'silu'"),
    "sliding window": ({"use_sliding_window": True}, r"use_sliding_window is True; supported: False"),
    "sparse step": ({"decoder_sparse_step": 0}, r"decoder_sparse_step is 0; supported: 1 or more"),
    "width of a dense layer": (
        {"intermediate_size": 72, "mlp_only_layers": [0]},
        r"intermediate_size is 72; supported: a multiple of 16",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_an_unsupported_configuration_is_refused_by_field(case):
    changes, message = CONFIGS[case]
    with pytest.raises(ConfigError, match=message):
        read_geometry(small_moe_config(**changes))


def test_which_layers_are_sparse():
    def sparse(**changes: Any) -> list[int]:
        geometry = read_geometry(small_moe_config(num_hidden_layers=6, **changes))
        return [layer for layer in range(6) if geometry.is_sparse(layer)]

    assert sparse() == [0, 1, 2, 3, 4, 5]
    assert sparse(mlp_only_layers=[0, 4]) == [1, 2, 3, 5]
    assert sparse(decoder_sparse_step=2) == [1, 3, 5]
    assert sparse(decoder_sparse_step=3, mlp_only_layers=[2]) == [5]
    assert sparse(num_experts=0) == []
    assert read_geometry(small_moe_config(decoder_sparse_step=7)).experts is None
    assert read_geometry(small_config()).experts is None


def test_the_width_of_dense_layers_does_not_matter_where_there_are_none():
    assert read_geometry(small_moe_config(intermediate_size=72)).experts.width == 48


def test_head_dim_may_follow_from_the_hidden_size():
    config = small_moe_config(hidden_size=128)
    del config.head_dim
    assert read_geometry(config).head_dim == 64


def test_the_plan_command_shows_each_sort_of_layers_once(tmp_path):
    small_moe_config(num_hidden_layers=7, decoder_sparse_step=2, mlp_only_layers=[5]).save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["plan", str(tmp_path), "--batch", "2"])
    assert result.exit_code == 0, result.output
    shown = [line.split()[0] for line in result.stdout.splitlines() if line.startswith("layers.")]
    assert shown[:5] == [f"layers.0.{part}" for part in ("qkv", "attention", "o_proj", "gate_up", "down")]
    sparse = ("qkv", "attention", "o_proj", "router", "topk", "group", "expert_gate_up", "expert_down", "combine")
    assert shown[5:] == [f"layers.1.{part}" for part in sparse]
    assert "layers 2, 4, 5, 6: as layer 0; layers.2.qkv waits for layers.1.combine" in result.stdout
    assert "layer 3: as layer 1\n" in result.stdout
    assert "coarsened: layers.1.combine waits for all of layers.1.expert_down: which of its tiles" in result.stdout
    dynamic = CliRunner().invoke(app, ["plan", str(tmp_path), "--batch", "2", "--schedule", "dynamic"])
    assert "coarsened" not in dynamic.stdout
    assert "tasks of layers.1.expert_gate_up, layers.1.expert_down\n" in dynamic.stdout
