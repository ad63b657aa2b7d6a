"""The sweeps over context and batch, on the CPU with small models: points, checks of long prompts, plots."""

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import checking
import engines
import measuring
import plots
import pytest
import roofline
import sensitivity
import torch
import typer
from benches import as_if_on_a_gpu, interpreter_only, uncompiled  # noqa: F401 (a fixture)
from checkpoints import small_model, small_moe_model
from transformers import DynamicCache

from megaflow.models.geometry import read_geometry
from megaflow.models.mega_model import MegaModel


def random_prompts(batch: int, length: int) -> torch.Tensor:
    return torch.randint(120, (batch, length), generator=torch.Generator().manual_seed(5))


def small_mega(source: Any, batch: int = 2) -> MegaModel:
    return MegaModel.from_hf(source, max_batch_size=batch, max_seq_len=48, page_size=16, progress=False)


def row_of(sweep: str, batch: int, context: int, warning: str | None = None, **changes: Any) -> dict[str, Any]:
    """A row of a record."""
    result = {"tpot_ms": 2.0 * batch, "floor_ms": 1.0 * batch, "tokens_per_s": 500.0}
    row = {"model": "Qwen3-8B", "engine": "megaflow static", "batch": batch, "context": context, "result": result}
    return row | {"sweep": sweep, "warning": warning} | changes


def record_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "environment": {"device": "a device", "commit": "0123456789ab"},
        "setting": {"new": 100, "repeats": 3},
        "rows": rows,
    }


def test_points_of_a_sweep() -> None:
    sweep = sensitivity.Sweep("context", [1, 8], [512, 4096])
    assert sweep.points == [(1, 512), (8, 512), (1, 4096), (8, 4096)]


@interpreter_only
@pytest.mark.parametrize("make", ["megaflow", "transformers"])
def test_an_engine_restarts_from_its_prompts_and_shows_what_the_cache_has_of_them(make: str) -> None:
    source, prompts = small_model(), random_prompts(2, 18)  # more than a page
    mega = make == "megaflow"
    engine = engines.Megaflow(small_mega(source), "static") if mega else engines.StaticCacheLoop(source, 18, 2)
    exact = DynamicCache(config=source.config)
    with torch.no_grad(), uncompiled():
        source(input_ids=prompts, past_key_values=exact)
        first = engine.prefill(prompts)
        tokens = engine.decode(first, 2)
        engine.restart()
        assert torch.equal(engine.decode(first, 2), tokens)
    for first, end in ((0, 2), (1, 2)):
        for (keys, values), layer in zip(engine.past(first, end), exact.layers, strict=True):
            assert torch.allclose(keys, layer.keys[first:end], atol=1e-5)
            assert torch.allclose(values, layer.values[first:end], atol=1e-5)


@pytest.mark.parametrize("make", [small_model, small_moe_model])
@pytest.mark.parametrize("at_once", [1, 8192])  # tokens, in whole sequences
def test_a_check_from_the_cache_says_what_one_from_the_prompts_says(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], at_once: int
) -> None:
    monkeypatch.setattr(checking, "TOKENS_AT_ONCE", at_once)
    model, prompts = make(), random_prompts(2, 9)
    loop = engines.StaticCacheLoop(model, 9, 3)
    with uncompiled():
        timed = measuring.measure(loop, prompts, steps=3, repeats=1)
    with torch.no_grad():
        fed = torch.cat((prompts, timed.first[:, None], timed.tokens[:, :-1]), 1)
        last = model(input_ids=fed).logits[:, -1]
    timed = engines.Timed(timed.first, timed.tokens, 1.25 * last, timed.first_step_s, timed.repeats_ms)
    reference = checking.Reference(checking.float32_copy(model), model)
    whole, steps = reference.check(prompts, timed), reference.check(prompts, timed, loop.past)
    assert steps.from_cache and str(steps).endswith("steps alone") and not whole.from_cache
    assert steps.agreement == 1 and steps.relative_error == pytest.approx(0.25, rel=1e-3)
    assert asdict(steps) == pytest.approx(asdict(whole) | {"from_cache": True}, abs=1e-5)


class Careless(engines.Megaflow):
    """Its steps lose the values of the prompts' first page."""

    def decode(self, first: torch.Tensor, steps: int) -> torch.Tensor:
        buffers = self._decoder.buffers
        buffers["layers.0.v_cache"][buffers["block_table"][0, 0]] = 0
        return super().decode(first, steps)


@interpreter_only
@pytest.mark.parametrize(("kind", "accurate"), [(engines.Megaflow, True), (Careless, False)])
def test_what_the_steps_leave_in_the_cache_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, kind: type[engines.Megaflow], accurate: bool
) -> None:
    monkeypatch.setattr(measuring, "MOST_READ", 17)
    source = small_model().bfloat16()
    reference = checking.Reference(checking.float32_copy(source), source)
    method = measuring.Method(new=1, repeats=1, schedules=[], baseline=False)
    make = partial(kind, small_mega(source, 1), "static")
    found = measuring.find(make, random_prompts(1, 18), method, reference, lambda _: 1000, 1e9)
    assert found.check.from_cache and found.check.accurate == accurate


@interpreter_only
@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_whole_run_of_both_sweeps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sensitivity, "random_model", lambda _: small_model().bfloat16())
    monkeypatch.setattr(measuring, "MOST_READ", 4)
    sensitivity.main(
        ["Qwen3-8B"], ["context", "batch"], [4, 5], [1], [2], 4, 2, 1, ["static"], False, tmp_path / "found.json"
    )
    printed = capsys.readouterr().out.splitlines()
    record = json.loads(printed[-1])
    assert (tmp_path / "found.json").read_text() == printed[-1] + "\n"
    assert record["warnings"] == []
    rows = record["rows"]
    assert [(row["sweep"], row["batch"], row["context"]) for row in rows] == [
        ("context", 1, 4),
        ("context", 1, 5),
        ("batch", 2, 4),
    ]
    assert [row["result"]["check"]["from_cache"] for row in rows] == [False, True, True]
    for row in rows:
        result = row["result"]
        assert row["warning"] is None and result["check"]["agreement"] == 1
        read = roofline.step_bytes(read_geometry(small_model().config), row["batch"], row["context"] + 1, None)
        assert result["bytes"] == read and result["floor_ms"] == pytest.approx(read / 1e6)
        assert result["mbu"] == pytest.approx(result["floor_ms"] / result["tpot_ms"])
        assert result["tokens_per_s"] == pytest.approx(1e3 * row["batch"] / result["tpot_ms"])


@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_all_points_of_a_sweep_fail_without_memory_for_its_cache(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, max_seq_len: int, **__: Any) -> None:
        raise torch.OutOfMemoryError(f"no {max_seq_len} positions")

    monkeypatch.setattr(sensitivity, "random_model", lambda _: small_model().bfloat16())
    monkeypatch.setattr(sensitivity.MegaModel, "from_hf", full)
    with pytest.raises(typer.Exit) as stop:
        sensitivity.main(["Qwen3-8B"], ["batch"], [4], [1], [2, 3], 9, 2, 1, ["static"], False, None)
    assert stop.value.exit_code == 1
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["error"] for row in record["rows"]] == ["OutOfMemoryError: no 12 positions"] * 2
    assert record["warnings"][0].startswith("batch: Qwen3-8B, batch 2, context 9, megaflow static: OutOfMemoryError")


def test_lines_of_a_plot_are_what_was_measured_and_is_right() -> None:
    rows = [
        row_of("batch", 8, 512),
        row_of("batch", 1, 512),
        row_of("batch", 2, 512, warning="relative error"),
        row_of("batch", 4, 512, result=None, warning="failed"),
        row_of("context", 16, 512),
        row_of("batch", 1, 512, engine="transformers compiled"),
    ]
    first, second = plots.series(rows, "batch")
    assert first == plots.Series(
        "Qwen3-8B, megaflow static, context 512", (1, 8), (2.0, 16.0), (1.0, 8.0), (500.0, 500.0)
    )
    assert second.label == "Qwen3-8B, transformers compiled, context 512" and second.at == (1,)
    assert [line.label for line in plots.series(rows, "context")] == ["Qwen3-8B, megaflow static, batch 16"]


def test_plots_are_png_files_of_the_sweeps_that_have_lines(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    batches = [row_of("batch", batch, 512) for batch in (1, 2, 4)]
    assert plots.draw(record_of(batches), tmp_path / "new") == [tmp_path / "new" / "tpot_over_batch.png"]
    written = plots.draw(record_of([*batches, row_of("context", 1, 4096)]), tmp_path)
    assert [path.name for path in written] == ["tpot_over_context.png", "tpot_over_batch.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG\r\n") for path in written)
    assert plots.draw(record_of([]), tmp_path) == []


def test_a_caption_says_where_and_how() -> None:
    assert plots.caption(record_of([])) == "a device, commit 012345678, bfloat16, 100 greedy steps, median of 3"
