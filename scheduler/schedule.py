"""The base class of schedules: a decision, in plain Python, of what runs where and when."""

from collections.abc import Mapping

from megaflow.plan import Plan
from megaflow.scheduler.context import Context
from megaflow.scheduler.program import Program
from megaflow.scheduler.queues import queue_plan
from megaflow.taskgraph import build_task_graph


class Schedule:
    """Turns a program into a plan. A schedule of one's own overrides `schedule`.

    Attributes:
        name: for messages; the class's name.
        modes: whether its plans are dynamic: {False}, {True}, or both where that depends on the program.
    """

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    @property
    def modes(self) -> frozenset[bool]:
        return frozenset({False})

    def schedule(self, ctx: Context) -> None:
        """Place all operators of `ctx`, by ctx.ready, execute, split and merge."""
        raise NotImplementedError(f"{type(self).__name__} has no method schedule(ctx)")

    def plan(self, program: Program, workers: int, kind_numbers: Mapping[str, int]) -> Plan:
        """The plan for `workers` workers.

        Args:
            kind_numbers: place of each task kind in the kernel's tuple of bodies.
        Raises:
            ScheduleError: the schedule forgets an operator, runs one twice, or runs one before its input.
            PlanError: the operators cannot be planned.
        """
        ctx = Context(program, workers, self.name)
        self.schedule(ctx)
        ctx.finish()
        graph = build_task_graph(ctx.operators)
        before = {op.name: [b.name for b in ctx.inputs(op)] for op in ctx.operators}
        return queue_plan(graph, workers, ctx.placements, before, kind_numbers)
