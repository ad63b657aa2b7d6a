"""Two micro-batches, half a layer apart: the attention of one runs beside the linear layers of the other."""

from megaflow.scheduler import Context, Schedule


class TwoMicroBatches(Schedule):
    def schedule(self, ctx: Context) -> None:
        if ctx.batch > 1:
            half = ctx.batch // 2
            ctx.split([half, ctx.batch - half])
            ctx.merge("lm_head")  # its weights are the most to read: once for the whole batch
        while ready := ctx.ready():
            attention = [op for op in ready if op.kind == "attention"]
            others = [op for op in ready if op.kind != "attention"]
            ctx.execute(attention[:1] + others[:1])
