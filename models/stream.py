"""The residual stream of a graph, and the operators that read it and add to it.

It travels as three tensors: h itself (float32), h * gamma of the RMSNorm that comes next (the input of the next
linear layer), and partial sums of squares of h, from which that layer takes the norm's scale.
"""

from dataclasses import dataclass

from megaflow.graph import BATCH, Graph, Symbol, Tensor
from megaflow.tasks.common import LINE
from megaflow.tasks.linear import most_splits
from megaflow.tasks.packing import blocks, padded

RESIDUAL_PARTS = Symbol("residual_parts")  # tiles along h of a linear layer that adds to it


@dataclass(frozen=True)
class Stream:
    """The residual stream between two blocks: h, the next norm's input, the sums of squares of h."""

    h: Tensor
    normed: Tensor
    ssq: Tensor

    def after(self, ssq: Tensor) -> "Stream":
        """The stream that an operator leaves which adds to this one. Never in place: the two h tensors take turns."""
        other = Tensor("h_attended" if self.h.name == "h" else "h", self.h.shape, "float32")
        return Stream(other, self.normed, ssq)

    def outputs(self) -> dict[str, Tensor]:
        """Its tensors as outputs of the operator that leaves it."""
        return {"h_out": self.h, "out": self.normed, "ssq_out": self.ssq}


@dataclass(frozen=True)
class Names:
    """The names of one layer's weights, as in megaflow.models.weights."""

    layer: int

    def __call__(self, part: str) -> str:
        return f"layers.{self.layer}.{part}"


def norm_weight(name: str, width: int) -> Tensor:
    return Tensor(name, (width,), "float32")


def workspace(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Where the splits of a linear layer leave their sums and count how many have; layers share that of a part."""
    part, rows = name.split(".")[-1], weight.shape[0]
    assert isinstance(rows, int)
    width = most_splits(rows) * padded(rows)
    lines = blocks(rows) * LINE  # each tile of rows has a 128-byte line to itself
    return {
        "partials": Tensor(f"partials_{part}", (BATCH, width), "float32"),
        "arrivals": Tensor(f"arrivals_{part}", (BATCH, lines), "int32"),
    }


def linear(
    g: Graph,
    name: str,
    stream: Stream,
    weight: Tensor,
    outputs: dict[str, Tensor],
    epilogue: str,
    bias: Tensor | None = None,
) -> None:
    """outputs = epilogue(weight @ norm(h) + bias); only with the epilogue "store" there may be a bias."""
    inputs = {"x": stream.normed, "ssq": stream.ssq, "weight": weight, **workspace(name, weight)}
    if bias is not None:
        inputs["bias"] = bias
    g.add(name, "linear", inputs, outputs, epilogue=epilogue)


def residual(g: Graph, name: str, x: Tensor, weight: Tensor, stream: Stream, gamma: Tensor) -> Stream:
    """h + weight @ x, and what the RMSNorm with weight `gamma` needs of it."""
    after = stream.after(Tensor("ssq", (BATCH, RESIDUAL_PARTS), "float32"))
    g.add(
        name,
        "linear",
        {"x": x, "weight": weight, "h": stream.h, "gamma": gamma, **workspace(name, weight)},
        after.outputs(),
        epilogue="residual",
    )
    return after
