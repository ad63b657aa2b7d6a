"""Sparse layers by themselves: a chain of router, topk, group, experts, combine; and packed experts for tests."""

from dataclasses import dataclass

import torch
from onetask import model_dtype, on_device

from megaflow.graph import BATCH, Graph, Symbol, Tensor
from megaflow.kinds import KernelConfig, Tiling
from megaflow.tasks.linear import row_tiles
from megaflow.tasks.packing import PackedWeight, padded
from megaflow.tasks.topk import NO_SLOT

PAIRS, PLACES, BOUNDS, PARTS = map(Symbol, ("pairs", "places", "bounds", "parts"))


@dataclass(frozen=True)
class SparseLayers:
    """Sizes: experts of which each token has `slots`, of `width`, over a residual stream of `hidden`."""

    layers: int
    hidden: int
    width: int
    experts: int
    slots: int

    def tiling(self, batch: int, config: KernelConfig, workers: int) -> Tiling:
        pairs = batch * self.slots
        places = min(self.experts, pairs)
        symbols = {BATCH.name: batch, PAIRS.name: pairs, PLACES.name: places, BOUNDS.name: places + 1}
        parts = row_tiles(self.hidden, config, workers)
        return Tiling(config, workers, symbols | {PARTS.name: parts})

    def graph(self) -> Graph:
        """Layer i reads h, normed and ssq number i and writes number i + 1."""
        g = Graph()
        logits = Tensor("logits", (BATCH, self.experts), "float32")
        experts = Tensor("experts", (BATCH, self.slots), "int32")
        weights = Tensor("weights", (BATCH, self.slots), "float32")
        slot_of = Tensor("slot_of", (BATCH, self.experts), "int32")
        lengths = {"active": PLACES, "active_count": 1, "indptr": BOUNDS, "pairs": PAIRS}
        lists = {role: Tensor(role, (length,), "int32") for role, length in lengths.items()}
        middle = Tensor("expert_hidden", (PAIRS, self.width))
        out = Tensor("expert_out", (PAIRS, self.hidden), "float32")
        for i in range(self.layers):
            x = {"x": self.normed(i), "ssq": self.ssq(i)}
            router, gate_up, down = (Tensor(f"{name}.{i}", shape) for name, shape in self.weights().items())
            after = {"h_out": self.h(i + 1), "out": self.normed(i + 1), "ssq_out": self.ssq(i + 1)}
            add = {"h": self.h(i), "gamma": Tensor("gamma", (self.hidden,), "float32")}
            g.add(f"layers.{i}.router", "linear", {**x, "weight": router}, {"out": logits}, epilogue="store")
            g.add(f"layers.{i}.topk", "topk", {"logits": logits},
                  {"experts": experts, "weights": weights, "slot_of": slot_of},
                  count=self.experts, slots=self.slots, norm_topk_prob=True)  # fmt: skip
            g.add(f"layers.{i}.group", "group", {"slot_of": slot_of}, lists, slots=self.slots)
            g.add(f"layers.{i}.gate_up", "expert_linear", {**x, "weight": gate_up, **lists}, {"out": middle},
                  epilogue="silu")  # fmt: skip
            g.add(f"layers.{i}.down", "expert_linear", {"x": middle, "weight": down, **lists}, {"out": out},
                  epilogue="store")  # fmt: skip
            g.add(f"layers.{i}.combine", "combine", {"expert_out": out, "weights": weights, **add}, after)
        return g

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a layer's weights, by name."""
        hidden, width = self.hidden, self.width
        return {"router": (self.experts, hidden), "gate_up": (self.experts, 2 * width, hidden),
                "down": (self.experts, hidden, width)}  # fmt: skip

    def h(self, i: int) -> Tensor:
        return Tensor(f"h.{i}", (BATCH, self.hidden), "float32")

    def normed(self, i: int) -> Tensor:
        return Tensor(f"normed.{i}", (BATCH, self.hidden))

    def ssq(self, i: int) -> Tensor:
        return Tensor(f"ssq.{i}", (BATCH, PARTS), "float32")

    def activations(self, tiling: Tiling, device: torch.device) -> dict[str, torch.Tensor]:
        """All tensors but the weights, zero; rows are whole blocks wide."""
        buffers = {}
        for name, tensor in self.graph().tensors.items():
            dtype = tiling.config.torch_dtype if tensor.dtype == "model" else getattr(torch, tensor.dtype)
            *rows, last = tensor.bind(tiling.symbols)
            if name.split(".")[0] not in self.weights():
                buffers[name] = torch.zeros(*rows, padded(last), dtype=dtype, device=device)
        return buffers


def slots_of(experts: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [B, count]: the slot of each expert in experts [B, K], NO_SLOT of those that are not in it."""
    none = torch.full((len(experts), count), NO_SLOT)
    return none.scatter(1, experts, torch.arange(experts.shape[1]).expand_as(experts))


def exact(*shape: int) -> torch.Tensor:
    """Random values that the model's dtype holds exactly."""
    return torch.randn(*shape).to(model_dtype()).double()


def pack_experts(weight: torch.Tensor, active: list[int]) -> torch.Tensor:
    """The packed weights [E, rows, columns] of the active experts; NaN for the others."""
    experts, rows, columns = weight.shape
    packed = PackedWeight.empty(experts * padded(rows), columns, model_dtype(), torch.device("cpu"))
    packed.data.fill_(float("nan"))
    for expert in active:
        packed.data.view(experts, -1)[expert] = 0
        packed.write_rows(expert * padded(rows) + torch.arange(rows), weight[expert])
    return on_device(packed.data)
