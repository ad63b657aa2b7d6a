"""A trace says when each task ran, and tracing changes nothing else."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timeline
import torch
from checkpoints import small_model
from programs import conflicting_tiles
from typer.testing import CliRunner, Result

from megaflow import InputError, MegaModel
from megaflow.cli import app
from megaflow.runtime import LoadedPlan
from megaflow.scheduler import SCHEDULES, Dynamic
from megaflow.trace import Trace
from megaflow.tracedlaunch import PHASES, TracedLaunch

pytestmark = pytest.mark.interpreter

PROMPTS = [[5, 17, 200], [7]]
NEW = 4  # a prefill's token, and three steps in launches of two and one
VARIANTS = [*SCHEDULES.values(), Dynamic(queues=3)]
OPERATORS = ["embedding", "qkv", "attention", "o_proj", "gate_up", "down", "lm_head", "select"]


@pytest.fixture(scope="module")
def model() -> MegaModel:
    hf = small_model(num_hidden_layers=1)
    return MegaModel.from_hf(hf, max_batch_size=2, max_seq_len=64, steps_per_launch=2, progress=False)


@pytest.fixture(scope="module", params=VARIANTS, ids=repr)
def traced(request, model: MegaModel) -> tuple[torch.Tensor, torch.Tensor, Trace]:
    """Tokens without a trace, tokens with one, the trace."""
    model.set_schedule(request.param)
    without = model.generate(PROMPTS, NEW)
    with model.trace() as trace:
        tokens = model.generate(PROMPTS, NEW)
    return without, tokens, trace


@pytest.fixture
def recorded(model: MegaModel) -> Trace:
    model.set_schedule("static")
    with model.trace() as trace:
        model.generate(PROMPTS[:1], NEW)
    return trace


def test_tokens_are_those_without_a_trace(traced):
    without, tokens, _ = traced
    assert torch.equal(without, tokens)


def test_each_task_of_each_step_is_stamped_once_in_the_order_of_its_phases(traced):
    launches = traced[2].launches
    assert [launch.steps for launch in launches] == [2, 1]
    times = np.concatenate([(x.start, x.wait_start, x.run_start, x.end) for x in launches], 1)
    assert times.shape == (4, 3, launches[0].plan.graph.tasks)
    assert len(np.unique(times)) == times.size, "the clock of the interpreter gives each time once"
    assert (np.diff(times, axis=0) > 0).all()


def test_a_wait_ends_after_the_ends_of_the_tasks_that_it_is_for(traced):
    for launch in traced[2].launches:
        conflicts = conflicting_tiles(launch.plan.graph)
        assert conflicts.any()
        for run_start, end in zip(launch.run_start, launch.end, strict=True):
            assert (end[:, None] < run_start[None, :])[conflicts].all()


def test_a_workers_tasks_follow_each_other(traced):
    for launch in traced[2].launches:
        assert (launch.phases()["take"] >= 0).all()


def test_the_phases_of_all_operators_fill_the_workers_time(traced):
    trace = traced[2]
    rows = trace.by_operator()
    assert [row.name for row in rows] == OPERATORS
    for row in rows:
        assert row.take + row.prepare + row.wait + row.run == pytest.approx(1)
    assert sum(row.time for row in rows) == pytest.approx(trace.step_time)  # there is one worker


def two_workers(launch: TracedLaunch) -> TracedLaunch:
    """A launch in which tasks go to two workers in turns, a task every 10 ticks."""
    at = 10 * np.arange(launch.start.size).reshape(launch.start.shape)
    where = at // 10 % 2
    plan = replace(launch.plan, workers=2)
    return TracedLaunch(plan, at, at + 1, at + 3, at + 9, worker=where, sm=where + 50)


def test_a_table_adds_up_layers_and_averages_over_workers_and_steps(recorded):
    recorded.launches = [two_workers(recorded.launches[0])]
    graph = recorded.launches[0].plan.graph
    o_proj = next(op for op in graph.operators if op.name == "layers.0.o_proj")
    row = next(row for row in recorded.by_operator() if row.name == "o_proj")
    assert (row.tiles, row.bytes) == (o_proj.tiles, o_proj.tiles * o_proj.tile_bytes)
    # 11 since the end of the same worker's task before, and 9; by two workers
    assert row.time == o_proj.tiles * (11 + 9) / 2
    assert [getattr(row, phase) for phase in PHASES] == [11 / 20, 1 / 20, 2 / 20, 6 / 20]
    assert row.active == 10 * (o_proj.tiles - 1) + 6
    assert row.bandwidth is None, "ticks are no time"
    assert [row.name for row in recorded.by_operator() if row.at_most] == ["attention"]


def test_bandwidth_is_bytes_over_the_time_in_which_the_operator_was_active(recorded):
    recorded.launches = [two_workers(recorded.launches[0])]
    recorded.unit, recorded._scale = "us", 1000  # the ticks are ns now
    row = recorded.by_operator()[1]
    assert row.bandwidth == pytest.approx(row.bytes / (row.active * 1e-6))


def test_a_file_has_a_track_for_each_worker_and_a_slice_for_each_phase(recorded, tmp_path: Path):
    launch = two_workers(recorded.launches[0])
    recorded.launches = [launch]
    recorded.write(tmp_path / "out.json")
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == {0: "worker 0, SM 50", 1: "worker 1, SM 51"}
    graph = launch.plan.graph
    runs = [e for e in events if e.get("cat") == "run"]
    assert sorted((e["args"]["step"], e["args"]["task"]) for e in runs) == list(np.ndindex(2, graph.tasks))
    assert len([e for e in events if e.get("cat") == "wait"]) == len(runs)
    last, number = runs[-1], 2 * graph.tasks - 1
    assert (last["name"], last["tid"], last["ts"], last["dur"]) == ("select", number % 2, 10 * number + 3, 6)
    args = {"operator": "select", "tile": [0], "task": graph.tasks - 1, "step": 1, "sm": 50 + number % 2}
    assert last["args"] == args


def test_the_steps_of_decode_and_generate_are_recorded_and_those_outside_the_block_run_untraced(
    model: MegaModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    traced_launches: list[bool] = []
    launch = LoadedPlan.launch

    def watched(self: LoadedPlan, steps: int, stamps: torch.Tensor | None = None) -> None:
        traced_launches.append(stamps is not None)
        launch(self, steps, stamps)

    monkeypatch.setattr(LoadedPlan, "launch", watched)
    model.set_schedule("static")
    with model.trace(tmp_path / "out.json") as trace:
        model.prefill([[1, 2]])
        model.decode(torch.tensor([3]))
        model.generate([[1, 2]], 2)
        assert not (tmp_path / "out.json").exists()
    model.generate([[1, 2]], 2)
    assert traced_launches == [True, True, False]
    assert trace.steps == 2
    steps = {e["args"].get("step") for e in json.loads((tmp_path / "out.json").read_text())["traceEvents"]}
    assert steps == {None, 0, 1}


def test_a_block_inside_a_block_a_missing_directory_and_an_empty_trace_are_refused(model: MegaModel, tmp_path: Path):
    with pytest.raises(InputError, match="being traced already"), model.trace(), model.trace():
        pass
    with pytest.raises(InputError, match=r"missing/out.json' cannot be written; give"), model.trace(
        tmp_path / "missing" / "out.json"
    ):
        pass
    with model.trace() as trace:
        model.generate(PROMPTS, 1)
    with pytest.raises(InputError, match="no step was traced"):
        trace.by_operator()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    small_model(num_hidden_layers=1).save_pretrained(path)
    return path


def trace_command(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


def test_the_command_prints_a_row_for_each_operator_and_writes_a_file_that_can_be_drawn(checkpoint, tmp_path: Path):
    out = tmp_path / "out.json"
    result = trace_command(checkpoint, "--prompt-length", 5, "--steps", 2, "--batch", 2, "--out", out)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines() if line]
    assert lines[0] == ["operator", "tiles", "ticks/step", *PHASES, "active", "bytes", "read", "GB/s"]
    assert [line[0] for line in lines[1:-1]] == OPERATORS
    assert "the mean of 2;" in result.stdout
    slices = timeline.layer_slices(out, 0)
    assert {s.name for s in slices if s.inside} == {*OPERATORS[1:6], "prepare", "wait"}
    assert min(s.start for s in slices) == 0
    pytest.importorskip("matplotlib")
    timeline.draw(slices, "layer 0", tmp_path / "layer.png")
    assert (tmp_path / "layer.png").stat().st_size > 1000


def test_the_command_prints_json(checkpoint):
    result = trace_command(checkpoint, "--prompt-length", 5, "--steps", 1, "--schedule", "dynamic", "--json")
    facts = json.loads(result.stdout)
    assert (facts["unit"], facts["steps"]) == ("ticks", 1)
    assert [row["name"] for row in facts["operators"]] == OPERATORS
