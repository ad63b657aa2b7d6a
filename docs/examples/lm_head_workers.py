"""A fixed share of the workers for the LM head: it runs for one half of the batch beside the layers of the other."""

from dataclasses import dataclass

from megaflow.scheduler import Context, Schedule


@dataclass(frozen=True)
class LMHeadWorkers(Schedule):
    share: float = 0.25

    def schedule(self, ctx: Context) -> None:
        reserved = max(1, round(self.share * ctx.workers))
        if ctx.batch == 1 or reserved >= ctx.workers:  # nothing runs beside the LM head
            while ready := ctx.ready():
                ctx.execute(ready[0])
            return
        half = ctx.batch // 2
        ctx.split([half, ctx.batch - half])
        for part in (0, 1):
            while ready := [op for op in ctx.ready() if op.part and op.part.number == part]:
                head = ready[0].source == "lm_head"
                ctx.execute(ready[0], workers=slice(-reserved, None) if head else slice(-reserved))
        while ready := ctx.ready():
            ctx.execute(ready[0])
