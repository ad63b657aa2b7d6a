"""The reference VM runs real models in any order a plan allows, and finds the tile that is wrong."""

from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from checkpoints import small_model
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from megaflow import HazardError, InputError, MegaModel, PlanError
from megaflow.cli import app
from megaflow.models.comparison import Comparison, compare
from megaflow.models.reference import ReferenceVM
from megaflow.plan import Plan
from megaflow.records import FIELDS, NOTHING
from megaflow.runtime import LoadedPlan
from megaflow.scheduler import SCHEDULES, Context, Dynamic, Program, Schedule, Static
from megaflow.target import Device

pytestmark = pytest.mark.interpreter

PROMPTS = [list(range(1, 90)), [5, 6, 7], list(range(100, 170))]  # 2, 1 and 2 splits of attention
STEPS = 3
ORDERS = 10
OPERATORS = ["embedding", *(f"layers.0.{part}" for part in ("qkv", "attention", "o_proj", "gate_up", "down"))]


@dataclass(frozen=True)
class TwoBatches(Schedule):
    """Two micro-batches that follow one another at any distance, joined for the LM head."""

    def schedule(self, ctx: Context) -> None:
        ctx.split([1, ctx.batch - 1])
        ctx.merge("lm_head")
        while ready := ctx.ready():
            first = min(ready, key=lambda op: op.part.number if op.part else 0)
            ctx.execute(first, workers=slice(0, 2) if first.part and first.part.number == 0 else 1.0)


class Changed(Static):
    """As static, with one number of the plan's first record of some operator's tile changed."""

    def __init__(self, operator: str, tile: list[int], column: str, value: int) -> None:
        self.change = (operator, tile, column, value)

    def plan(self, program: Program, workers: int, kind_numbers: dict[str, int]) -> Plan:
        plan = super().plan(program, workers, kind_numbers)
        operator, tile, column, value = self.change
        names = [plan.graph.task_name(task) for task in plan.column("task")]
        records = plan.records.copy()
        records[names.index(f"{operator}{tile}"), FIELDS.index(column)] = value
        return replace(plan, records=records)


def start(layers: int, batch: int) -> tuple[MegaModel, torch.Tensor]:
    """A model after a prefill and the tokens that follow, cut as for eight workers, so that attention has splits."""
    hf = small_model(num_hidden_layers=layers, num_key_value_heads=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megaflow.models.mega_model.current_device", lambda _: Device(1, 8, 0, True))
        model = MegaModel.from_hf(hf, max_batch_size=batch, max_seq_len=128, progress=False)
    return model, model.prefill(PROMPTS[:batch]).argmax(1)


@pytest.fixture(scope="module")
def started():
    """Two layers; with the tokens that the kernel decodes next."""
    model, first = start(layers=2, batch=3)
    decoded = model.decoder.run(first, STEPS, model.schedule)
    model.prefill(PROMPTS)
    return model, first, decoded


@pytest.fixture(scope="module")
def one_layer():
    return start(layers=1, batch=2)


@pytest.mark.parametrize("schedule", [*SCHEDULES.values(), Dynamic(queues=3), TwoBatches()], ids=repr)
@settings(max_examples=3, deadline=None)
@given(workers=st.integers(1, 5), random=st.randoms(use_true_random=False))
def test_tokens_equal_the_kernels_whoever_runs_first(started, schedule, workers, random):
    model, first, decoded = started
    vm = ReferenceVM(model, schedule=schedule, workers=workers)
    assert torch.equal(vm.run(first, STEPS, random.randrange), decoded)


def test_a_run_ends_when_all_sequences_have(started):
    model, first, decoded = started
    model.decoder.set_ends([int(token) for token in decoded[:, 1]], 292)
    ended = ReferenceVM(model).run(first, STEPS)
    wanted = model.decoder.run(first, STEPS, model.schedule)
    model.prefill(PROMPTS)
    assert ended.shape[1] < STEPS
    assert torch.equal(ended, wanted)


def hazards(model: MegaModel, first: torch.Tensor, schedule: Schedule) -> list[str]:
    """What goes wrong in some orders of running."""
    found = []
    for seed in range(ORDERS):
        try:
            ReferenceVM(model, schedule=schedule).run(first, 1, Random(seed).randrange)
        except HazardError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("layer", [0, 1])
def test_a_dropped_wait_is_found_in_some_order(started, layer):
    model, first, _ = started
    name, tile = f"layers.{layer}.gate_up", [0, 0, 0]
    found = hazards(model, first, Changed(name, tile, "wait0", -1))
    assert found
    assert all(f"{name}{tile} reads " in message for message in found)
    assert any(f"not layers.{layer}.o_proj; the plan lacks a wait" in message for message in found)


def test_no_order_of_a_right_plan_is_a_hazard(started):
    model, first, _ = started
    assert not hazards(model, first, Static())


def test_a_tile_that_is_left_out_shows_as_not_finite(started):
    model, first, _ = started
    vm = ReferenceVM(model, schedule=Changed("layers.0.attention", [0, 0, 1], "kind", NOTHING))
    with pytest.raises(HazardError, match=r"layers.0.o_proj\[\d, 0, 0\] left a value in \w+ that is not finite"):
        vm.run(first)


@pytest.mark.parametrize(("limit", "last"), [({"stop_after": "layers.0.qkv"}, "qkv"), ({"layers": 1}, "down")])
def test_a_run_stops_after_an_operator_or_some_layers(started, limit, last):
    model, first, _ = started
    vm = ReferenceVM(model, **limit)
    assert vm.run(first).shape == (3, 0)
    assert vm.buffers["qkv"][:3].isfinite().all()
    assert vm.buffers["h_attended"][:3, :80].isfinite().all() == (last == "down")
    assert vm.buffers["logits"][:3, :293].isnan().all()
    assert torch.equal(vm.buffers["positions"], model.decoder.working["positions"])


def test_limits_that_make_no_sense_are_refused(started):
    model, _, _ = started
    with pytest.raises(InputError, match="layers is 3; the model has 1 to 2"):
        ReferenceVM(model, layers=3)
    with pytest.raises(InputError, match="give one of them"):
        ReferenceVM(model, layers=1, stop_after="lm_head")
    with pytest.raises(PlanError, match=r"begins with 'layers\.7'"):
        ReferenceVM(model, stop_after="layers.7")


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_every_tile_of_the_kernel_agrees_and_the_model_goes_on_as_before(one_layer, schedule):
    model, first = one_layer
    before = {name: buffer.clone() for name, buffer in model.decoder.working.items()}
    found = compare(model, first, schedule=schedule)
    assert found.difference is None
    assert found.tiles == model.decoder.load(model.schedule).plan.graph.tasks
    assert set(found.largest) == {"embedding", "linear", "attention", "select"}
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.decoder.working.items())


def test_tiles_of_micro_batches_agree(one_layer):
    model, first = one_layer
    found = compare(model, first, schedule=TwoBatches(), stop_after="layers.0.o_proj")
    assert found.difference is None
    assert found.operators == 2 * (OPERATORS.index("layers.0.o_proj") + 1)


def test_a_tile_that_the_plan_forgets_is_named(one_layer):
    model, first = one_layer
    found = compare(model, first, schedule=Changed("layers.0.o_proj", [1, 0, 0], "c0", 0))
    assert found.difference.operator == "layers.0.o_proj"
    assert found.difference.tile == (1, 0, 0)
    assert found.operators == OPERATORS.index("layers.0.o_proj") + 1
    assert "layers.0.o_proj[1, 0, 0] differs: h_attended[0, 64] is nan" in str(found.difference)


def with_wrong_weight(model: MegaModel, first: torch.Tensor, weight: str, **limit: object) -> Comparison:
    """Compare while the kernel, and only the kernel, has another weight in row 70, column 3."""
    data = model.decoder.constants[weight]
    right = LoadedPlan.launch

    def wrong(plan: LoadedPlan, steps: int) -> None:
        data[1, 0, 6, 3] += 1
        right(plan, steps)
        data[1, 0, 6, 3] -= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoadedPlan, "launch", wrong)
        return compare(model, first, **limit)


def test_a_wrong_weight_is_found_in_its_tile_unless_the_comparison_stops_before(one_layer):
    model, first = one_layer
    found = with_wrong_weight(model, first, "layers.0.gate_up").difference
    assert (found.operator, found.tile, found.place[1]) == ("layers.0.gate_up", (1, 0, 0), 35)
    assert with_wrong_weight(model, first, "layers.0.gate_up", stop_after="layers.0.o_proj").difference is None


@pytest.mark.parametrize(("tolerance", "code"), [(1e-4, 0), (0.0, 1)])
def test_the_command_check_says_whether_all_tiles_agree(tmp_path, tolerance, code):
    small_model(num_hidden_layers=1).save_pretrained(tmp_path)
    arguments = ["check", str(tmp_path), "--batch", "2", "--prompt-length", "5", "--max-seq-len", "64",
                 "--tolerance", str(tolerance), "--stop-after", "layers.0.o_proj"]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    assert ("tiles of 4 operators agree" in result.stdout) == (code == 0)
    assert ("differs:" in result.stdout) == (code == 1)
