"""Which checkpoint tensor goes where: the names of a Qwen checkpoint and the rows of the packed weights.

Rows are ordered for the tasks that read them: qkv by KV head (its query heads, its key, its value), gate and up rows
alternating. The experts of a layer are one matrix, each expert's rows padded to whole blocks. The gate of a shared
expert is the router's last row.
"""

from dataclasses import dataclass, replace

import torch

from megaflow.models.geometry import Experts, Geometry
from megaflow.tasks.packing import padded


@dataclass(frozen=True)
class Target:
    """Where a checkpoint tensor goes: a matrix into rows of a packed weight, a vector into places of a vector.

    Attributes:
        name: of the packed weight or vector.
        shape: of the checkpoint tensor; matrices of several experts [experts, rows, columns] count as one.
        rows: int64, where the matrix's rows or the vector's elements go, counted from row `first`.
        instead_of: the checkpoint tensors that this one takes the place of.
    """

    name: str
    shape: tuple[int, ...]
    rows: torch.Tensor
    first: int = 0
    instead_of: frozenset[str] = frozenset()

    @property
    def end(self) -> int:
        """The row of the packed weight, or place in the vector, behind the last one of this tensor."""
        return self.first + int(self.rows.max()) + 1


def vector(name: str, width: int) -> Target:
    """A vector that is a checkpoint tensor as it is."""
    return Target(name, (width,), torch.arange(width))


def weight_table(model: Geometry) -> dict[str, Target]:
    """Checkpoint name -> target, for all tensors of a checkpoint as published, each expert's by itself."""
    hidden = model.hidden
    table = {
        "model.embed_tokens.weight": Target("embedding", (model.vocab, hidden), torch.arange(model.vocab)),
        "model.norm.weight": vector("final_norm", hidden),
    }
    if not model.tied:
        table["lm_head.weight"] = Target("lm_head", (model.vocab, hidden), torch.arange(model.vocab))
    attention, dense = attention_targets(model), mlp_targets("mlp", "", model.intermediate, hidden)
    sparse = sparse_targets(model.experts, hidden) if model.experts else {}
    for i in range(model.layers):
        for part, target in (attention | (sparse if model.is_sparse(i) else dense)).items():
            table[f"model.layers.{i}.{part}"] = replace(target, name=f"layers.{i}.{target.name}")
    return table


def attention_targets(model: Geometry) -> dict[str, Target]:
    """Of one layer: attention and both norms."""
    hidden = model.hidden
    head = torch.arange(model.head_dim)
    groups = torch.arange(model.kv_heads)[:, None] * (model.group + 2) * model.head_dim

    def head_rows(place: torch.Tensor) -> torch.Tensor:
        return (groups[:, :, None] + place[None, :, None] * model.head_dim + head).reshape(-1)

    q_rows = head_rows(torch.arange(model.group))
    k_rows = head_rows(torch.tensor([model.group]))
    v_rows = head_rows(torch.tensor([model.group + 1]))
    targets = {
        "input_layernorm.weight": vector("attn_norm", hidden),
        "self_attn.o_proj.weight": Target("o_proj", (hidden, model.attention_width), torch.arange(hidden)),
        "post_attention_layernorm.weight": vector("mlp_norm", hidden),
    }
    for part, rows in (("q", q_rows), ("k", k_rows), ("v", v_rows)):
        targets[f"self_attn.{part}_proj.weight"] = Target("qkv", (len(rows), hidden), rows)
        if model.qkv_bias:
            targets[f"self_attn.{part}_proj.bias"] = Target("qkv_bias", (len(rows),), rows)
    if model.qk_norm:
        targets |= {f"self_attn.{norm}.weight": vector(norm, model.head_dim) for norm in ("q_norm", "k_norm")}
    return targets


def mlp_targets(part: str, name: str, width: int, hidden: int) -> dict[str, Target]:
    """Of an MLP for all tokens. `part` begins its names in the checkpoint, `name` those of its packed weights."""
    gates = 2 * torch.arange(width)
    return {
        f"{part}.gate_proj.weight": Target(f"{name}gate_up", (width, hidden), gates),
        f"{part}.up_proj.weight": Target(f"{name}gate_up", (width, hidden), gates + 1),
        f"{part}.down_proj.weight": Target(f"{name}down", (hidden, width), torch.arange(hidden)),
    }


def sparse_targets(experts: Experts, hidden: int) -> dict[str, Target]:
    """Of one layer's router and experts."""
    count, width = experts.count, experts.width
    gates, downs = torch.arange(width) * 2, torch.arange(hidden)
    targets = {"mlp.gate.weight": Target("router", (count, hidden), torch.arange(count))}
    if experts.shared_width:
        targets["mlp.shared_expert_gate.weight"] = Target("router", (1, hidden), torch.arange(1), first=count)
        targets |= mlp_targets("mlp.shared_expert", "shared_", experts.shared_width, hidden)
    for expert in range(count):
        part = f"mlp.experts.{expert}."
        first, first_down = expert * padded(2 * width), expert * padded(hidden)
        targets[part + "gate_proj.weight"] = Target("expert_gate_up", (width, hidden), gates, first)
        targets[part + "up_proj.weight"] = Target("expert_gate_up", (width, hidden), gates, first + 1)
        targets[part + "down_proj.weight"] = Target("expert_down", (hidden, width), downs, first_down)
    return targets


def fused_experts(model: Geometry) -> dict[str, Target]:
    """Checkpoint name -> target, for tensors with all experts of a layer, as transformers keeps them in memory.

    gate_up_proj is [experts, 2 * width, hidden], gate rows before up rows; down_proj [experts, hidden, width].
    """
    experts, hidden = model.experts, model.hidden
    if experts is None:
        return {}
    count, width = experts.count, experts.width
    places = torch.arange(count)[:, None]
    gate_up = torch.arange(2 * width).view(width, 2).T.flatten()
    gate_up_rows = (places * padded(2 * width) + gate_up).flatten()
    down_rows = (places * padded(hidden) + torch.arange(hidden)).flatten()
    table = {}
    for i in experts.layers:

        def single(*parts: str, layer: int = i) -> frozenset[str]:
            prefix = f"model.layers.{layer}.mlp.experts."
            return frozenset(f"{prefix}{expert}.{part}.weight" for expert in range(count) for part in parts)

        name = f"layers.{i}.expert_"
        gate_up_shape, down_shape = (count, 2 * width, hidden), (count, hidden, width)
        table[f"model.layers.{i}.mlp.experts.gate_up_proj"] = Target(
            name + "gate_up", gate_up_shape, gate_up_rows, instead_of=single("gate_proj", "up_proj")
        )
        table[f"model.layers.{i}.mlp.experts.down_proj"] = Target(
            name + "down", down_shape, down_rows, instead_of=single("down_proj")
        )
    return table
