"""Sparse layers: what they compute, and how their tiles are ordered."""

import numpy as np
import pytest
import torch
from moe_layer import SparseLayers, exact, pack_experts
from onetask import EPS, config, model_dtype, on_device, relative_error, tolerance

from megaflow.backend import kernel_device
from megaflow.models.geometry import Geometry
from megaflow.models.planner import kinds_of, make_plan, operator_table
from megaflow.models.tiling import kernel_config
from megaflow.plan import Plan
from megaflow.runtime import LoadedPlan, new_control
from megaflow.scheduler import find_schedule
from megaflow.target import H200
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
@pytest.mark.parametrize(("batch", "tokens", "schedule"), [(1, 1, "static"), (18, 16, "dynamic"), (3, 16, "hybrid")])
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
    bodies = [kind.body for kind in kinds_of(graph)]
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


@pytest.mark.parametrize("batch", [1, 8, 70])
def test_each_tile_of_a_sparse_layer_waits_for_one_event(batch):
    plan = a3b_plan(batch, "static")
    assert (plan.graph.waits >= 0).sum(1).max() == 1


@pytest.mark.parametrize("schedule", ["static", "dynamic", "hybrid"])
def test_sparse_layers_are_ordered_right(schedule):
    a3b_plan(1, schedule).verify()


def test_a_down_tile_waits_for_the_tiles_of_its_own_expert_only():
    graph = a3b_plan(1, "static").graph
    names = [op.name for op in graph.operators]
    gate_up, down = (graph.operator == names.index(f"layers.0.{name}") for name in ("gate_up", "down"))
    for place in range(8):
        waited = graph.waits[down & (graph.coordinates[:, 0] == place)]
        notifying = np.isin(graph.notifies, waited[waited >= 0]).any(1)
        assert (notifying == (gate_up & (graph.coordinates[:, 0] == place))).all()
