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
