"""A plan that cannot finish ends in a DeadlockError that says where; the model stays usable."""

import dataclasses

import pytest
import torch
from checkpoints import small_model

from megaflow import DeadlockError, InputError, MegaModel
from megaflow.plan import Plan
from megaflow.records import FIELDS
from megaflow.runtime import LoadedPlan

pytestmark = pytest.mark.interpreter


def broken(loaded: LoadedPlan, plan: Plan) -> LoadedPlan:
    """The same launch with another plan, and a short bound."""
    compiled_in = loaded._constants
    return LoadedPlan(plan, loaded._table, loaded._control, compiled_in["BODIES"], compiled_in["CONFIG"], timeout_s=0.2)


def without(plan: Plan, column: str, record: int, value: int) -> Plan:
    records = plan.records.copy()
    records[record, FIELDS.index(column)] = value
    return dataclasses.replace(plan, records=records)


@pytest.fixture
def model():
    model = MegaModel.from_hf(small_model(), max_seq_len=64, progress=False)
    model.prefill([[1, 2, 3]])
    return model


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_a_dropped_notify_is_reported_and_the_model_stays_usable(model, schedule):
    model.set_schedule(schedule)
    wanted = model.generate([[1, 2, 3]], 4)
    decoder = model._decoder
    good = decoder.plan(model.schedule)
    place = next(
        i for i, task in enumerate(good.plan.column("task"))
        if good.plan.graph.operators[good.plan.graph.operator[task]].name == "layers.0.o_proj"
    )  # fmt: skip
    decoder._plans[1, model.schedule] = broken(good, without(good.plan, "notify0", place, -1))
    message = {
        "static": r"layers.0.gate_up\[\d, \d, 0\] for event layers.0.o_proj\[0, 0\]: seen 1, needed 2",
        "dynamic": r"0.2 s for a ready task; first in line is layers.0.gate_up\[\d, \d, 0\], which waits for event "
        r"layers.0.o_proj\[0, 0\]: seen 1, needed 2",
    }
    with pytest.raises(DeadlockError, match=message[schedule]):
        model.generate([[1, 2, 3]], 4)
    decoder._plans[1, model.schedule] = good
    good.reset()  # the two shared a control block
    assert torch.equal(model.generate([[1, 2, 3]], 4), wanted)


def test_a_wait_for_too_many_notifies_is_reported(model):
    decoder = model._decoder
    good = decoder.plan(model.schedule)
    place = int((good.plan.column("wait0") >= 0).nonzero()[0][-1])
    decoder._plans[1, model.schedule] = broken(good, without(good.plan, "need0", place, 1000))
    for _ in range(2):
        model.prefill([[1, 2, 3]])
        with pytest.raises(DeadlockError, match=r"needed 1000"):
            model.decode(torch.tensor([1]))


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_a_launch_that_stops_between_the_splits_of_attention_leaves_nothing_behind(schedule):
    model = MegaModel.from_hf(small_model(num_key_value_heads=1), max_seq_len=128, progress=False)
    prompt = [list(range(1, 90))]  # two splits
    model.set_schedule(schedule)
    wanted = model.generate(prompt, 3)
    decoder = model._decoder
    good = decoder.plan(model.schedule)
    graph = good.plan.graph
    assert graph.operators[2].grid == (1, 1, 2)
    records = good.plan.records.copy()
    if schedule == "dynamic":  # the second split is never released: its wait is counted twice
        split = int((graph.operator[good.plan.column("task")] == 2).nonzero()[0][1])
        count = good.plan.wait_count.copy()
        count[split] += 1
        plan = dataclasses.replace(good.plan, wait_count=count)
    else:
        split = int((graph.operator[good.plan.column("task")] == 2).nonzero()[0][1])
        records[split, FIELDS.index("kind")] = 99  # no body runs
        records[split, FIELDS.index("notify0")] = -1
        plan = dataclasses.replace(good.plan, records=records)
    decoder._plans[1, model.schedule] = broken(good, plan)
    with pytest.raises(DeadlockError):
        model.generate(prompt, 3)
    with pytest.raises(InputError, match="call prefill first"):
        model.decode(torch.tensor([1]))
    decoder._plans[1, model.schedule] = good
    good.reset()
    assert torch.equal(model.generate(prompt, 3), wanted)
