"""The schedule auto: what it chooses by prediction, and what by timing."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from checkpoints import small_model
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import plan_or_none, programs
from test_taskgraph import op

from megaflow import MegaModel
from megaflow.errors import ScheduleError
from megaflow.models.tuning import REPEATS, default_file, tuned
from megaflow.scheduler import Auto, Dynamic, Hybrid, Program, Schedule, Static, Unfused
from megaflow.scheduler.auto import NO_DIFFERENCE
from megaflow.scheduler.context import Context
from megaflow.scheduler.simulator import simulate


@dataclass(frozen=True)
class OneWorker(Schedule):
    """A slow schedule: everything on the first worker."""

    def schedule(self, ctx: Context) -> None:
        while ready := ctx.ready():
            ctx.execute(ready, workers=slice(0, 1))


@dataclass(frozen=True)
class Halves(Schedule):
    """Splits the batch, which programs without one refuse."""

    def schedule(self, ctx: Context) -> None:
        ctx.split([1] * ctx.batch)
        while ready := ctx.ready():
            ctx.execute(ready)


KINDS = {"kind": 0}


@settings(max_examples=25, deadline=None)
@given(program=programs(), workers=st.integers(1, 5))
def test_no_candidate_is_predicted_to_be_faster_than_the_one_chosen(program, workers):
    candidates = (Dynamic(), OneWorker(), Unfused(), Hybrid(), Static())
    if any(plan_or_none(program, candidate, workers) is None for candidate in candidates):
        return
    auto = Auto(candidates=candidates)
    whole = Program.of(program)
    chosen = auto.choose(whole, workers, KINDS)
    times = {c: simulate(c.plan(whole, workers, KINDS), auto.costs, auto.fill).seconds for c in candidates}
    assert times[chosen] <= min(times.values()) * NO_DIFFERENCE
    earlier = candidates[: candidates.index(chosen)]
    assert all(times[candidate] > min(times.values()) * NO_DIFFERENCE for candidate in earlier)
    assert (auto.plan(whole, workers, KINDS).records == chosen.plan(whole, workers, KINDS).records).all()


def test_candidates_that_cannot_plan_the_program_are_left_out(simple_program: Program):
    assert Auto(candidates=(Halves(), Static())).choose(simple_program, 2, KINDS) == Static()
    with pytest.raises(ScheduleError, match="this program's batch cannot be split"):
        Auto(candidates=(Halves(),)).choose(simple_program, 2, KINDS)


@pytest.fixture
def simple_program() -> Program:
    return Program.of([op("a", [], ["x"]), op("b", ["x"], ["y"])])


class Plain(Schedule):
    pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": ()}, "auto has no candidates"),
        ({"fill": 1.5}, r"fill is 1.5; it must be 0 to 1"),
        ({"tune": True, "candidates": (Static(), Plain())}, "candidate plain is no dataclass"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ScheduleError, match=message):
        Auto(**options)


class Stopwatch:
    """Given times in seconds, by schedule; keeps what was timed."""

    def __init__(self, times: dict[Schedule, float]) -> None:
        self.times = times
        self.timed: list[Schedule] = []

    def __call__(self, schedule: Schedule) -> float:
        self.timed.append(schedule)
        if schedule not in self.times:
            raise ScheduleError("cannot be planned")
        return self.times[schedule]


@pytest.fixture
def auto(tmp_path: Path) -> Auto:
    return Auto(tune=True, candidates=(Halves(), Static(), Dynamic(), Hybrid()), file=tmp_path / "deep" / "t.json")


TIMES: dict[Schedule, float] = {Static(): 2.0, Dynamic(): 1.0, Hybrid(): 3.0}


def test_the_fastest_is_remembered_for_its_setting_and_candidates(auto: Auto):
    first, again, elsewhere = Stopwatch(TIMES), Stopwatch({}), Stopwatch({**TIMES, Hybrid(): 0.5})
    assert tuned(auto, "batch 1", first) == Dynamic()
    assert first.timed.count(Dynamic()) == 1 + REPEATS
    assert first.timed.count(Halves()) == 1
    assert tuned(auto, "batch 1", again) == Dynamic()
    assert again.timed == []
    assert tuned(auto, "batch 2", elsewhere) == Hybrid()
    assert tuned(auto, "batch 1", again) == Dynamic()
    fewer = Auto(tune=True, candidates=(Static(), Hybrid()), file=auto.file)
    assert tuned(fewer, "batch 1", first) == Static()
    assert len(json.loads(auto.file.read_text())) == 3
    assert list(auto.file.parent.iterdir()) == [auto.file]


@pytest.mark.parametrize("content", ["", "{", "[]", "\0", '{"other": 1}', "KEY: 3", 'KEY: {"schedule": "Fastest()"}'])
def test_a_file_that_is_damaged_or_foreign_is_rewritten(auto: Auto, content: str):
    tuned(auto, "batch 1", Stopwatch(TIMES))
    (key,) = json.loads(auto.file.read_text())
    auto.file.write_text("{" + content.replace("KEY", json.dumps(key)) + "}" if "KEY" in content else content)
    stopwatch = Stopwatch(TIMES)
    assert tuned(auto, "batch 1", stopwatch) == Dynamic()
    assert stopwatch.timed
    entries = json.loads(auto.file.read_text())
    assert entries[key]["schedule"] == repr(Dynamic())
    assert entries[key]["milliseconds_per_step"][repr(Hybrid())] == 3000
    assert ("other" in entries) == ("other" in content)


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path: Path):
    (tmp_path / "taken").write_text("")
    auto = Auto(tune=True, candidates=tuple(TIMES), file=tmp_path / "taken" / "t.json")
    with pytest.warns(UserWarning, match="cannot be remembered"):
        assert tuned(auto, "batch 1", Stopwatch(TIMES)) == Dynamic()


def test_timings_are_kept_in_the_users_cache_directory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_file() == Path("/caches/megaflow/tuning.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_file() == Path.home() / ".cache" / "megaflow" / "tuning.json"


@pytest.fixture(scope="module")
def make_model() -> Callable[[str | Schedule], MegaModel]:
    source = small_model(num_hidden_layers=1)
    return lambda schedule: MegaModel.from_hf(
        source, schedule=schedule, max_batch_size=2, max_seq_len=64, steps_per_launch=2, progress=False
    )


PROMPTS = [[5, 17, 200], [31]]


@pytest.mark.interpreter
def test_tokens_are_those_of_static(make_model):
    model = make_model("static")
    wanted = model.generate(PROMPTS, 3)
    model.set_schedule("auto")
    assert torch.equal(model.generate(PROMPTS, 3), wanted)


@pytest.mark.interpreter
def test_tuning_times_on_the_device_once_and_leaves_no_trace_in_what_is_generated(make_model, tmp_path, monkeypatch):
    monkeypatch.setattr("megaflow.models.tuning.REPEATS", 1)
    static = make_model("static")
    wanted = static.generate(PROMPTS, 4)
    # an end of sequence that tuning's own steps would meet too
    end = int(wanted[0, 4])
    wanted_end = static.generate(PROMPTS, 4, eos_token_id=end, pad_token_id=7)

    auto = Auto(tune=True, candidates=(Static(), Dynamic()), file=tmp_path / "tuning.json")
    model = make_model(auto)
    assert torch.equal(model.generate(PROMPTS, 4, eos_token_id=end, pad_token_id=7), wanted_end)
    (entry,) = json.loads(auto.file.read_text()).values()
    assert set(entry["milliseconds_per_step"]) == {repr(Static()), repr(Dynamic())}

    monkeypatch.setattr("megaflow.models.decoder.Decoder._seconds_of_step", None)
    assert torch.equal(make_model(auto).generate(PROMPTS, 4), wanted)


@pytest.mark.interpreter
def test_tuning_fits_into_a_sequence_that_is_nearly_full(make_model, tmp_path, monkeypatch):
    monkeypatch.setattr("megaflow.models.tuning.REPEATS", 1)
    full = [list(range(1, 64)), [5]]
    model = make_model("static")
    wanted = model.generate(full, 1)
    model.set_schedule(Auto(tune=True, candidates=(Static(), Hybrid()), file=tmp_path / "tuning.json"))
    assert torch.equal(model.generate(full, 1), wanted)
    model.prefill(full)
    assert torch.isfinite(model.decode(torch.tensor([1, 2]))).all()
