"""What a schedule is given: tiled operators, and how to cut them for a part of the batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megaflow.regions import MicroBatch, TiledOperator

Cut = Callable[[int, MicroBatch], TiledOperator]


@dataclass(frozen=True)
class Program:
    """The operators of one decode step, in program order.

    Attributes:
        operators: cut for the whole batch.
        batch: sequences in it.
        cut: the operator of that number, cut for a part of the batch only; None where batches cannot be split.
    """

    operators: tuple[TiledOperator, ...]
    batch: int = 1
    cut: Cut | None = None

    @staticmethod
    def of(operators: Sequence[TiledOperator]) -> "Program":
        """A program whose batch cannot be split."""
        return Program(tuple(operators))

    @property
    def layers(self) -> int:
        """Number of layers, 0 if operators are not named by layer."""
        return 1 + max((op.layer for op in self.operators if op.layer is not None), default=-1)

    def shortened(self, layers: int) -> "Program":
        """The program without the layers from number `layers` on, to predict with: it computes something else."""
        kept = [i for i, op in enumerate(self.operators) if (op.layer or 0) < layers]
        cut = self.cut
        return Program(
            tuple(self.operators[i] for i in kept),
            self.batch,
            None if cut is None else lambda index, part: cut(kept[index], part),
        )
