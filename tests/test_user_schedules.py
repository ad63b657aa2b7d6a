"""Schedules that a user writes: the examples in the docs, what they can ask for, and what they are told when wrong."""

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from checkpoints import reference_tokens, small_model
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import plan_or_none, programs
from test_taskgraph import op
from transformers import Qwen3Config

from megaflow import MegaModel, ScheduleError
from megaflow.models.geometry import Geometry, read_geometry
from megaflow.models.planner import make_plan
from megaflow.models.qwen3 import qwen3_graph
from megaflow.models.tiling import tiling
from megaflow.plan import Plan
from megaflow.scheduler import SCHEDULES, Context, Program, Schedule, Static
from megaflow.target import Device

sys.path.insert(0, str(Path(__file__).parent.parent / "docs" / "examples"))
from lm_head_workers import LMHeadWorkers
from micro_batches import TwoMicroBatches
from one_stream import OneStream

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"
USERS = [OneStream(), TwoMicroBatches(), LMHeadWorkers(share=0.5)]
WORKERS = 3


@pytest.fixture(scope="module")
def geometry() -> Geometry:
    """Of Qwen3-0.6B, with two layers."""
    return read_geometry(
        Qwen3Config(hidden_size=1024, intermediate_size=3072, num_hidden_layers=2, num_attention_heads=16,
                    num_key_value_heads=8)
    )  # fmt: skip


class Written(Schedule):
    """A schedule from a function."""

    def __init__(self, decide: Callable[[Context], None]) -> None:
        self._decide = decide

    def schedule(self, ctx: Context) -> None:
        self._decide(ctx)


def plan(decide: Callable[[Context], None]) -> Plan:
    """The plan of a function for load -> f -> g, in which each has two tiles."""
    chain = [op("load", [], ["x"]), op("f", ["x"], ["y"]), op("g", ["y"], ["z"])]
    return Written(decide).plan(Program.of(chain), WORKERS, {"kind": 0})


def rest(ctx: Context) -> None:
    while ready := ctx.ready():
        ctx.execute(ready[0])


@pytest.mark.interpreter
@pytest.mark.parametrize("batch", [1, 4])
def test_tokens_are_the_same_in_every_schedule(batch):
    hf = small_model(seed=7)
    prompts = [torch.randint(0, hf.config.vocab_size, (n,)) for n in (5, 21, 1, 12)[:batch]]
    wanted = [reference_tokens(hf, p, 3)[len(p) :].tolist() for p in prompts]
    model = MegaModel.from_hf(hf, max_batch_size=batch, max_seq_len=64, page_size=16, progress=False)
    for schedule in [*SCHEDULES.values(), Static(interleave=True), *USERS]:
        model.set_schedule(schedule)
        assert model.generate(prompts, 3)[:, -3:].tolist() == wanted, schedule


@pytest.mark.interpreter
@pytest.mark.parametrize("schedule", USERS, ids=lambda s: s.name)
def test_a_batch_in_two_parts_stops_when_all_its_sequences_have_ended(schedule):
    hf = small_model(seed=3)
    prompts = [torch.randint(0, hf.config.vocab_size, (n,)) for n in (4, 9, 2)]
    model = MegaModel.from_hf(hf, max_batch_size=3, max_seq_len=64, page_size=16, progress=False)
    ends = sorted({int(t) for t in model.generate(prompts, 3)[:, -3:].diagonal()})
    wanted = model.generate(prompts, 6, eos_token_id=ends)
    model.set_schedule(schedule)
    assert torch.equal(model.generate(prompts, 6, eos_token_id=ends), wanted)


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_has_less_than_40_lines(example):
    assert len(example.read_text().splitlines()) < 40


@pytest.mark.parametrize("schedule", USERS, ids=lambda s: s.name)
@pytest.mark.parametrize("batch", [2, 17, 64])
def test_plans_of_the_examples_are_proved_for_a_real_geometry(schedule, batch, geometry):
    device = Device(workers=264, tiling_workers=264, interpreted=False)
    made = make_plan(
        qwen3_graph(geometry, 1024), tiling(geometry, batch, device, "bfloat16"), schedule, 264
    )
    made.verify()


@settings(max_examples=60, deadline=None)
@given(program=programs(), seed=st.randoms(use_true_random=False), workers=st.integers(1, 5))
def test_whatever_a_schedule_decides_its_plan_is_proved(program, seed, workers):
    def decide(ctx: Context) -> None:
        while ready := ctx.ready():
            chosen = seed.sample(ready, seed.randint(1, len(ready)))
            share = seed.choice([1.0, 0.5, slice(0, None, 2), slice(-1, None), "any"])
            ctx.execute(chosen, workers=share, priority=seed.randint(-1, 1), fuse=seed.random() < 0.8)

    made = plan_or_none(program, Written(decide), workers)
    if made is not None:
        made.verify()


def test_execute_places_operators_on_the_workers_it_is_given():
    def decide(ctx: Context) -> None:
        ctx.execute(ctx.ready(), workers=slice(1, None))
        ctx.execute(ctx.ready(), workers=0.3)
        ctx.execute(ctx.ready(), workers=1.0)

    made = plan(decide)
    names = [[made.graph.task_name(t)[0] for t in queue] for queue in queues(made)]
    assert names[0][:2] == ["f", "f"]
    assert names[1][0] == names[2][0] == "l"


def queues(made: Plan) -> list[list[int]]:
    """The tasks of each worker's queue."""
    return [made.column("task")[a:b].tolist() for a, b in pairwise(made.queue_offsets)]


def test_a_higher_priority_goes_ahead_in_the_queues():
    two = [op("a", [], ["x"]), op("b", [], ["y"]), op("end", ["x", "y"], ["z"])]

    def decide(ctx: Context) -> None:
        first, second = ctx.ready()
        ctx.execute(first)
        ctx.execute(second, priority=1)
        rest(ctx)

    made = Written(decide).plan(Program.of(two), 1, {"kind": 0})
    assert [made.graph.task_name(t)[0] for t in queues(made)[0]] == ["b", "b", "a", "a", "e", "e"]


def test_without_fuse_what_follows_waits_for_all_that_came_before():
    made = plan(lambda ctx: [ctx.execute(op, fuse=False) for op in ctx.operators])
    barriers = range(len(made.graph.event_need), len(made.event_need))
    assert len(barriers) == 2
    assert {made.event_name(e) for e in barriers} == {"barrier 0", "barrier 1"}


def twice(ctx: Context) -> None:
    load = ctx.ready()[0]
    ctx.execute(load)
    ctx.execute(load)


MISTAKES = {
    "it left out f and 1 more": lambda ctx: ctx.execute(ctx.ready()),
    "load was executed twice": twice,
    "g was executed before its input f": lambda ctx: ctx.execute(ctx.operators[::2]),
    r"workers=slice\(7, 9, None\) leaves none of the 3 workers": lambda ctx: ctx.execute(
        ctx.ready(), workers=slice(7, 9)
    ),
    "workers=1.5 is no share of the workers; it must be above 0": lambda ctx: ctx.execute(ctx.ready(), workers=1.5),
    r"split\(\[2, 2\]\) does not cut the batch of 1": lambda ctx: ctx.split([2, 2]),
    "this program's batch cannot be split": lambda ctx: ctx.split([1]),
    r"merge\('h'\): no such operator; there are load to g": lambda ctx: ctx.merge("h"),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_named(message):
    with pytest.raises(ScheduleError, match=f"schedule written: {message}"):
        plan(MISTAKES[message])


def test_mistakes_with_micro_batches_are_named(geometry):
    device = Device(workers=8, tiling_workers=8, interpreted=False)

    def planned(decide: Callable[[Context], None]) -> Plan:
        cut = tiling(geometry, 4, device, "bfloat16")
        return make_plan(qwen3_graph(geometry, 64), cut, Written(decide), 8)

    def split_again(ctx: Context) -> None:
        ctx.split([1, 3])
        ctx.split([2, 2])

    def merge_late(ctx: Context) -> None:
        ctx.split([1, 3])
        ctx.execute(ctx.ready())
        ctx.merge("embedding")

    def stale(ctx: Context) -> None:
        whole = ctx.ready()[0]
        ctx.split([2, 2])
        ctx.execute(whole)

    def forgotten(ctx: Context) -> None:
        ctx.split([1, 3])
        while ready := [op for op in ctx.ready() if not (op.part and op.part.number)]:
            ctx.execute(ready)

    for decide, message in (
        (split_again, "the batch is split already; merge it first"),
        (merge_late, r"merge\('embedding'\): embedding\[0:1\] is placed already"),
        (stale, "embedding is no operator of the batch as it is split now"),
        (forgotten, r"it left out embedding\[1:4\]"),
    ):
        with pytest.raises(ScheduleError, match=message):
            planned(decide)


def test_a_schedule_without_the_method_says_so():
    with pytest.raises(NotImplementedError, match=r"Schedule has no method schedule\(ctx\)"):
        Schedule().plan(Program.of([op("load", [], ["x"])]), 1, {"kind": 0})
