"""The benchmarks' own arithmetic and loops, on the CPU with small models."""

import json
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checking
import common
import engines
import measuring
import pytest
import roofline
import torch
import tpot
import typer
from benches import as_if_on_a_gpu, interpreter_only, uncompiled  # noqa: F401 (a fixture)
from checkpoints import reference_tokens, small_model, small_moe_config, small_moe_model
from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM

from megaflow.models.geometry import Experts, Geometry, read_geometry
from megaflow.models.mega_model import MegaModel
from megaflow.models.weights import load_weights

SMALL = Geometry(
    layers=2, hidden=128, intermediate=192, heads=4, kv_heads=2, head_dim=64, vocab=256, tied=True, eps=1e-6,
    max_positions=512,
)  # fmt: skip


def random_prompts(batch: int, length: int) -> torch.Tensor:
    return torch.randint(293, (batch, length), generator=torch.Generator().manual_seed(5))


def test_step_bytes_of_a_tied_model() -> None:
    matrices = 2 * (512 * 128 + 128 * 256 + 384 * 128 + 128 * 192)
    vectors = 4 * (128 + 128 + 64 + 64)
    head = 2 * 256 * 128 + 4 * 128
    cache = 3 * 100 * 2 * 2 * 2 * 64 * 2  # B, positions, K and V, layers, KV heads, head_dim, bytes
    assert roofline.step_bytes(SMALL, 3, 100, None) == 2 * (matrices + vectors) + head + cache == 1_064_448


def test_step_bytes_of_an_untied_model_add_a_row_for_each_sequence() -> None:
    untied = replace(SMALL, tied=False)
    assert roofline.step_bytes(untied, 3, 100, None) - roofline.step_bytes(SMALL, 3, 100, None) == 3 * 128 * 2


@pytest.mark.parametrize("tied", [True, False])
def test_step_bytes_count_the_weights_as_they_are_packed(tied: bool) -> None:
    model = small_model(tie_word_embeddings=tied)  # its sizes are no multiples of a block
    geometry = read_geometry(model.config)
    weights = load_weights(model, geometry, torch.bfloat16, torch.device("cpu"), progress=False)
    table = 0 if tied else weights.matrices["embedding"].data.numel() * 2
    rows = 0 if tied else 2 * 128 * 2
    packed = sum(t.numel() * t.element_size() for t in weights.buffers().values())
    assert roofline.step_bytes(geometry, 2, 0, None) == packed - table + rows


def test_step_bytes_of_a_model_with_experts_count_those_that_are_active() -> None:
    fields = {"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 3, "mlp_only_layers": [1]}
    geometry = read_geometry(small_moe_config(**fields))
    weights = load_weights(small_moe_model(**fields), geometry, torch.bfloat16, torch.device("cpu"), progress=False)
    packed = {name: t.numel() * t.element_size() for name, t in weights.buffers().items()}
    experts = sum(size for name, size in packed.items() if "expert" in name)
    rest = sum(packed.values()) - experts
    assert roofline.step_bytes(geometry, 2, 0, 0) == rest
    assert roofline.step_bytes(geometry, 2, 0, 2) == rest + experts // 4
    assert roofline.step_bytes(geometry, 2, 0, 3.5) == rest + experts * 7 // 16
    assert roofline.step_bytes(geometry, 2, 0, 8) == rest + experts


def test_step_bytes_of_the_published_size_with_experts() -> None:
    geometry = read_geometry(common.qwen3_config("Qwen3-30B-A3B"))
    assert geometry.experts == Experts(128, 8, 768, True, tuple(range(48)))
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(common.qwen3_config("Qwen3-30B-A3B"))
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.dim() > 1 and "embed" not in name}
    experts = sum(size for name, size in sizes.items() if "experts" in name)
    vectors = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert 30e9 < sum(sizes.values()) < 31e9
    read = 2 * (sum(sizes.values()) - experts + experts // 16)
    assert roofline.step_bytes(geometry, 1, 0, 8) == read + 4 * vectors + 2 * 2048


def test_step_bytes_of_a_published_size() -> None:
    geometry = read_geometry(common.qwen3_config("Qwen3-8B"))
    with torch.device("meta"):
        model = Qwen3ForCausalLM(common.qwen3_config("Qwen3-8B"))
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    vectors = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    embedding = 151936 * 4096
    assert roofline.step_bytes(geometry, 0, 0, None) == 2 * (matrices - embedding) + 4 * vectors
    one = roofline.step_bytes(geometry, 1, 562, None)
    assert one - roofline.step_bytes(geometry, 0, 0, None) == 8192 + 562 * 147_456


def test_static_cache_loop_continues_as_generate_does() -> None:
    model, prompts = small_model(), random_prompts(3, 9)
    expected = torch.stack([reference_tokens(model, prompt, 7) for prompt in prompts])[:, 9:]
    loop = engines.StaticCacheLoop(model, prompt=9, steps=6)
    for _ in range(2):  # a second time after a reset
        first = loop.prefill(prompts)
        with uncompiled():
            steps = loop.decode(first, 6)
        assert torch.equal(torch.cat((first[:, None], steps), 1), expected)


@pytest.mark.parametrize("make", [small_model, small_moe_model])
def test_static_cache_steps_are_one_graph(monkeypatch: pytest.MonkeyPatch, make: Callable[[], common.Qwen3]) -> None:
    compile_for_gpu = torch.compile

    def traced(function: Any, mode: str, **options: Any) -> Any:
        assert mode == "reduce-overhead"
        return compile_for_gpu(function, backend="eager", **options)

    monkeypatch.setattr(torch, "compile", traced)
    model, prompts = make(), random_prompts(2, 5) % 120
    plain = engines.StaticCacheLoop(model, prompt=5, steps=4)
    loop = engines.StaticCacheLoop(model, prompt=5, steps=4)
    with uncompiled():
        expected = plain.decode(plain.prefill(prompts), 4)
    for _ in range(2):
        assert torch.equal(loop.decode(loop.prefill(prompts), 4), expected)
    assert loop.compilation()["unique_graphs"] == 1
    torch.compiler.reset()


@interpreter_only
@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_megaflow_is_measured_and_checked(schedule: str) -> None:
    source, prompts = small_model(), random_prompts(2, 6)
    mega = MegaModel.from_hf(source, max_batch_size=2, max_seq_len=16, steps_per_launch=2, progress=False)
    timed = measuring.measure(engines.Megaflow(mega, schedule), prompts, steps=3, repeats=1)
    found = torch.cat((timed.first[:, None], timed.tokens), 1)
    assert torch.equal(found, torch.stack([reference_tokens(source, prompt, 4) for prompt in prompts])[:, 6:])
    assert len(timed.repeats_ms) == 1 and timed.repeats_ms[0] > 0 and timed.first_step_s > 0

    rounded = small_model().bfloat16()
    check = checking.Reference(source, rounded).check(prompts, timed)
    assert check.agreement == 1 and check.largest_gap == 0
    assert check.relative_error < 1e-4 < check.bf16_relative_error
    assert check.accurate and check.active_experts is None


@interpreter_only
def test_active_experts_of_a_check_are_those_of_the_kernel() -> None:
    source = small_moe_model(num_experts=8, mlp_only_layers=[0])  # one sparse layer: a step leaves its lists
    prompts = random_prompts(3, 6) % 120
    mega = MegaModel.from_hf(source, max_batch_size=3, max_seq_len=16, progress=False)
    timed = measuring.measure(engines.Megaflow(mega, "static"), prompts, steps=3, repeats=1)
    check = checking.Reference(source, small_moe_model(num_experts=8, mlp_only_layers=[0])).check(prompts, timed)
    assert check.agreement == 1 and check.relative_error < 1e-4
    counts = []
    mega.prefill(prompts)
    for tokens in torch.cat((timed.first[:, None], timed.tokens[:, :-1]), 1).T:
        mega.decode(tokens)
        counts.append(int(mega.decoder.working["active_count"]))
    assert check.active_experts == pytest.approx(sum(counts) / 3)
    assert str(check).endswith(f"{sum(counts) / 3:.1f} experts active")


def test_mean_of_active_experts_is_over_layers_and_steps() -> None:
    of_a_sequence = torch.tensor([[[0, 1], [2, 1]], [[1, 0], [3, 1]]])  # two layers, two steps
    of_another = torch.tensor([[[1, 0], [3, 0]], [[2, 3], [3, 1]]])
    assert checking.mean_active(torch.stack((of_a_sequence, of_another))) == (2 + 4 + 4 + 2) / 4
    assert checking.mean_active(of_a_sequence[None]) == 2


def test_choices_are_recorded_inside_the_block_only() -> None:
    model = small_moe_model(mlp_only_layers=[0])
    with torch.no_grad(), checking.recorded_choices(model) as chosen:
        model(input_ids=random_prompts(2, 6) % 120)
        assert [experts.shape for experts in chosen] == [(12, 2)]
    with torch.no_grad():
        model(input_ids=random_prompts(2, 6) % 120)
    assert len(chosen) == 1


def test_check_sees_wrong_tokens_and_logits() -> None:
    model, prompts = small_model(), random_prompts(2, 6)
    loop = engines.StaticCacheLoop(model, prompt=6, steps=4)
    with uncompiled():
        timed = measuring.measure(loop, prompts, steps=4, repeats=1)
    tokens = timed.tokens.clone()
    tokens[1, 3] = (tokens[1, 3] + 1) % 293
    fed = torch.cat((prompts, timed.first[:, None], timed.tokens[:, :-1]), 1)
    with torch.no_grad():
        logits = model(input_ids=fed).logits
    run = replace(timed, tokens=tokens, logits=logits[:, -1] * 1.25)
    check = checking.Reference(model, model).check(prompts, run)
    assert check.agreement == pytest.approx(7 / 8) and check.bf16_agreement == 1
    gap = logits[1, -1].max() - logits[1, -1, tokens[1, 3]]
    assert check.largest_gap == pytest.approx(float(gap), rel=1e-3) and check.bf16_largest_gap == 0
    assert check.relative_error == pytest.approx(0.25, rel=1e-3)
    assert not check.accurate


def test_logits_that_were_not_kept_or_are_not_numbers() -> None:
    check = checking.Check(1.0, 1.0, 0.0, 0.0, None, 0.01)
    assert check.accurate
    assert replace(check, relative_error=0.015).accurate
    assert not replace(check, relative_error=0.016).accurate
    assert not replace(check, relative_error=float("nan")).accurate


@pytest.mark.parametrize("at_once", [1, 20, 8192])  # tokens, in whole sequences
def test_sequences_are_checked_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    model, prompts = small_moe_model(), random_prompts(3, 6) % 120
    tokens = torch.randint(120, (3, 3), generator=torch.Generator().manual_seed(6))
    run = engines.Timed(tokens[:, 0], tokens[:, 1:], torch.zeros(3, 120), 1.0, (1.0,))
    expected = checking.Reference(model, model).check(prompts, run)
    monkeypatch.setattr(checking, "TOKENS_AT_ONCE", at_once)
    found = checking.Reference(model, model).check(prompts, run)
    assert asdict(found) == pytest.approx(asdict(expected))
    assert found.relative_error == 1


def test_runs_with_equal_tokens_share_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = small_model(), random_prompts(2, 4)
    asked = []
    logits = checking.logits
    monkeypatch.setattr(checking, "logits", lambda *args: asked.append(args) or logits(*args))
    reference = checking.Reference(model, model)
    run = engines.Timed(torch.tensor([1, 2]), torch.tensor([[3, 4], [5, 6]]), None, 1.0, (1.0,))
    check = reference.check(prompts, run)
    assert reference.check(prompts, replace(run, tokens=run.tokens.clone())) == check and check.relative_error is None
    assert replace(check, relative_error=1.0) == reference.check(prompts, replace(run, logits=torch.zeros(2, 293)))
    assert len(asked) == 2  # of the float32 model and of the rounded one
    reference.check(prompts, replace(run, tokens=run.tokens + 1))
    assert len(asked) == 4


@pytest.mark.parametrize("make", [small_model, partial(small_moe_model, mlp_only_layers=[0])])
def test_float32_copy_gives_float32_logits_without_weights_of_the_layers(make: Callable[[], common.Qwen3]) -> None:
    rounded, whole = make().bfloat16(), make()
    whole.load_state_dict(rounded.state_dict())
    copy = checking.float32_copy(rounded)
    assert sum(p.numel() for p in copy.parameters()) == sum(
        p.numel() for name, p in whole.named_parameters() if ".layers." not in name
    )
    prompts = random_prompts(2, 9) % 120
    with torch.no_grad():
        assert torch.allclose(copy(input_ids=prompts).logits, whole(input_ids=prompts).logits, atol=1e-6)
    assert {p.dtype for p in rounded.parameters()} == {torch.bfloat16}


@interpreter_only
@pytest.mark.usefixtures("as_if_on_a_gpu")
@pytest.mark.parametrize(("make", "largest_error", "code"), [(small_model, 1.5, 0), (small_moe_model, 0.0, 1)])
def test_whole_run_with_a_baseline_that_fails(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    make: Callable[[], common.Qwen3],
    largest_error: float,
    code: int,
) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("no graph\nat all")

    monkeypatch.setattr(tpot, "random_model", lambda _: make().bfloat16())
    monkeypatch.setattr(measuring, "StaticCacheLoop", failing)
    monkeypatch.setattr(checking, "LARGEST_ERROR", largest_error)
    with pytest.raises(typer.Exit) if code else nullcontext() as stop:
        tpot.main(["Qwen3-0.6B"], [2], 4, 2, 1, ["static"], True, tmp_path / "found.json")
    assert (stop.value.exit_code if stop else 0) == code
    printed = capsys.readouterr().out.splitlines()
    record = json.loads(printed[-1])
    assert (tmp_path / "found.json").read_text() == printed[-1] + "\n"
    megaflow, baseline = record["models"][0]["rows"]
    result = megaflow["result"]
    active = result["check"]["active_experts"]
    assert result["bytes"] == roofline.step_bytes(read_geometry(make().config), 2, 5, active)
    assert result["tpot_ms"] == result["repeats_ms"][0] and result["check"]["agreement"] == 1
    assert result["tokens_per_s"] == pytest.approx(2e3 / result["tpot_ms"])
    assert result["mbu"] == pytest.approx(result["bytes"] / 1e9 / (result["tpot_ms"] / 1e3))
    assert baseline["result"] is None and baseline["error"] == "RuntimeError: no graph"
    assert any("failed: RuntimeError: no graph" in line for line in printed)
    assert len(record["warnings"]) == code
    assert all(f"warning: {warning}" in printed for warning in record["warnings"])


def test_warnings_are_about_megaflow_alone() -> None:
    check = checking.Check(1.0, 1.0, 0.0, 0.0, 0.02, 0.01)
    result = measuring.Result(1.0, (1.0,), 1.0, 1, 0.5, 0.5, 1.0, check, {})
    row = measuring.Row("Qwen3-8B", 1, 512, "megaflow static", result, None)
    assert "Qwen3-8B, batch 1, context 512, megaflow static: relative error 2.00e-02 is above 1.5 times" in row.warning
    assert replace(row, result=None, error="DeadlockError: why").warning.endswith("DeadlockError: why")
    assert replace(row, result=None, error="why", engine=measuring.BASELINE).warning is None
    assert asdict(row)["result"]["check"]["relative_error"] == 0.02


def test_an_attempt_says_why_it_failed(capsys: pytest.CaptureFixture[str]) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")

    def failing() -> None:
        raise ValueError("first\nsecond")

    assert common.attempt(lambda: 3) == (3, None)
    assert common.attempt(missing) == (None, "vllm is not installed")
    assert not capsys.readouterr().err
    assert common.attempt(failing) == (None, "ValueError: first")
    assert "second" in capsys.readouterr().err


def test_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAFLOW_COMMIT", "abc")
    assert common.commit() == "abc"
    monkeypatch.delenv("MEGAFLOW_COMMIT")

    def no_git(*_: Any, **__: Any) -> SimpleNamespace:
        raise subprocess.CalledProcessError(128, "git", "HEAD\n")

    monkeypatch.setattr(subprocess, "run", no_git)
    assert common.commit() == "unknown"
