"""One stream: operators one after the other, in program order, each shared by all workers."""

from megaflow.scheduler import Context, Schedule


class OneStream(Schedule):
    def schedule(self, ctx: Context) -> None:
        for op in ctx.operators:
            ctx.execute(op)
