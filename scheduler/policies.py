"""The schedules that come with megaflow and fill queues on the host."""

from dataclasses import dataclass

from megaflow.regions import TiledOperator
from megaflow.scheduler.context import Context
from megaflow.scheduler.schedule import Schedule


def intensity(op: TiledOperator) -> float:
    """Floating-point operations for each byte that is read."""
    return op.tile_flops / max(op.tile_bytes, 1)


@dataclass(frozen=True)
class Static(Schedule):
    """Operators in program order, their tiles dealt out evenly to all workers.

    Attributes:
        interleave: where several operators are ready, mix the tiles of two that are as unlike as can be in flops per
            byte, so that memory and arithmetic are busy together; without it one operator follows the other.
    """

    interleave: bool = False

    def schedule(self, ctx: Context) -> None:
        while ready := ctx.ready():
            first, *others = sorted(ready, key=intensity) if self.interleave else ready[:1]
            ctx.execute([first, *others[-1:]])


@dataclass(frozen=True)
class Hybrid(Schedule):
    """As static, but tiles whose work the host does not know (attention over ragged lengths, routed experts) go to
    whichever worker comes first."""

    def schedule(self, ctx: Context) -> None:
        while ready := ctx.ready():
            ctx.execute(ready[0], workers="any" if ready[0].irregular else 1.0)


@dataclass(frozen=True)
class Unfused(Schedule):
    """A full barrier after each operator, as if each were a kernel of its own: what fusion is measured against."""

    def schedule(self, ctx: Context) -> None:
        while ready := ctx.ready():
            ctx.execute(ready[0], fuse=False)
