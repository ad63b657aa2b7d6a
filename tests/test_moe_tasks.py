"""The task kinds of sparse layers, in the kernel and as torch tiles, against their oracles, for any routing."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moe_layer import exact, pack_experts, slots_of
from onetask import EPS, config, model_dtype, on_device, poisoned, relative_error, run_operator, tolerance

from megaflow.errors import PlanError
from megaflow.graph import Tensor
from megaflow.kinds import KernelConfig
from megaflow.tasks import COMBINE, EXPERT_LINEAR, GROUP, SLOT_LINEAR, TOPK
from megaflow.tasks.combine import combine_parts
from megaflow.tasks.common import LINE
from megaflow.tasks.expert_linear import active_experts
from megaflow.tasks.group import LISTS
from megaflow.tasks.packing import padded
from megaflow.tasks.slot_linear import slot_parts

# batch, token tile, experts, experts of a token
ROUTINGS = [(1, 1, 60, 4), (2, 16, 5, 1), (5, 1, 5, 2), (16, 16, 20, 3), (17, 16, 5, 4)]
by_routing = pytest.mark.parametrize("routing", ROUTINGS, ids=lambda r: "B{}-T{}-E{}-K{}".format(*r))
by_how = pytest.mark.parametrize("how", ["static", "dynamic", "torch"])


def run(
    kind: str,
    inputs: dict[str, Tensor],
    outputs: dict[str, Tensor],
    buffers: dict[str, torch.Tensor],
    kernel: KernelConfig,
    batch: int,
    how: str,
    **attrs: Any,
) -> None:
    """One operator, by the kernel in a schedule, or tile by tile in torch."""
    run_operator(kind, inputs, outputs, buffers, kernel, {"B": batch}, how, **attrs)


def random_choice(batch: int, experts: int, slots: int) -> torch.Tensor:
    """int64 [batch, slots], different experts in each row; some experts are never chosen."""
    shunned = torch.rand(experts) < 0.3
    return (torch.rand(batch, experts) - shunned.float()).topk(slots, 1).indices


def skewed_choice(batch: int, experts: int, slots: int) -> torch.Tensor:
    """All tokens choose the last experts."""
    return (experts - 1 - torch.arange(slots)).repeat(batch, 1)


by_how_and_choice = pytest.mark.parametrize(
    ("how", "choice"), [("static", random_choice), ("dynamic", skewed_choice), ("torch", random_choice)]
)


def reference_lists(experts: torch.Tensor) -> dict[str, list[int]]:
    """`group`'s lists by plain loops."""
    chosen = experts.reshape(-1).tolist()
    active = sorted(set(chosen))
    pairs, indptr = [], [0]
    for expert in active:
        pairs += [pair for pair, e in enumerate(chosen) if e == expert]
        indptr.append(len(pairs))
    return {"active": active, "active_count": [len(active)], "indptr": indptr, "pairs": pairs}


def list_tensors(batch: int, experts: int, slots: int) -> dict[str, Tensor]:
    places = min(experts, batch * slots)
    lengths = {"active": places, "active_count": 1, "indptr": places + 1, "pairs": batch * slots}
    return {role: Tensor(role, (length,), "int32") for role, length in lengths.items()}


def list_buffers(experts: torch.Tensor, tensors: dict[str, Tensor]) -> dict[str, torch.Tensor]:
    """The lists of a choice on the device; what they leave out is poisoned."""
    buffers = {role: poisoned(*tensor.shape, dtype=torch.int32) for role, tensor in tensors.items()}
    for role, values in reference_lists(experts).items():
        buffers[role][: len(values)] = torch.tensor(values)
    return buffers


def wide(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As the decoder stores it: whole blocks wide, padding zero."""
    return on_device(torch.nn.functional.pad(x, (0, padded(x.shape[1]) - x.shape[1])), dtype)


@pytest.mark.parametrize(("how", "normalised"), [("static", True), ("dynamic", False), ("torch", True)])
@by_routing
def test_topk_equals_its_oracle(routing, how, normalised):
    batch, tokens, experts, slots = routing
    logits = torch.randn(batch, experts + 1)
    logits[:, 1] = logits[:, -2] = logits.max()  # ties
    logits[:, -1] = logits.max() + 1  # no expert's
    inputs = {"logits": Tensor("logits", (batch, experts + 1), "float32")}
    outputs = {"experts": Tensor("experts", (batch, slots), "int32"),
               "weights": Tensor("weights", (batch, slots), "float32"),
               "slot_of": Tensor("slot_of", (batch, experts), "int32")}  # fmt: skip
    buffers = {"logits": wide(logits, torch.float32), "experts": poisoned(batch, slots, dtype=torch.int32),
               "weights": poisoned(batch, slots), "slot_of": poisoned(batch, experts, dtype=torch.int32)}  # fmt: skip
    run("topk", inputs, outputs, buffers, config(tokens), batch, how, count=experts, slots=slots,
        norm_topk_prob=normalised)
    wanted = TOPK.oracle({"logits": logits.double()}, experts, slots, normalised)
    for role in ("experts", "slot_of"):
        assert buffers[role].tolist() == wanted[role].tolist()
    assert relative_error(buffers["weights"], wanted["weights"]) < 1e-5


def choose(logits: torch.Tensor, slots: int) -> torch.Tensor:
    """The experts that the kernel chooses."""
    shape = tuple(logits.shape)
    outputs = {"experts": Tensor("experts", (shape[0], slots), "int32"),
               "weights": Tensor("weights", (shape[0], slots), "float32"),
               "slot_of": Tensor("slot_of", shape, "int32")}  # fmt: skip
    buffers = {"logits": on_device(logits), "experts": poisoned(shape[0], slots, dtype=torch.int32),
               "weights": poisoned(shape[0], slots), "slot_of": poisoned(*shape, dtype=torch.int32)}  # fmt: skip
    inputs = {"logits": Tensor("logits", shape, "float32")}
    run("topk", inputs, outputs, buffers, config(1), shape[0], "static", count=shape[1], slots=slots,
        norm_topk_prob=True)
    return buffers["experts"].cpu()


def test_of_equal_logits_the_lowest_experts_are_chosen_first():
    assert choose(torch.tensor([[0.0, -0.0, 0.0, -0.0], [-1.0, 2.0, -1.0, 2.0]]), 3).tolist() == [[0, 1, 2], [1, 3, 0]]


def test_whatever_the_logits_are_the_chosen_experts_exist_and_differ():
    logits = torch.full((3, 7), float("nan"))
    logits[1] = float("-inf")
    logits[2] = float("inf")
    for chosen in choose(logits, 4).tolist():
        assert len(set(chosen)) == 4
        assert set(chosen) <= set(range(7))


def grouped(experts: torch.Tensor, count: int, how: str) -> dict[str, torch.Tensor]:
    """The lists that the kernel makes of experts [B, K]."""
    batch, slots = experts.shape
    outputs = list_tensors(batch, count, slots)
    buffers = {"slot_of": wide(slots_of(experts, count), torch.int32)}
    buffers |= {role: poisoned(*tensor.shape, dtype=torch.int32) for role, tensor in outputs.items()}
    inputs = {"slot_of": Tensor("slot_of", (batch, count), "int32")}
    run("group", inputs, outputs, buffers, config(1), batch, how, slots=slots)
    return {role: buffers[role].cpu() for role in LISTS}


@by_how_and_choice
@by_routing
def test_group_equals_its_oracle(routing, choice, how):
    batch, _, count, slots = routing
    experts = choice(batch, count, slots)
    lists = grouped(experts, count, how)
    for role, values in GROUP.oracle({"slot_of": slots_of(experts, count)}, slots).items():
        assert lists[role][: len(values)].tolist() == values.tolist(), role


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_each_pair_is_in_the_list_of_its_expert_once(data):
    count = data.draw(st.integers(1, 140))
    batch, slots = data.draw(st.integers(1, 24)), data.draw(st.integers(1, min(count, 8)))
    rows = st.lists(st.integers(0, count - 1), min_size=slots, max_size=slots, unique=True)
    experts = torch.tensor(data.draw(st.lists(rows, min_size=batch, max_size=batch)))
    lists = grouped(experts, count, "static")
    wanted = reference_lists(experts)
    assert {role: lists[role][: len(values)].tolist() for role, values in wanted.items()} == wanted
    active = int(lists["active_count"])
    bounds = lists["indptr"].tolist()
    found = [
        (int(lists["active"][place]), pair)
        for place in range(active)
        for pair in lists["pairs"][bounds[place] : bounds[place + 1]].tolist()
    ]
    assert sorted(found) == sorted((int(expert), pair) for pair, expert in enumerate(experts.reshape(-1)))


def expert_case(
    epilogue: str, routing: tuple[int, int, int, int], choice: torch.Tensor, rows: int, columns: int
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Inputs and outputs of an expert_linear, its buffers by name, and values for the oracle by role."""
    batch, _, experts, slots = routing
    pairs = batch * slots
    x_rows = batch if epilogue == "silu" else pairs
    lists = list_tensors(batch, experts, slots)
    weight = exact(experts, rows, columns)
    values = {"x": exact(x_rows, columns), "weight": weight}
    inputs = {"x": Tensor("x", (x_rows, columns)), "weight": Tensor("w", (experts, rows, columns)), **lists}
    buffers = {"x": wide(values["x"], model_dtype()), **list_buffers(choice, lists)}
    buffers["w"] = pack_experts(weight, reference_lists(choice)["active"])
    if epilogue == "silu":
        values["ssq"] = torch.rand(batch, 7).double() + 0.1
        inputs["ssq"] = Tensor("ssq", (batch, 7), "float32")
        buffers["ssq"] = on_device(values["ssq"], torch.float32)
        outputs = {"out": Tensor("out", (pairs, rows // 2))}
        buffers["out"] = poisoned(pairs, rows // 2, dtype=model_dtype())
    else:
        outputs = {"out": Tensor("out", (pairs, rows), "float32")}
        buffers["out"] = poisoned(pairs, rows)
    return inputs, outputs, buffers, values | GROUP.oracle({"slot_of": slots_of(choice, experts)}, slots)


@by_how_and_choice
@pytest.mark.parametrize("epilogue", ["silu", "store"])
@by_routing
def test_expert_linear_equals_its_oracle_and_reads_active_experts_only(routing, epilogue, choice, how):
    batch, tokens, experts, slots = routing
    rows, columns = (96, 144) if epilogue == "silu" else (80, 48)
    inputs, outputs, buffers, values = expert_case(epilogue, routing, choice(batch, experts, slots), rows, columns)
    run("expert_linear", inputs, outputs, buffers, config(tokens), batch, how, epilogue=epilogue)
    assert relative_error(buffers["out"], EXPERT_LINEAR.oracle(values, epilogue, EPS)["out"]) < tolerance()


@by_how
@pytest.mark.parametrize("shared", [False, True], ids=["routed", "shared"])
@by_routing
def test_combine_equals_its_oracle(routing, shared, how):
    batch, tokens, experts, slots = routing
    width, kernel = 208, config(tokens)
    tiles = combine_parts(width)
    values = {"expert_out": torch.randn(batch * slots, width).double(), "weights": torch.rand(batch, slots).double(),
              "h": torch.randn(batch, width).double(), "gamma": torch.rand(width).double() + 0.5}  # fmt: skip
    if shared:
        values |= {"shared_out": torch.randn(batch, width).double(), "gate": torch.randn(batch, experts + 1).double()}
    inputs = {role: Tensor(role, tuple(tensor.shape), "float32") for role, tensor in values.items()}
    outputs = {"h_out": Tensor("h2", (batch, width), "float32"), "out": Tensor("out", (batch, width)),
               "ssq_out": Tensor("ssq2", (batch, tiles), "float32")}  # fmt: skip
    buffers = {role: on_device(tensor, torch.float32) for role, tensor in values.items()}
    buffers |= {"h2": poisoned(batch, width), "ssq2": poisoned(batch, tiles),
                "out": poisoned(batch, width, dtype=model_dtype())}  # fmt: skip
    run("combine", inputs, outputs, buffers, kernel, batch, how)
    wanted = COMBINE.oracle(values)
    for role in ("h_out", "out"):
        assert relative_error(buffers[outputs[role].name], wanted[role]) < tolerance(), role
    assert relative_error(buffers["ssq2"].sum(1, keepdim=True), wanted["ssq_out"]) < tolerance()


def test_too_many_experts_are_refused_with_the_limit():
    inputs = {"logits": Tensor("logits", (1, 513), "float32")}
    outputs = {"experts": Tensor("experts", (1, 4), "int32"), "weights": Tensor("weights", (1, 4), "float32")}
    with pytest.raises(PlanError, match=r"4 of 513 experts; .* up to 16 of up to 512"):
        run("topk", inputs, outputs, {}, config(1), 1, "torch", count=513, slots=4, norm_topk_prob=True)


@by_how
@pytest.mark.parametrize("shared", [False, True], ids=["routed", "shared"])
@pytest.mark.parametrize(("experts", "slots"), [(5, 1), (9, 3), (20, 16)])
def test_the_experts_of_one_token_equal_their_oracle(experts, slots, shared, how):
    hidden, width, kernel = 208, 80, config(1)
    attrs = {"slots": slots, "norm_topk_prob": shared}
    values = {"logits": torch.randn(1, experts + 1).double(), "x": exact(1, hidden),
              "ssq": torch.rand(1, 7).double() + 0.1, "weight": exact(experts, 2 * width, hidden)}  # fmt: skip
    values["logits"][:, -1] = 10  # no expert's
    wanted = SLOT_LINEAR.oracle(values, "silu", EPS, **attrs)
    chosen = wanted["experts"]
    buffers = {"logits": wide(values["logits"], torch.float32), "experts": poisoned(1, slots, dtype=torch.int32),
               "x": wide(values["x"], model_dtype()), "ssq": on_device(values["ssq"], torch.float32),
               "gate_up": pack_experts(values["weight"], chosen[0].tolist()),
               "hidden": poisoned(slots, width, dtype=model_dtype())}  # fmt: skip
    inputs = {"logits": Tensor("logits", (1, experts + 1), "float32"), "x": Tensor("x", (1, hidden)),
              "ssq": Tensor("ssq", (1, 7), "float32"),
              "weight": Tensor("gate_up", (experts, 2 * width, hidden))}  # fmt: skip
    outputs = {"out": Tensor("hidden", (slots, width)), "experts": Tensor("experts", (1, slots), "int32")}
    run("slot_linear", inputs, outputs, buffers, kernel, 1, how, epilogue="silu", **attrs)
    assert relative_error(buffers["hidden"], wanted["out"]) < tolerance()
    assert buffers["experts"].tolist() == chosen.tolist()

    values["experts"] = chosen
    parts = slot_parts(hidden, slots, kernel, 3)
    values |= {"x": exact(slots, width), "weight": exact(experts, hidden, width),
               "h": torch.randn(1, hidden).double(), "gamma": torch.rand(hidden).double() + 0.5}  # fmt: skip
    if shared:
        values |= {"shared_out": torch.randn(1, hidden).double(), "gate": torch.randn(1, experts + 1).double()}
    vectors = [role for role in ("h", "gamma", "shared_out", "gate") if role in values]
    inputs = {"experts": outputs["experts"], "x": Tensor("x", (slots, width)),
              "weight": Tensor("down", (experts, hidden, width)),
              "arrivals": Tensor("arrivals", (hidden * LINE,), "int32"),
              **{role: Tensor(role, tuple(values[role].shape), "float32") for role in vectors}}  # fmt: skip
    outputs = {"sums": Tensor("sums", (slots, hidden), "float32"), "h_out": Tensor("h2", (1, hidden), "float32"),
               "out": Tensor("out", (1, hidden)), "ssq_out": Tensor("ssq2", (1, parts), "float32")}  # fmt: skip
    buffers |= {role: on_device(values[role], torch.float32) for role in vectors}
    buffers |= {"x": wide(values["x"], model_dtype()), "down": pack_experts(values["weight"], chosen[0].tolist()),
                "arrivals": on_device(torch.zeros(hidden * LINE, dtype=torch.int32)), "sums": poisoned(slots, hidden),
                "h2": poisoned(1, hidden), "out": poisoned(1, hidden, dtype=model_dtype()),
                "ssq2": poisoned(1, parts)}  # fmt: skip
    run("slot_linear", inputs, outputs, buffers, kernel, 1, how, epilogue="residual", **attrs)
    wanted = SLOT_LINEAR.oracle(values, "residual", EPS, **attrs)
    for role in ("sums", "h_out", "out"):
        assert relative_error(buffers[outputs[role].name], wanted[role]) < tolerance(), role
    assert relative_error(buffers["ssq2"].sum(1, keepdim=True), wanted["ssq_out"]) < tolerance()
    assert not buffers["arrivals"].any()


@settings(max_examples=20, deadline=None)
@given(experts=st.integers(1, 64), batch=st.integers(1, 16), data=st.data())
def test_so_many_experts_are_active_as_is_expected(experts, batch, data):
    slots = data.draw(st.integers(1, min(experts, 8)))
    mean, deviation = active_experts(experts, batch, slots)
    chosen = torch.rand(2000, batch, experts).topk(slots, 2).indices.flatten(1)
    found = torch.zeros(2000, experts).scatter_(1, chosen, 1.0).sum(1)
    assert found.mean() == pytest.approx(mean, abs=0.15 + deviation / 10)
    assert found.std() == pytest.approx(deviation, abs=0.3)
