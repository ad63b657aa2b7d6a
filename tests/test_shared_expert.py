"""Models with a shared expert (Qwen2-MoE) decode to transformers' greedy tokens, load, and say what they lack."""

import json
from pathlib import Path

import pytest
import torch
from checkpoints import SCHEDULES, check_tokens, reference_tokens, small_shared_config, small_shared_model
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from megaflow import CheckpointError, ConfigError, MegaModel
from megaflow.cli import app
from megaflow.models.geometry import read_geometry
from megaflow.models.planner import make_plan
from megaflow.models.qwen3 import qwen3_graph
from megaflow.models.reference import ReferenceVM
from megaflow.models.tiling import tiling
from megaflow.scheduler import find_schedule
from megaflow.target import H200

GEOMETRIES = {
    "2-of-5-every-layer": {},
    "3-of-12-norm-untied-width80-every-second-layer-wide-heads": {
        "num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 80, "norm_topk_prob": True,
        "shared_expert_intermediate_size": 48, "decoder_sparse_step": 2, "tie_word_embeddings": False, "head_dim": 128,
    },
}  # fmt: skip
A2_7B = {  # Qwen1.5-MoE-A2.7B
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 2,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128, "num_experts": 60, "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
}  # fmt: skip


@pytest.mark.interpreter
@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_greedy_tokens_equal_transformers_in_all_schedules(geometry, batch):
    check_tokens(small_shared_model(seed=batch, **GEOMETRIES[geometry]), batch)


@pytest.mark.interpreter
@pytest.mark.parametrize("qkv_bias", [True, False])
def test_logits_equal_transformers_after_each_step(qkv_bias):
    hf = small_shared_model(qkv_bias=qkv_bias, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1)
    ids = torch.randint(0, hf.config.vocab_size, (2, 19))
    model = MegaModel.from_hf(hf, max_batch_size=2, max_seq_len=64, progress=False)
    with torch.no_grad():
        wanted = hf(ids).logits[:, -3:]
    got = [model.prefill(ids[:, :-2])] + [model.decode(ids[:, i]) for i in range(-2, 0)]
    assert torch.allclose(torch.stack(got, 1), wanted, atol=2e-5)


@pytest.mark.interpreter
def test_the_reference_vm_runs_a_shared_expert_in_any_order():
    hf = small_shared_model(mlp_only_layers=[1])
    prompts = [torch.tensor(p) for p in ([1, 2, 3], [4], [5, 6])]
    wanted = torch.stack([reference_tokens(hf, p, 3)[len(p) :] for p in prompts])
    model = MegaModel.from_hf(hf, max_batch_size=4, max_seq_len=16, progress=False)
    model.prefill([p.tolist() for p in prompts])
    for schedule in SCHEDULES:
        assert torch.equal(ReferenceVM(model, schedule=schedule).run(wanted[:, 0], 2), wanted[:, 1:]), schedule


@pytest.mark.interpreter
def test_the_check_command_finds_no_difference(tmp_path):
    small_shared_model(num_hidden_layers=1).save_pretrained(tmp_path)
    options = ("--batch", "2", "--prompt-length", "5", "--max-seq-len", "16")
    result = CliRunner().invoke(app, ["check", str(tmp_path), *options])
    assert result.exit_code == 0, result.output
    assert "operators agree" in result.stdout


@pytest.mark.parametrize("schedule", [*SCHEDULES, "unfused"])
def test_a_published_geometry_is_ordered_right(schedule):
    geometry = read_geometry(small_shared_config(**A2_7B))
    plan = make_plan(
        qwen3_graph(geometry, 512, 4), tiling(geometry, 4, H200, "bfloat16"), find_schedule(schedule), H200.workers
    )
    plan.verify()


def test_the_shared_expert_waits_for_no_routing():
    geometry = read_geometry(small_shared_config(**A2_7B))
    graph = make_plan(
        qwen3_graph(geometry, 512, 1), tiling(geometry, 1, H200, "bfloat16"), find_schedule("static"), H200.workers
    ).graph
    names = [op.name for op in graph.operators]
    before = {
        names[edge.consumer].removeprefix("layers.0."): names[edge.producer]
        for edge in graph.edges
        if names[edge.consumer].startswith("layers.0.shared")
    }
    assert before == {"shared_gate_up": "layers.0.o_proj", "shared_down": "layers.0.shared_gate_up"}


def fused_checkpoint(directory: Path) -> Path:
    """A checkpoint whose tensors are as transformers keeps them in memory: all experts of a layer in one."""
    hf = small_shared_model(num_hidden_layers=1)
    hf.config.save_pretrained(directory)
    tensors = {name: tensor for name, tensor in hf.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, directory / "model.safetensors")
    return directory


def separate_checkpoint(directory: Path) -> Path:
    """The same weights as published: a tensor for each matrix of each expert."""
    small_shared_model(num_hidden_layers=1).save_pretrained(directory)
    assert "model.layers.0.mlp.experts.4.up_proj.weight" in load_file(directory / "model.safetensors")
    return directory


def test_both_layouts_on_disk_and_a_model_in_memory_give_the_same_weights(tmp_path):
    (tmp_path / "fused").mkdir()
    sources = [
        small_shared_model(num_hidden_layers=1),
        fused_checkpoint(tmp_path / "fused"),
        separate_checkpoint(tmp_path / "separate"),
    ]
    first, *others = [MegaModel.from_hf(source, max_seq_len=16, progress=False).decoder.constants for source in sources]
    for other in others:
        assert other.keys() == first.keys()
        assert all(torch.equal(tensor, first[name]) for name, tensor in other.items())


@pytest.mark.parametrize(
    "name", ["mlp.shared_expert_gate.weight", "mlp.shared_expert.up_proj.weight", "self_attn.k_proj.bias"]
)
def test_a_missing_tensor_is_named(tmp_path, name):
    file = separate_checkpoint(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"model.layers.0.{name}"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=rf"1 tensors are missing, the first is model.layers.0.{name}"):
        MegaModel.from_hf(tmp_path, progress=False)


CHANGES = {
    "another shared width": ({"shared_expert_intermediate_size": 96}, r"shared_expert\..* has shape .*112.* .*96"),
    "no bias": ({"qkv_bias": False}, r"self_attn.k_proj.bias has no place in a model of this configuration"),
    "no shared expert": ({"model_type": "qwen3_moe"}, r"layers.0.mlp.shared_expert.* has no place"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_weights_that_do_not_fit_the_configuration_are_named(tmp_path, case):
    changes, message = CHANGES[case]
    path = separate_checkpoint(tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message):
        MegaModel.from_hf(tmp_path, progress=False)


CONFIGS = {
    "shared width": (
        {"shared_expert_intermediate_size": 40},
        r"shared_expert_intermediate_size is 40; supported: a multiple of 16",
    ),
    "no shared width": ({"shared_expert_intermediate_size": 0}, r"shared_expert_intermediate_size is 0; supported: a"),
    "sliding window": ({"use_sliding_window": True, "max_window_layers": 0}, r"use_sliding_window is True; supported"),
    "some sliding windows": (
        {"use_sliding_window": True},
        r"layer_types is .*'sliding_attention'.*; supported: only",
    ),
    "too many experts": ({"num_experts": 513}, r"num_experts is 513; supported: 0 to 512"),
    "width": ({"moe_intermediate_size": 40}, r"moe_intermediate_size is 40; supported: a multiple of 16"),
    "activation": ({"hidden_act": "gelu"}, r"hidden_act is 'gelu'; supported: 'silu'"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, r"quant_method is 'gptq'; quantised"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_an_unsupported_configuration_is_refused_by_field(case):
    changes, message = CONFIGS[case]
    with pytest.raises(ConfigError, match=message):
        read_geometry(small_shared_config(**changes))


def test_the_error_for_another_architecture_lists_those_that_are_supported():
    config = small_shared_config()
    config.model_type = "qwen2"
    with pytest.raises(ConfigError, match=r"model_type is 'qwen2'; megaflow decodes 'qwen3', 'qwen3_moe', 'qwen2_moe'"):
        read_geometry(config)
