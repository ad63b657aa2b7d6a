"""The residual stream of a graph, and the operators that read it and add to it.

It travels as three tensors: h itself (float32), h * gamma of the RMSNorm that comes next (the input of the next
linear layer), and partial sums of squares of h, from which that layer takes the norm's scale.
"""

from dataclasses import dataclass

from megaflow.graph import BATCH, Graph, Symbol, Tensor

RESIDUAL_PARTS = Symbol("residual_parts")  # tiles along h of an operator that adds to it


@dataclass(frozen=True)
class Stream:
    """The residual stream between two blocks: h, the next norm's input, the sums of squares of h."""

    h: Tensor
    normed: Tensor
    ssq: Tensor

    def after(self) -> "Stream":
        """The stream that an operator leaves which adds to this one. Never in place: the two h tensors take turns."""
        other = Tensor("h_attended" if self.h.name == "h" else "h", self.h.shape, "float32")
        return Stream(other, self.normed, Tensor("ssq", (BATCH, RESIDUAL_PARTS), "float32"))


@dataclass(frozen=True)
class Names:
    """The names of one layer's weights, as in megaflow.models.weights."""

    layer: int

    def __call__(self, part: str) -> str:
        return f"layers.{self.layer}.{part}"


def norm_weight(name: str, width: int) -> Tensor:
    return Tensor(name, (width,), "float32")


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
    inputs = {"x": stream.normed, "ssq": stream.ssq, "weight": weight}
    if bias is not None:
        inputs["bias"] = bias
    g.add(name, "linear", inputs, outputs, epilogue=epilogue)


def residual(g: Graph, name: str, x: Tensor, weight: Tensor, stream: Stream, gamma: Tensor) -> Stream:
    """h + weight @ x, and what the RMSNorm with weight `gamma` needs of it."""
    after = stream.after()
    g.add(
        name,
        "linear",
        {"x": x, "weight": weight, "h": stream.h, "gamma": gamma},
        {"h_out": after.h, "out": after.normed, "ssq_out": after.ssq},
        epilogue="residual",
    )
    return after
