"""Which checkpoint tensor goes where: the names of a Qwen3 checkpoint and the rows of the packed weights.

Rows are ordered for the tasks that read them: qkv by KV head (its query heads, its key, its value), gate and up rows
alternating. The experts of a layer are one matrix, each expert's rows padded to whole blocks.
"""

from dataclasses import dataclass, replace

import torch

from megaflow.models.geometry import Experts, Geometry
from megaflow.tasks.packing import padded


@dataclass(frozen=True)
class Target:
    """Where a checkpoint tensor goes: a matrix into rows of a packed weight, or a vector.

    Attributes:
        name: of the packed weight or vector.
        shape: of the checkpoint tensor; matrices of several experts [experts, rows, columns] count as one.
        rows: int64, where the matrix's rows go, counted from row `first`; None for a vector.
        instead_of: the checkpoint tensors that this one takes the place of.
    """

    name: str
    shape: tuple[int, ...]
    rows: torch.Tensor | None
    first: int = 0
    instead_of: frozenset[str] = frozenset()

    @property
    def end(self) -> int:
        """The row of the packed weight behind the last one of this tensor; 0 for a vector."""
        return 0 if self.rows is None else self.first + int(self.rows.max()) + 1


def weight_table(model: Geometry) -> dict[str, Target]:
    """Checkpoint name -> target, for all tensors of a Qwen3 checkpoint as published, each expert's by itself."""
    hidden = model.hidden
    table = {
        "model.embed_tokens.weight": Target("embedding", (model.vocab, hidden), torch.arange(model.vocab)),
        "model.norm.weight": Target("final_norm", (hidden,), None),
    }
    if not model.tied:
        table["lm_head.weight"] = Target("lm_head", (model.vocab, hidden), torch.arange(model.vocab))
    attention, dense = attention_targets(model), dense_targets(model)
    sparse = sparse_targets(model.experts, hidden) if model.experts else {}
    for i in range(model.layers):
        for part, target in (attention | (sparse if model.is_sparse(i) else dense)).items():
            table[f"model.layers.{i}.{part}.weight"] = replace(target, name=f"layers.{i}.{target.name}")
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
    kv_shape = (model.kv_heads * model.head_dim, hidden)
    return {
        "input_layernorm": Target("attn_norm", (hidden,), None),
        "self_attn.q_proj": Target("qkv", (model.attention_width, hidden), q_rows),
        "self_attn.k_proj": Target("qkv", kv_shape, k_rows),
        "self_attn.v_proj": Target("qkv", kv_shape, v_rows),
        "self_attn.q_norm": Target("q_norm", (model.head_dim,), None),
        "self_attn.k_norm": Target("k_norm", (model.head_dim,), None),
        "self_attn.o_proj": Target("o_proj", (hidden, model.attention_width), torch.arange(hidden)),
        "post_attention_layernorm": Target("mlp_norm", (hidden,), None),
    }


def dense_targets(model: Geometry) -> dict[str, Target]:
    """Of one layer's dense MLP."""
    hidden, middle = model.hidden, model.intermediate
    return {
        "mlp.gate_proj": Target("gate_up", (middle, hidden), 2 * torch.arange(middle)),
        "mlp.up_proj": Target("gate_up", (middle, hidden), 2 * torch.arange(middle) + 1),
        "mlp.down_proj": Target("down", (hidden, middle), torch.arange(hidden)),
    }


def sparse_targets(experts: Experts, hidden: int) -> dict[str, Target]:
    """Of one layer's router and experts."""
    width = experts.width
    gates, downs = torch.arange(width) * 2, torch.arange(hidden)
    targets = {"mlp.gate": Target("router", (experts.count, hidden), torch.arange(experts.count))}
    for expert in range(experts.count):
        part = f"mlp.experts.{expert}."
        first, first_down = expert * padded(2 * width), expert * padded(hidden)
        targets[part + "gate_proj"] = Target("expert_gate_up", (width, hidden), gates, first)
        targets[part + "up_proj"] = Target("expert_gate_up", (width, hidden), gates, first + 1)
        targets[part + "down_proj"] = Target("expert_down", (hidden, width), downs, first_down)
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
