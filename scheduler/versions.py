"""Whether each tile reads what program order says: the check behind the reference VM.

Buffers are reused, so a tile that runs too early may read something that is there but old, and one that runs too
late something that is newer. For each element the operator that wrote it last is kept, and compared with the one that
would have if the operators had run one after the other.
"""

from collections.abc import Sequence

import numpy as np

from megaflow.errors import HazardError
from megaflow.regions import Access, TiledOperator

BEFORE = -1  # written by no operator in this step


class Versions:
    """Who wrote what, in one step. Operators go by their numbers in program order."""

    def __init__(self, operators: Sequence[TiledOperator]) -> None:
        self._operators = operators
        self._now = {a.tensor: np.full(a.shape, BEFORE, np.int32) for op in operators for a in op.reads + op.writes}
        self._wanted: list[list[np.ndarray]] = []
        for number, op in enumerate(operators):
            self._wanted.append([self._now[access.tensor].copy() for access in op.reads])
            for tile in op.coordinates().tolist():
                for access in op.writes:  # each item of a routing has a tile
                    self._now[access.tensor][access.at(tuple(tile))] = number
        self.start_step()

    def start_step(self) -> None:
        """Forget what was written."""
        for writer in self._now.values():
            writer.fill(BEFORE)

    def read(self, number: int, tile: tuple[int, ...], items: Sequence[int] = ()) -> None:
        """A tile of an operator is about to run.

        Args:
            items: of the tile's group, where the operator has a routing.
        Raises:
            HazardError: what it reads is not what it should be.
        """
        op = self._operators[number]
        for access, wanted in zip(op.reads, self._wanted[number], strict=True):
            place = _place(access, tile, items)
            now = self._now[access.tensor][place]
            wrong = (now != wanted[place]) & (now != number)  # tiles of one operator are in no order
            if wrong.any():
                found, right = int(now[wrong][0]), int(wanted[place][wrong][0])
                raise HazardError(
                    f"{op.name}{list(tile)} reads {access.tensor} as {self._name(found)} left it, "
                    f"not {self._name(right)}; the plan lacks a wait between them"
                )

    def written(self, number: int, tile: tuple[int, ...], items: Sequence[int] = ()) -> None:
        """A tile of an operator has run."""
        for access in self._operators[number].writes:
            self._now[access.tensor][_place(access, tile, items)] = number

    def _name(self, number: int) -> str:
        return "the step before" if number == BEFORE else self._operators[number].name


def _place(access: Access, tile: tuple[int, ...], items: Sequence[int]) -> tuple[slice | np.ndarray, ...]:
    """What a tile touches; items of a routing one by one."""
    of_group = np.array(items, np.int64)
    return tuple(of_group if span.routing else at for span, at in zip(access.spans, access.at(tile), strict=True))
