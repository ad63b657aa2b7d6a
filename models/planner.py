"""From a model's graph to a plan for one batch size and schedule."""

from megaflow.graph import Graph
from megaflow.kinds import Tiling
from megaflow.plan import Plan
from megaflow.scheduler import Scheduler
from megaflow.taskgraph import build_task_graph
from megaflow.tasks import KINDS

KINDS_BY_NAME = {kind.name: kind for kind in KINDS}
KIND_NUMBERS = {kind.name: number for number, kind in enumerate(KINDS)}


def make_plan(graph: Graph, tiling: Tiling, schedule: Scheduler, workers: int) -> Plan:
    """Cut a graph into tiles, derive its events and schedule the tasks.

    Raises:
        PlanError: if the graph cannot be planned.
    """
    tiled = [KINDS_BY_NAME[op.kind].tile(op, tiling) for op in graph.operators]
    return schedule(build_task_graph(tiled), workers, KIND_NUMBERS)
