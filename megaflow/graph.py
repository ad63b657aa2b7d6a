"""The logical graph: operators over named tensors. It says what a model computes, not how or where.

Dimensions are ints or symbols, so that one graph serves every batch size. A tensor may be written more than
once (buffers are reused from layer to layer, the residual stream is updated in place); the order of the
operators is the program order, and edges are derived from it (megaflow.taskgraph).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from megaflow.errors import PlanError


@dataclass(frozen=True)
class Symbol:
    """A dimension that is bound to a number when a plan is made."""

    name: str

    def __str__(self) -> str:
        return self.name


Dim = int | Symbol
BATCH = Symbol("B")


@dataclass(frozen=True)
class Tensor:
    """A named tensor. `dtype` is a torch dtype name; "model" stands for the model's own (bfloat16, ...)."""

    name: str
    shape: tuple[Dim, ...]
    dtype: str = "model"

    @property
    def width(self) -> int:
        """The last dimension, which must be a number."""
        assert isinstance(self.shape[-1], int), self
        return self.shape[-1]

    def bind(self, symbols: Mapping[str, int]) -> tuple[int, ...]:
        """The shape in numbers. Raises PlanError for a symbol that `symbols` lacks."""
        missing = [d.name for d in self.shape if isinstance(d, Symbol) and d.name not in symbols]
        if missing:
            raise PlanError(f"tensor {self.name}: symbol {missing[0]} is not bound; bound are {sorted(symbols)}")
        return tuple(symbols[d.name] if isinstance(d, Symbol) else d for d in self.shape)


@dataclass(frozen=True)
class Operator:
    """One node. `kind` names the task kind that computes it; tensors are named by the role they play in it."""

    name: str
    kind: str
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    attrs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def tensor(self, role: str) -> Tensor:
        return self.outputs[role] if role in self.outputs else self.inputs[role]


@dataclass
class Graph:
    """Operators in program order. One pass over `operators` is one decode step."""

    operators: list[Operator] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    _names: set[str] = field(default_factory=set)

    def add(
        self,
        name: str,
        kind: str,
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
        **attrs: Any,
    ) -> Operator:
        """Append an operator. Raises PlanError if the name is taken or a tensor changes its shape."""
        if name in self._names:
            raise PlanError(f"operator {name} is already in the graph; give each operator a name of its own")
        for tensor in (*inputs.values(), *outputs.values()):
            known = self.tensors.setdefault(tensor.name, tensor)
            if known != tensor:
                raise PlanError(f"operator {name}: tensor {tensor.name} is {tensor}, but was {known}")
        op = Operator(name, kind, MappingProxyType(dict(inputs)), MappingProxyType(dict(outputs)), attrs)
        self.operators.append(op)
        self._names.add(name)
        return op
