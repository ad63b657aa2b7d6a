"""What the benchmark of operators times: chains of copies of one operator of a model.

Copies have their own weights (or keys and values) and outputs. The rest, as the input and the workspace, they share, as
the layers of a model do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from chains import Kernel, Recorded
from roofline import ELEMENT_BYTES, matrix_bytes
from sparse_engines import gated
from torch.nn import functional

from megaflow.graph import Graph, Operator, Tensor
from megaflow.kinds import Buffers, Tiling
from megaflow.models.geometry import Geometry
from megaflow.models.kv_cache import PagedKVCache
from megaflow.models.qwen3 import qwen3_graph
from megaflow.tasks import ATTENTION, LINEAR
from megaflow.tasks.attention_oracle import prepare
from megaflow.tasks.common import LINE
from megaflow.tasks.packing import pack, padded

OWN = ("weight", "k_cache", "v_cache")  # roles of what each copy has for itself, besides its outputs
RESULTS = ("h_out", "out")  # roles of what is checked: the first that an operator has
CACHES = 4  # times what the L2 cache holds: of so much 2% would be found there if it dropped at random
FEWEST = 4  # copies: between two replays of a CUDA graph the GPU idles for a moment
PAGE_SIZE = 64


@dataclass(frozen=True)
class Way:
    """How torch computes a chain: the call for each copy, and what it should give in float32."""

    calls: Sequence[Callable[[], torch.Tensor]]
    expected: list[torch.Tensor]

    def engine(self) -> Recorded[list[torch.Tensor]]:
        """The calls, one after the other, as a CUDA graph."""
        return Recorded(lambda: [call() for call in self.calls], self.expected[0].device)


@dataclass(frozen=True)
class Chain:
    """Copies of an operator, for megaflow and for torch.

    Attributes:
        buffers: of megaflow, but for outputs and workspace.
        expected: of each copy's result, in float32.
        ways: of torch, by name; the first is the product, or attention, alone; the last does what the task does.
    """

    graph: Graph
    cut: Tiling
    buffers: Buffers
    expected: list[torch.Tensor]
    ways: dict[str, Way]

    def kernel(self, schedule: str) -> Kernel[list[torch.Tensor]]:
        """megaflow's kernel, which leaves each copy's result."""
        results = [op.outputs[result_role(op)] for op in self.graph.operators]

        def read(buffers: Buffers) -> list[torch.Tensor]:
            return [buffers[result.name][:, : result.width] for result in results]

        return Kernel(self.graph, self.cut, schedule, self.buffers, read)


def operators_of(model: Geometry, batch: int, contexts: Sequence[int]) -> list[Operator]:
    """The linear layers of a model of one layer, and attention over each number of positions."""
    graphs = [qwen3_graph(model, context, batch) for context in contexts]
    linears = [op for op in graphs[0].operators if op.kind == "linear"]
    return linears + [op for graph in graphs for op in graph.operators if op.kind == "attention"]


def context_of(op: Operator) -> int | None:
    """The positions that attention is over, the new one among them; None for other operators."""
    return op.attrs.get("max_length")


def operator_bytes(op: Operator, model: Geometry, batch: int) -> int:
    """Bytes that an operator has to read: the packed weight, or the keys and values of each sequence."""
    if context := context_of(op):
        return batch * context * 2 * model.kv_heads * model.head_dim * ELEMENT_BYTES
    return matrix_bytes(*op.tensor("weight").bind({}))


def copies_for(size: int, l2_bytes: int) -> int:
    """How many copies with so many bytes each are more than an L2 cache of l2_bytes can keep any of."""
    return max(FEWEST, CACHES * l2_bytes // size + 1)


def result_role(op: Operator) -> str:
    """The role of what is checked of an operator."""
    return next(role for role in RESULTS if role in op.outputs)


def own(tensor: Tensor, copy: int) -> Tensor:
    """A copy's own tensor."""
    return replace(tensor, name=f"{tensor.name}.{copy}")


def copies_of(op: Operator, count: int) -> Graph:
    """A graph of so many copies of an operator."""
    g = Graph()
    for copy in range(count):
        inputs = {role: own(tensor, copy) if role in OWN else tensor for role, tensor in op.inputs.items()}
        outputs = {role: own(tensor, copy) for role, tensor in op.outputs.items()}
        g.add(f"{op.name}.{copy}", op.kind, inputs, outputs, **op.attrs)
    return g


def make_chain(op: Operator, model: Geometry, cut: Tiling, count: int, device: torch.device) -> Chain:
    """Copies of an operator with random weights, or keys and values, and inputs."""
    if context := context_of(op):
        return attention_chain(op, model, cut, context, count, device)
    return linear_chain(op, cut, count, device)


def linear_chain(op: Operator, cut: Tiling, count: int, device: torch.device) -> Chain:
    """Copies of a linear layer.

    torch's input is the result of the RMSNorm, if there is one; megaflow's is what its producer leaves. The norm's
    scale is 2, by which numbers are not rounded.
    """
    rows, columns = op.tensor("weight").bind({})
    epilogue, eps, dtype = op.attrs["epilogue"], cut.config.eps, cut.config.torch_dtype
    x = torch.randn(cut.batch, columns, device=device).bfloat16()
    given = {"x": x.float()}
    scaled = x
    if "ssq" in op.inputs:
        parts = cut.shape(op, "ssq")[1]
        given["ssq"] = torch.full((cut.batch, parts), columns * (0.25 - eps) / parts, device=device)
        scaled = 2 * x
    if epilogue == "residual":
        given["h"] = torch.randn(cut.batch, rows, device=device).bfloat16().float()
        given["gamma"] = torch.rand(rows, device=device) + 0.5
    shared = {op.inputs[role].name: values for role, values in given.items()}
    for role in {"x", "h"} & given.keys():  # rows are whole blocks wide
        values = shared[op.inputs[role].name]
        shared[op.inputs[role].name] = functional.pad(values, (0, padded(values.shape[1]) - values.shape[1]))
    shared[op.inputs["x"].name] = shared[op.inputs["x"].name].to(dtype)

    matrices = [torch.randn(rows, columns, device=device).mul_(columns**-0.5).bfloat16() for _ in range(count)]
    weight = op.inputs["weight"]
    buffers = {own(weight, i).name: pack(matrix.to(dtype)).data for i, matrix in enumerate(matrices)}
    result = result_role(op)
    expected = [LINEAR.oracle({**given, "weight": matrix.float()}, epilogue, eps)[result] for matrix in matrices]
    if epilogue == "silu":  # torch's gate rows come before the up rows
        matrices = [matrix.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1) for matrix in matrices]
    products = [functional.linear(scaled.float(), matrix.float()) for matrix in matrices]
    ways = {"linear": Way([partial(functional.linear, scaled, matrix) for matrix in matrices], products)}
    if epilogue == "silu":
        ways["linear, silu, mul"] = Way([partial(gated_linear, scaled, matrix) for matrix in matrices], expected)
    elif epilogue == "residual":
        h = given["h"].bfloat16()
        ways["linear, add"] = Way([partial(added_linear, scaled, matrix, h) for matrix in matrices], expected)
    return Chain(copies_of(op, count), cut, shared | buffers, expected, ways)


def gated_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    return gated(functional.linear(x, weight))


def added_linear(x: torch.Tensor, weight: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """h + weight @ x."""
    return h + functional.linear(x, weight)


def attention_chain(
    op: Operator, model: Geometry, cut: Tiling, context: int, count: int, device: torch.device
) -> Chain:
    """Copies of attention over `context` positions, of which the last one is new.

    torch's queries and the new key are normalised and rotated already; its keys and values are contiguous, [B, KV
    heads, context, head_dim], and the new ones are among them.
    """
    batch, width, dtype = cut.batch, model.head_dim, cut.config.torch_dtype
    cache = PagedKVCache(replace(model, layers=count), batch, context, PAGE_SIZE, dtype, device)
    for sequence in range(batch):
        cache.reserve(sequence, context)
    for part in (*cache.keys, *cache.values):
        part.copy_(torch.randn(part.shape, device=device).bfloat16())
    angle = torch.rand(context, width // 2, device=device).mul_(6).repeat(1, 2)
    norms = {role: torch.rand(width, device=device) + 0.5 for role in ("q_norm", "k_norm") if role in op.inputs}
    qkv = torch.randn(batch, model.qkv_rows, device=device)
    units = max(batch * model.kv_heads, cut.workers) * cut.config.group
    shared = {
        **norms,
        "qkv": qkv,
        "cos": angle.cos(),
        "sin": angle.sin(),
        "positions": torch.full((batch,), context - 1, dtype=torch.int32, device=device),
        "block_table": cache.block_table,
        "partial": torch.zeros(units * width, device=device),
        "statistics": torch.zeros(units * 2, device=device),
        "arrived": torch.zeros(batch, model.kv_heads, LINE, dtype=torch.int32, device=device),
    }
    buffers = {op.inputs[role].name: values for role, values in shared.items()}
    for i in range(count):
        buffers[own(op.inputs["k_cache"], i).name] = cache.keys[i]
        buffers[own(op.inputs["v_cache"], i).name] = cache.values[i]

    last = {role: shared[role][-1:].expand(batch, -1) for role in ("cos", "sin")}
    prepared = {"qkv": qkv, **norms, **last}
    q, key, value = prepare(prepared, model.kv_heads, model.group, cut.config.eps)
    q = q.flatten(1, 2)[:, :, None].bfloat16()
    calls, expected = [], []
    for keys, values in zip(cache.keys, cache.values, strict=True):
        keys, values = (dense(pages, cache.block_table)[:, :, : context - 1] for pages in (keys, values))
        before = {"keys": list(keys.float()), "values": list(values.float())}
        expected.append(ATTENTION.oracle(prepared | before, model.kv_heads, model.group, cut.config.eps)["out"])
        k, v = torch.cat((keys, key[:, :, None]), 2).bfloat16(), torch.cat((values, value[:, :, None]), 2).bfloat16()
        calls.append(partial(attended, q, k, v))
    return Chain(copies_of(op, count), cut, buffers, expected, {"sdpa": Way(calls, expected)})


def dense(pages: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """[B, KV heads, positions, head_dim]: all that lies in the pages [n, KV heads, page_size, head_dim] of a table."""
    return pages[table.long()].transpose(1, 2).flatten(2, 3)


def attended(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[B, heads * head_dim]: attention of the queries [B, heads, 1, head_dim]."""
    return functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True).flatten(1)
