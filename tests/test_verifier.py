"""plan.verify() accepts what is right and nothing else: held against all interleavings of small plans."""

import dataclasses
import time

import numpy as np
import pytest
from exhaustive import TooManyStates, wrong_in_some_interleaving
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from programs import plan_or_none, programs
from routed import Shape, partitions, shapes
from test_schedules import VARIANTS
from test_taskgraph import op
from transformers import Qwen3Config

from megaflow import VerificationError
from megaflow.events import NONE
from megaflow.models.geometry import read_geometry
from megaflow.models.planner import make_plan
from megaflow.models.qwen3 import qwen3_graph
from megaflow.models.tiling import tiling
from megaflow.plan import Plan
from megaflow.records import FIELDS, OF_GROUP, UNBOUNDED
from megaflow.scheduler import Dynamic, Hybrid, Program, Schedule, Static, Unfused
from megaflow.target import H200


@pytest.mark.parametrize("schedule", VARIANTS, ids=repr)
@settings(max_examples=60, deadline=None)
@given(program=programs(), workers=st.integers(1, 5))
def test_plans_of_random_programs_are_proved(schedule, program, workers):
    plan = plan_or_none(program, schedule, workers)
    if plan is not None:
        assert plan.verify().tasks == plan.graph.tasks


def with_field(plan: Plan, record: int, name: str, value: int) -> Plan:
    records = plan.records.copy()
    records[record, FIELDS.index(name)] = value
    return dataclasses.replace(plan, records=records)


def with_value(plan: Plan, array: str, index: int | tuple[int, int], value: int) -> Plan:
    values = getattr(plan, array).copy()
    values[index] = value
    return dataclasses.replace(plan, **{array: values})


def record_of(plan: Plan, name: str) -> int:
    return next(
        int(r) for r in np.flatnonzero(plan.is_task) if plan.graph.task_name(plan.column("task")[r]).startswith(name)
    )


@st.composite
def mutated_queues(draw, plan: Plan) -> Plan:
    """One wait, count, notify or task of a static plan dropped or moved."""
    record = draw(st.integers(0, len(plan.records) - 1))
    what = draw(st.sampled_from(["wait", "need", "notify", "swap", "drop", "move", "copy", "final"]))
    any_event = st.integers(NONE, len(plan.event_need) - 1)
    column = draw(st.sampled_from("01"))
    if what == "wait":
        moved = draw(any_event)
        need = draw(st.sampled_from([plan.event_need[moved], plan.records[record, FIELDS.index(f"need{column}")]]))
        return with_field(with_field(plan, record, f"wait{column}", moved), record, f"need{column}", int(need))
    if what == "need":
        field = draw(st.sampled_from(["need0", "need1"]))
        value = plan.records[record, FIELDS.index(field)] + draw(st.sampled_from([-1, 1]))
        return with_field(plan, record, field, int(value))
    if what == "notify":
        return with_field(plan, record, f"notify{column}", draw(any_event))
    if what == "final":
        event_number = draw(st.integers(0, len(plan.event_need) - 1))
        value = plan.event_need[event_number] + draw(st.sampled_from([-1, 1]))
        return with_value(plan, "event_need", event_number, int(value))
    other = draw(st.integers(0, len(plan.records) - 1))
    if what in ("swap", "copy"):
        records = plan.records.copy()
        records[record] = plan.records[other]
        if what == "swap":
            records[other] = plan.records[record]
        return dataclasses.replace(plan, records=records)
    queued = int(plan.queue_offsets[-1])
    record = min(record, queued - 1)
    worker = int(np.searchsorted(plan.queue_offsets[1:], record, side="right"))
    records = np.delete(plan.records, record, 0)
    offsets = plan.queue_offsets.copy()
    offsets[worker + 1 :] -= 1
    if what == "move":
        place = draw(st.integers(0, int(offsets[-1])))
        to = draw(st.sampled_from([w for w in range(plan.workers) if offsets[w] <= place <= offsets[w + 1]]))
        records = np.insert(records, place, plan.records[record], 0)
        offsets[to + 1 :] += 1
    elif queued < len(plan.records):
        # what drains hand out moves up
        drains = records[:, FIELDS.index("kind")] < 0
        records[drains, FIELDS.index("c0")] -= 1
    return dataclasses.replace(plan, records=records, queue_offsets=offsets)


@st.composite
def mutated_triggers(draw, plan: Plan) -> Plan:
    """One trigger, count, notify or task of a dynamic plan dropped or moved."""
    tasks = st.integers(0, plan.graph.tasks - 1)
    what = draw(st.sampled_from(["trigger", "drop", "wait_count", "event_need", "notify", "initial", "task"]))
    if what == "trigger":
        return with_value(plan, "triggers", draw(st.integers(0, len(plan.triggers) - 1)), draw(tasks))
    if what == "drop":
        place = draw(st.integers(0, len(plan.triggers) - 1))
        offsets = plan.triggers_of - (plan.triggers_of > place)
        triggers = np.delete(plan.triggers, place)
        return dataclasses.replace(plan, triggers=triggers, triggers_of=offsets.astype(np.int32))
    if what in ("wait_count", "event_need"):
        values = getattr(plan, what)
        index = draw(st.integers(0, len(values) - 1))
        return with_value(plan, what, index, int(values[index]) + draw(st.sampled_from([-1, 1])))
    if what == "notify":
        moved = draw(st.integers(NONE, len(plan.event_need) - 1))
        return with_field(plan, draw(tasks), "notify" + draw(st.sampled_from("01")), moved)
    if what == "initial":
        return with_value(plan, "initial", draw(st.integers(0, len(plan.initial) - 1)), draw(tasks))
    records = plan.records.copy()
    records[draw(tasks)] = plan.records[draw(tasks)]
    return dataclasses.replace(plan, records=records)


@st.composite
def mutated_creation(draw, plan: Plan) -> Plan:
    """One number by which tasks are created at run time is another, or something that all dynamic plans have."""
    what = draw(st.sampled_from(["trigger", "need", "bound", "field", "operator", "any"]))
    if what == "any":
        return draw(mutated_triggers(plan))
    if what == "trigger":  # in place of another one, which may be of another group
        place, other = (draw(st.integers(0, len(plan.triggers) - 1)) for _ in range(2))
        return with_value(plan, "triggers", place, int(plan.triggers[other]))
    step = draw(st.sampled_from([-2, -1, 1, 2]))
    if what == "need":
        event_number = draw(st.integers(0, len(plan.event_need) - 1))
        return with_value(plan, "event_need", event_number, int(plan.event_need[event_number]) + step)
    if what == "bound":
        at = draw(st.integers(0, len(plan.bounds) - 1)), draw(st.integers(0, 2))
        return with_value(plan, "bounds", at, int(plan.bounds[at]) + step)
    name = draw(st.sampled_from(["spread", "classes", "stride0", "stride1", "notify0", "notify1"]))
    number = draw(st.sampled_from(np.flatnonzero(plan.graph.created).tolist()))
    tasks = np.flatnonzero(plan.graph.operator == number)
    if what == "field":
        tasks = tasks[[draw(st.integers(0, len(tasks) - 1))]]
    for task in tasks.tolist():
        plan = with_field(plan, task, name, int(plan.column(name)[task]) + step)
    return plan


SMALL = programs(most=3, largest=2)


@pytest.mark.parametrize("schedule", [Static(), Hybrid(), Unfused(), Dynamic()], ids=repr)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(data=st.data(), program=SMALL, workers=st.integers(1, 3))
def test_every_mutation_that_can_change_what_is_read_is_caught(schedule, data, program, workers):
    plan = plan_or_none(program, schedule, workers)
    if plan is None:
        return
    mutation = data.draw(mutated_triggers(plan) if plan.dynamic else mutated_queues(plan))
    try:
        wrong = wrong_in_some_interleaving(mutation)
    except TooManyStates:
        return
    try:
        mutation.verify()
    except VerificationError as error:
        event("caught" if wrong else "rejected though nothing goes wrong")
        assert str(error)
    else:
        event("harmless")
        assert wrong is None


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(data=st.data(), shape=shapes(layers=2, items=3, groups=2))
def test_every_mutation_of_creation_that_some_partition_shows_is_caught(data, shape):
    plan = shape.plan_or_none(Dynamic())
    if plan is None:
        return
    mutation = data.draw(mutated_creation(plan))
    try:
        mutation.verify()
    except VerificationError as error:
        event("rejected")
        assert str(error)
        return
    event("harmless")
    for _ in range(3):
        steps = data.draw(partitions(shape, 2))
        try:
            assert wrong_in_some_interleaving(mutation, 3000, steps) is None
        except TooManyStates:
            return


ROUTED = Shape(items=5, groups=3, first=2, second=2, gathered=2).plan(Dynamic())


def test_the_plan_whose_mutations_follow_is_right():
    assert ROUTED.verify().tasks == ROUTED.graph.tasks


def changed(name: str, field: str, step: int, tile: str = "") -> Plan:
    """ROUTED, with a field of an operator's records, or of those of one tile, greater by `step`."""
    plan = ROUTED
    for task in range(plan.graph.tasks):
        if plan.graph.task_name(task).startswith(f"layers.0.{name}[{tile}"):
            plan = with_field(plan, task, field, int(plan.column(field)[task]) + step)
    return plan


def bounded(column: int, step: int) -> Plan:
    """ROUTED, with a number greater by `step` in the bound of the event that creates the first operator's tasks."""
    number = int(np.flatnonzero(ROUTED.bounds[:, 0] >= 0)[0])
    return with_value(ROUTED, "bounds", (number, column), int(ROUTED.bounds[number, column]) + step)


def unbounded() -> Plan:
    number = int(np.flatnonzero(ROUTED.bounds[:, 0] >= 0)[0])
    return with_value(ROUTED, "bounds", (number, 0), UNBOUNDED)


def counted_over_steps() -> Plan:
    number = int(np.flatnonzero(ROUTED.bounds[:, 0] == OF_GROUP)[0])
    return with_value(ROUTED, "bounds", (number, 0), UNBOUNDED)


def other_need(name: str) -> Plan:
    """ROUTED, with one notify less for the first event of an operator's."""
    number = int(ROUTED.column("notify0")[record_of(ROUTED, f"layers.0.{name}[0, 0")])
    return with_value(ROUTED, "event_need", number, int(ROUTED.event_need[number]) - 1)


def swapped_groups() -> Plan:
    """ROUTED, in which the tasks of two groups change places among the triggers of the event that creates them."""
    number = int(np.flatnonzero(ROUTED.bounds[:, 0] >= 0)[0])
    begin, end = ROUTED.triggers_of[number : number + 2]
    return dataclasses.replace(ROUTED, triggers=np.concatenate((
        ROUTED.triggers[:begin], ROUTED.triggers[begin:end][::-1], ROUTED.triggers[end:]
    )))  # fmt: skip


def dropped_trigger() -> Plan:
    """ROUTED without the release of a second tile of a group."""
    place = int(np.flatnonzero(ROUTED.triggers == record_of(ROUTED, "layers.0.second[1"))[0])
    offsets = ROUTED.triggers_of - (ROUTED.triggers_of > place)
    return dataclasses.replace(ROUTED, triggers=np.delete(ROUTED.triggers, place), triggers_of=offsets.astype(np.int32))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (dropped_trigger(), r"second\[1, 0, 0\] is triggered 0 times and waits for 1"),
        (other_need("second"), r"event layers.0.second\[0, 0\] needs 1 notifies in a step and gets 2"),
        (other_need("first"), r"layers.0.first: an event of a group needs more or fewer notifies than it gets"),
        (changed("second", "spread", 1), r"layers.0.second: its records count items by different classes"),
        (changed("second", "classes", 1), r"layers.0.second: its records count items by different classes"),
        (changed("second", "stride0", -1), r"event layers.0.second\[\d, \d\] needs \d notifies in a step and gets"),
        (changed("second", "stride0", 1, "1, "), r"layers.0.second: its records count items by different classes"),
        (changed("second", "notify0", 1, "1, 0"), r"layers.0.second: what it notifies by item differs by group"),
        (changed("first", "notify0", 1), r"not of its group alone|notified by others|more or fewer notifies"),
        (bounded(0, 100), r"event layers.0.make\[0\] releases tasks up to a count that is not there"),
        (bounded(1, 1), r"event layers.0.make\[0\] releases tasks up to a count of something else"),
        (bounded(2, 1), r"event layers.0.make\[0\] releases tasks up to a count of something else"),
        (unbounded(), r"a task is released whether its group is there or not"),
        (counted_over_steps(), r"first notifies once an event that is not of its group alone"),
        (swapped_groups(), r"event layers.0.make\[0\] does not release its tasks group by group"),
    ],
)
def test_what_creates_tasks_wrongly_is_named(plan, message):
    with pytest.raises(VerificationError, match=message):
        plan.verify()


@pytest.mark.parametrize(("items", "right"), [(1, True), (2, False), (5, False)])
def test_a_groups_own_event_says_nothing_of_other_groups(items, right):
    sizes = {"items": items, "groups": min(items, 2), "gathered": items}
    plan = Shape(**sizes).plan(Dynamic())
    touching = tuple(Shape(flag=True, **sizes).operators())  # all tiles of `first` write what all of `second` read
    wrong = dataclasses.replace(plan, graph=dataclasses.replace(plan.graph, operators=touching))
    if right:
        wrong.verify()
    else:
        with pytest.raises(VerificationError, match=r"second by items\[.* before .*first by items\[.* part of flag"):
            wrong.verify()


CHAIN = [op("load", [], ["x"]), op("f", ["x"], ["y"]), op("g", ["y"], ["z"])]


def chain(schedule: Schedule) -> Plan:
    return schedule.plan(Program.of(CHAIN), 2, {"kind": 0})


def test_a_dropped_wait_is_named_by_the_two_tiles_and_their_tensor():
    plan = chain(Static())
    mine, other = record_of(plan, "load[0"), record_of(plan, "load[1")
    records = plan.records.copy()
    records[[mine, other]] = plan.records[[other, mine]]  # so that f[0] follows a tile that it does not need
    crossed = dataclasses.replace(plan, records=records)
    crossed.verify()
    with pytest.raises(VerificationError, match=r"f\[0, 0, 0\] may start before load\[0, 0, 0\] .* part of x"):
        with_field(crossed, record_of(crossed, "f[0"), "wait0", NONE).verify()


def test_a_missing_notify_is_named_by_the_tile_that_waits_forever():
    plan = chain(Static())
    with pytest.raises(VerificationError, match=r"f\[\d, 0, 0\] waits forever for event load\[\d\]: seen 0, needed 1"):
        with_field(plan, record_of(plan, "load"), "notify0", NONE).verify()


def test_a_task_that_runs_twice_is_named():
    plan = chain(Static())
    records = plan.records.copy()
    records[record_of(plan, "g[0")] = records[record_of(plan, "g[1")]
    with pytest.raises(VerificationError, match=r"g\[0, 0, 0\] runs 0 times in a step"):
        dataclasses.replace(plan, records=records).verify()


def test_a_step_that_may_end_before_its_last_tile_is_refused():
    plan = chain(Static())
    task = record_of(plan, "g[0")
    loose = with_field(plan, task, "notify0", NONE)
    with pytest.raises(VerificationError, match="the step may end before"):
        with_value(loose, "event_need", plan.graph.final_event, 1).verify()


def test_a_trigger_too_few_is_named_in_dynamic_mode():
    plan = chain(Dynamic())
    with pytest.raises(VerificationError, match=r"f\[0, 0, 0\] is triggered 1 times and waits for 2"):
        with_value(plan, "wait_count", record_of(plan, "f[0"), 2).verify()


@pytest.mark.parametrize("schedule", [Static(), Hybrid(), Unfused(), Dynamic()], ids=repr)
def test_a_plan_of_64_layers_is_proved_within_two_seconds(schedule):
    config = Qwen3Config(
        hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64, num_key_value_heads=8
    )
    geometry = read_geometry(config)
    device = H200
    plan = make_plan(qwen3_graph(geometry, 2048, 1), tiling(geometry, 1, device, "bfloat16"), schedule, 264)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        assert plan.verify().tasks == plan.graph.tasks > 60_000
        seconds.append(time.process_time() - start)
    assert min(seconds) < 2  # the least: other processes slow this one down
