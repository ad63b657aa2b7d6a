"""The simulator: closed forms for simple plans, order for random ones, and measured times of real models."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import conflicting_tiles, plan_or_none, programs

from megaflow.errors import DeadlockError
from megaflow.models.geometry import Experts, Geometry
from megaflow.models.planner import kind_numbers, program_of
from megaflow.models.qwen3 import qwen3_graph
from megaflow.models.tiling import tiling
from megaflow.plan import Plan
from megaflow.records import FIELDS
from megaflow.regions import Access, Span, TiledOperator
from megaflow.scheduler import SCHEDULES, Dynamic, Hybrid, Program, Schedule, Static, Unfused
from megaflow.scheduler.auto import predict
from megaflow.scheduler.costs import Costs
from megaflow.scheduler.simulation import folded
from megaflow.scheduler.simulator import simulate
from megaflow.target import H200

COSTS = Costs(
    memory_bytes_per_s=100,
    worker_bytes_per_s=10,
    worker_flops_per_s=5,
    start_s=1,
    task_s=2,
    joined_s=3,
    event_s=0.5,
    atomic_s=0.25,
)
VARIANTS = [*SCHEDULES.values(), Static(interleave=True), Dynamic(queues=3)]


def tiles(name: str, count: int, size: int, reads: str | None = None, **more) -> TiledOperator:
    """`count` tiles that read `size` bytes each, and all of what the operator `reads` writes."""

    def access(tensor: str, span: Span) -> tuple[Access, ...]:
        return (Access(tensor, (64,), (span,)),)

    inputs = access(reads, Span.whole(64)) if reads else ()
    return TiledOperator(name, "kind", (count,), inputs, access(name, Span.tiles(0, 1)), size, **more)


def chain(length: int, size: int, **more) -> list[TiledOperator]:
    """Operators of one tile, each of which needs the one before."""
    return [tiles(f"op{i}", 1, size, f"op{i - 1}" if i else None, **more) for i in range(length)]


def planned(ops: list[TiledOperator], workers: int, schedule: Schedule | None = None) -> Plan:
    """The plan of a schedule, static by default."""
    schedule = schedule or Static()
    return schedule.plan(Program.of(ops), workers, {"kind": 0})


@pytest.mark.parametrize(
    ("work", "seconds"),
    [({}, 4 + 2), ({"tile_flops": 10}, 4 + 2), ({"tile_flops": 100}, 20 + 2), ({"joined": True}, 4 + 2 + 3)],
)
def test_a_tile_takes_the_longer_of_loading_and_computing_and_what_every_task_costs(work, seconds):
    simulation = simulate(planned([tiles("op", 1, 40, **work)], 3), COSTS)
    assert simulation.seconds == pytest.approx(1 + seconds + 0.5)
    assert simulation.bubble_share == pytest.approx(1 - seconds / (3 * simulation.seconds))


@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_chain_on_one_worker_has_its_tasks_end_to_end(length):
    assert simulate(planned(chain(length, 40), 1), COSTS).seconds == pytest.approx(length * (1 + 4 + 2) + 0.5)


@pytest.mark.parametrize("length", [1, 2, 7])
def test_in_a_chain_over_workers_the_next_has_been_taken_and_pays_for_the_event(length):
    assert simulate(planned(chain(length, 40), 2), COSTS).seconds == pytest.approx(1 + length * (4 + 2 + 0.5))


def test_what_was_prefetched_while_waiting_is_not_loaded_again():
    plan = planned(chain(3, 40, early_bytes=30), 2)
    assert simulate(plan, COSTS).seconds == pytest.approx(1 + 4 + 2 + 2 * (0.5 + 1 + 2) + 0.5)


def test_a_prefetch_that_the_event_cuts_short_counts_as_far_as_it_came():
    plan = planned([tiles("a", 1, 10), tiles("b", 1, 200, "a", early_bytes=200)], 2)
    b = simulate(plan, COSTS)  # a runs from 1 to 4, b loads 35 bytes until 4.5
    assert b.run[1] == pytest.approx(4.5)
    assert b.end[1] == pytest.approx(1 + 20 + 2)


@pytest.mark.parametrize(("count", "workers", "rate"), [(6, 2, 10), (6, 6, 10), (40, 20, 5), (60, 60, 100 / 60)])
def test_independent_tiles_run_in_rounds_and_share_the_bandwidth(count, workers, rate):
    simulation = simulate(planned([tiles("op", count, 40)], workers), COSTS)
    assert simulation.seconds == pytest.approx(count // workers * (1 + 40 / rate + 2) + 0.5)
    assert np.bincount(simulation.worker).tolist() == [count // workers] * workers


def test_when_one_load_ends_the_other_gets_the_whole_bandwidth():
    narrow = dataclasses.replace(COSTS, memory_bytes_per_s=10)
    simulation = simulate(planned([tiles("a", 1, 40), tiles("b", 1, 80)], 2), narrow)
    assert simulation.end.tolist() == pytest.approx([1 + 8 + 2, 1 + 8 + 4 + 2])


def test_tiles_that_read_the_same_bytes_use_the_memory_once():
    narrow = dataclasses.replace(COSTS, memory_bytes_per_s=10)
    assert simulate(planned([tiles("op", 2, 40, readers=2)], 2), narrow).seconds == pytest.approx(1 + 4 + 2 + 0.5)


def test_irregular_tiles_beyond_the_filled_share_do_nothing():
    simulation = simulate(planned([tiles("op", 4, 40, irregular=True)], 4), COSTS, fill=0.375)
    assert (simulation.end - simulation.run).tolist() == pytest.approx([4 + 2, 2 + 2, 0, 0])


def test_irregular_tiles_beyond_the_expected_places_do_nothing_whatever_the_context():
    simulation = simulate(planned([tiles("op", 4, 40, irregular=True, expected=1.5)], 4), COSTS, fill=0)
    assert (simulation.end - simulation.run).tolist() == pytest.approx([4 + 2, 2 + 2, 0, 0])


def test_a_tile_from_a_drain_costs_a_ticket_and_every_worker_draws_one_too_many():
    plan = planned([tiles("op", 4, 40, irregular=True)], 2, Hybrid())
    simulation = simulate(plan, COSTS)
    assert simulation.seconds == pytest.approx(2 * (0.25 + 1 + 4 + 2) + 0.25 + 0.5)


def test_in_dynamic_mode_a_link_of_a_chain_costs_a_notify_a_push_and_a_look():
    simulation = simulate(planned(chain(3, 40), 2, Dynamic()), COSTS)
    task, notify, push, look = 1 + 4 + 2, 0.25, 0.75, 0.25
    links = 2 * (notify + push + look + task)
    assert simulation.seconds == pytest.approx(2 * 0.25 + task + links + notify + push + look)


@pytest.mark.parametrize("ops", [chain(5, 40), [tiles("op", 12, 40)], [*chain(3, 40), tiles("end", 8, 20, "op2")]])
@pytest.mark.parametrize("workers", [1, 3, 8])
def test_barriers_never_make_these_faster(ops, workers):
    static, unfused = (simulate(planned(ops, workers, schedule), COSTS) for schedule in (Static(), Unfused()))
    assert unfused.seconds >= static.seconds


@pytest.mark.parametrize("schedule", VARIANTS, ids=repr)
@settings(max_examples=60, deadline=None)
@given(program=programs(), workers=st.integers(1, 5), fill=st.floats(0, 1))
def test_every_task_is_simulated_once_by_a_free_worker_after_all_it_conflicts_with(schedule, program, workers, fill):
    plan = plan_or_none(program, schedule, workers)
    if plan is None:
        return
    simulation = simulate(plan, COSTS, fill)
    start, run, end = simulation.start, simulation.run, simulation.end
    assert ((start >= 0) & (start <= run) & (run <= end) & (end <= simulation.seconds)).all()
    assert 0 <= simulation.bubble_share <= 1
    early, late = np.nonzero(conflicting_tiles(plan.graph))
    assert (end[early] <= run[late]).all()
    seen = 0
    for worker in range(workers):
        timeline = simulation.timeline(worker)
        seen += len(timeline)
        assert all(one.end <= other.start for one, other in pairwise(timeline))
    assert seen == plan.graph.tasks
    assert sum(op.seconds for op in folded(simulation.operator_times())) == pytest.approx(end.max())


@pytest.mark.parametrize("schedule", [Static(), Dynamic()], ids=repr)
def test_a_plan_that_cannot_finish_is_a_deadlock(schedule):
    plan = planned(chain(3, 40), 2, schedule)
    records = plan.records.copy()
    records[0, FIELDS.index("notify0")] = -1
    with pytest.raises(DeadlockError, match="tasks are left"):
        simulate(dataclasses.replace(plan, records=records), COSTS)


SMALL = Geometry(28, 1024, 3072, 16, 8, 128, 151936, True, 1e-6, 40960)  # Qwen3-0.6B
LARGE = Geometry(36, 4096, 12288, 32, 8, 128, 151936, False, 1e-6, 40960)  # Qwen3-8B
SPARSE = Geometry(
    48, 2048, 6144, 32, 4, 128, 151936, False, 1e-6, 40960, Experts(128, 8, 768, True, tuple(range(48)))
)  # Qwen3-30B-A3B
NUMBERS = kind_numbers(qwen3_graph(SMALL, 16, 1))
LENGTH, CONTEXT = 613, 562  # of the benchmark: prompt 512, 100 new tokens


def real_program(model: Geometry, batch: int) -> Program:
    return program_of(qwen3_graph(model, LENGTH, batch), tiling(model, batch, H200, "bfloat16"))


@pytest.mark.parametrize(
    ("model", "batch", "static_ms", "dynamic_ms"),
    [
        (SMALL, 1, 0.875, 1.542),
        (SMALL, 8, 1.245, 1.822),
        (SMALL, 64, 2.997, 3.837),
        (LARGE, 1, 4.270, 5.225),
        (LARGE, 8, 4.772, 5.550),
        (LARGE, 64, 7.604, 8.778),
        (SPARSE, 1, 3.029, 4.442),
        (SPARSE, 8, 8.573, 9.999),
    ],
)
def test_predictions_are_within_8_percent_of_what_an_h200_was_measured_to_take(model, batch, static_ms, dynamic_ms):
    program = real_program(model, batch)
    for schedule, measured_ms in ((Static(), static_ms), (Dynamic(), dynamic_ms)):
        numbers = kind_numbers(qwen3_graph(model, LENGTH, batch))
        predicted = predict(program, schedule, H200.workers, numbers, fill=CONTEXT / LENGTH)
        assert 1e3 * predicted == pytest.approx(measured_ms, rel=0.08), schedule


@pytest.mark.parametrize("schedule", [Static(), Hybrid()], ids=repr)
def test_a_prediction_from_a_few_layers_is_that_of_all(schedule):
    program = real_program(SMALL, 1)
    whole = simulate(schedule.plan(program, H200.workers, NUMBERS)).seconds
    assert predict(program, schedule, H200.workers, NUMBERS) == pytest.approx(whole, rel=0.02)
