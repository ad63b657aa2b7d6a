"""Sparse layers: what they compute, and how their tiles are ordered."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_layer import SparseLayers, exact, pack_experts, slots_of
from onetask import EPS, config, model_dtype, on_device, relative_error, tolerance

from megaflow.backend import kernel_device
from megaflow.models.geometry import Experts, Geometry
from megaflow.models.planner import bodies_of, make_plan, operator_table
from megaflow.models.qwen3 import qwen3_graph
from megaflow.models.tiling import kernel_config
from megaflow.models.tiling import tiling as model_tiling
from megaflow.plan import Plan
from megaflow.plansummary import summarise
from megaflow.runtime import LoadedPlan, new_control
from megaflow.scheduler import find_schedule
from megaflow.scheduler.reference_vm import run_plan
from megaflow.target import H200
from megaflow.tasks import GROUP
from megaflow.tasks.combine import TILE_TOKENS
from megaflow.tasks.packing import pack

A3B = SparseLayers(2, 2048, 768, 128, 8)  # Qwen3-30B-A3B


def moe(x: torch.Tensor, weights: dict[str, torch.Tensor], slots: int) -> torch.Tensor:
    """The sum of each token's experts' outputs for x [B, hidden], token by token; gate and up rows alternate."""
    out = torch.zeros_like(x)
    for token, row in enumerate(x):
        probability = (weights["router"] @ row).softmax(0)
        best = probability.topk(slots)
        for share, expert in zip((best.values / best.values.sum()).tolist(), best.indices.tolist(), strict=True):
            gate, up = (weights["gate_up"][expert] @ row).view(-1, 2).unbind(1)
            out[token] += share * (weights["down"][expert] @ (torch.nn.functional.silu(gate) * up))
    return out


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("batch", "tokens", "schedule"), [(1, 1, "static"), (18, 16, "dynamic"), (3, 16, "hybrid"), (35, 32, "dynamic")]
)
def test_a_chain_of_sparse_layers_equals_their_formula(batch, tokens, schedule):
    sizes = SparseLayers(layers=2, hidden=80, width=48, experts=6, slots=2)
    tiling = sizes.tiling(batch, config(tokens), 2)
    graph = sizes.graph()
    buffers = sizes.activations(tiling, kernel_device())
    gamma, h = torch.rand(80).double() + 0.5, torch.randn(batch, 80).double()
    buffers["gamma"][:80] = gamma
    buffers["h.0"][:, :80] = h
    buffers["normed.0"][:, :80] = h * gamma
    buffers["ssq.0"][:, 0] = h.square().sum(1)
    for layer in range(sizes.layers):
        weights = {name: exact(*shape) / 8 for name, shape in sizes.weights().items()}
        buffers[f"router.{layer}"] = on_device(pack(weights["router"]).data, model_dtype())
        for name in ("gate_up", "down"):
            buffers[f"{name}.{layer}"] = pack_experts(weights[name], list(range(sizes.experts)))
        h = h + moe(h * torch.rsqrt(h.square().mean(1, keepdim=True) + EPS) * gamma, weights, sizes.slots)
    plan = make_plan(graph, tiling, find_schedule(schedule), 1)
    table = operator_table(graph, plan, buffers).to(kernel_device())
    bodies = bodies_of(graph)
    loaded = LoadedPlan(plan, table, new_control(kernel_device()), bodies, tiling.config)
    loaded.launch(2)  # the second step finds what the first one left
    assert loaded.finish() == 2
    assert relative_error(buffers["h.2"][:, :80], h) < tolerance()
    assert relative_error(buffers["normed.2"][:, :80], h * gamma) < tolerance()
    assert relative_error(buffers["ssq.2"].sum(1), h.square().sum(1)) < tolerance()


def a3b_plan(batch: int, schedule: str) -> Plan:
    geometry = Geometry(2, 2048, 6144, 32, 4, 128, 1000, False, EPS, 4096)
    tiling = A3B.tiling(batch, kernel_config(geometry, batch, H200, "bfloat16"), H200.tiling_workers)
    return make_plan(A3B.graph(), tiling, find_schedule(schedule), H200.workers)


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
@pytest.mark.parametrize("batch", [1, 8, 70])
def test_each_tile_of_a_sparse_layer_waits_for_one_event(batch, schedule):
    plan = a3b_plan(batch, schedule)
    assert (plan.graph.waits >= 0).sum(1).max() == 1


@pytest.mark.parametrize("batch", [1, 70])
@pytest.mark.parametrize("schedule", ["static", "dynamic", "hybrid"])
def test_sparse_layers_are_ordered_right(schedule, batch):
    a3b_plan(batch, schedule).verify()


@pytest.mark.parametrize("schedule", ["static", "dynamic", "hybrid"])
def test_all_layers_of_qwen3_30b_a3b_are_planned_without_going_through_every_path_between_them(schedule):
    experts = Experts(A3B.experts, A3B.slots, A3B.width, True, tuple(range(48)))
    model = Geometry(len(experts.layers), 2048, 6144, 32, 4, 128, 151936, False, EPS, 4096, experts)
    plan = make_plan(
        qwen3_graph(model, 1024, 8), model_tiling(model, 8, H200, "bfloat16"), find_schedule(schedule), H200.workers
    )
    plan.verify()


def test_a_down_tile_waits_for_the_tiles_of_its_own_expert_only():
    graph = a3b_plan(1, "static").graph
    names = [op.name for op in graph.operators]
    gate_up, down = (graph.operator == names.index(f"layers.0.{name}") for name in ("gate_up", "down"))
    for place in range(8):
        waited = graph.waits[down & (graph.coordinates[:, 0] == place)]
        notifying = np.isin(graph.notifies, waited[waited >= 0]).any(1)
        assert (notifying == (gate_up & (graph.coordinates[:, 0] == place))).all()


def test_with_creation_a_combine_tile_waits_for_its_tokens_pairs_only():
    graph = a3b_plan(70, "dynamic").graph
    names = [op.name for op in graph.operators]
    combine = graph.operator == names.index("layers.0.combine")
    tiles_of_column = graph.operators[names.index("layers.0.down")].grid[1] // len(
        np.unique(graph.notifies[graph.operator == names.index("layers.0.down"), 0])
    )
    for token_tile, tokens in enumerate((*[TILE_TOKENS] * (70 // TILE_TOKENS), 70 % TILE_TOKENS)):
        waited = graph.waits[combine & (graph.coordinates[:, 1] == token_tile), 0]
        assert (graph.event_need[waited] == tokens * A3B.slots * tiles_of_column).all()


def test_plans_say_which_waits_are_coarsened_and_which_tasks_are_created():
    static, dynamic = (summarise(a3b_plan(70, schedule), 2, 0) for schedule in ("static", "dynamic"))
    assert [(wait.consumer, wait.producer) for wait in static.coarse] == [("layers.0.combine", "layers.0.down")]
    assert static.created == dynamic.coarse == ()
    assert dynamic.created == ("layers.0.gate_up", "layers.0.down")


SMALL_LAYERS = {slots: SparseLayers(2, 64, 32, experts, slots) for slots, experts in ((1, 6), (2, 5), (4, 9), (16, 20))}


@st.composite
def choices(draw, sizes: SparseLayers, batch: int) -> list[np.ndarray]:
    """For each layer int [batch, slots], different experts in a row: any, few experts that all choose, skewed ones."""

    def one() -> np.ndarray:
        order = draw(st.permutations(range(sizes.experts)))
        liked = draw(st.integers(sizes.slots, sizes.experts))
        random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        taken = [random.permutation(liked)[: sizes.slots] for _ in range(batch)]
        return np.array(order)[np.array(taken)]

    return [one() for _ in range(sizes.layers)]


@dataclass
class Routed:
    """A run of sparse layers on the host: which tiles of experts ran in a step, and in which order with the others."""

    plan: Plan
    choice: list[np.ndarray]
    lists: dict[str, list[int]] = field(default_factory=dict)
    ran: list[tuple[str, tuple[int, int], tuple[int, ...]]] = field(default_factory=list)  # operator, tile, its pairs

    def execute(self, task: int, _: int) -> None:
        graph = self.plan.graph
        op, (c0, c1, _) = graph.operators[graph.operator[task]], graph.coordinates[task].tolist()
        if op.kind == "group":
            chosen = torch.from_numpy(self.choice[op.layer])
            lists = GROUP.oracle({"slot_of": slots_of(chosen, chosen.max() + 1)}, chosen.shape[1])
            self.lists = {name: values.tolist() for name, values in lists.items()}
        if op.routing is None:
            self.ran.append((op.name, (c0, c1), ()))
        elif c0 < self.lists["active_count"][0]:
            begin, end = self.lists["indptr"][c0 : c0 + 2]
            self.ran.append((op.name, (self.lists["active"][c0], c1), tuple(self.lists["pairs"][begin:end])))
        else:
            assert not self.plan.creates_tasks, "a tile was created that has nothing to do"


@pytest.mark.parametrize("schedule", ["dynamic", "static", "hybrid"])
@pytest.mark.parametrize("slots", SMALL_LAYERS)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), batch=st.integers(1, 40), random=st.randoms(use_true_random=False))
def test_exactly_the_tiles_of_chosen_experts_do_something_and_tokens_follow_them(schedule, slots, data, batch, random):
    sizes = SMALL_LAYERS[slots]
    tokens = 16
    plan = make_plan(sizes.graph(), sizes.tiling(batch, config(tokens), 4), find_schedule(schedule), 3)
    choice = data.draw(choices(sizes, batch))
    run = Routed(plan, choice)
    run_plan(plan, 1, random.randrange, run.execute, lambda name: run.lists[name])
    operators = {op.name: op for op in plan.graph.operators}
    for layer in range(sizes.layers):
        for name in ("gate_up", "down"):
            done = [tile for operator, tile, _ in run.ran if operator == f"layers.{layer}.{name}"]
            rows = range(operators[f"layers.{layer}.{name}"].grid[1])
            assert sorted(done) == [(expert, row) for expert in np.unique(choice[layer]).tolist() for row in rows]
        waiting = {}  # pair: the tiles of down that are to come
        for operator, _, pairs in run.ran:
            if operator == f"layers.{layer}.down":
                for pair in pairs:
                    waiting[pair] = waiting.get(pair, 0) + 1
        columns = operators[f"layers.{layer}.down"].grid[1]
        assert waiting == dict.fromkeys(range(batch * slots), columns)
        check_tokens_follow(run, layer, TILE_TOKENS * slots, batch * slots)


def check_tokens_follow(run: Routed, layer: int, pairs_of_tile: int, pairs: int) -> None:
    """Each tile of combine comes after the tiles of down that touch its columns of its tokens' pairs."""
    down, combine = (next(op for op in run.plan.graph.operators if op.name == f"layers.{layer}.{name}")
                     for name in ("down", "combine"))  # fmt: skip
    written, read = down.writes[0].spans[1], next(a for a in combine.reads if a.tensor == "expert_out").spans[1]
    width = down.writes[0].shape[1]
    done = np.zeros((pairs, width), bool)
    for operator, (c0, c1), of_tile in run.ran:
        if operator == down.name:
            done[np.array(of_tile), written.at((c0, c1), width)] = True
        if operator == combine.name:
            assert done[c1 * pairs_of_tile : (c1 + 1) * pairs_of_tile, read.at((c0, c1), width)].all()
