"""What each task of a plan has to load and to compute, by a cost model."""

from collections.abc import Sequence

import numpy as np

from megaflow.plan import Plan
from megaflow.records import NOTHING
from megaflow.regions import TiledOperator
from megaflow.scheduler.costs import Costs


def shares(op: TiledOperator, fill: float) -> np.ndarray:
    """The share of its full work that each tile of an operator has, [tiles]."""
    if not op.irregular:
        return np.ones(op.tiles)
    if op.expected is not None:
        return np.repeat(np.clip(op.expected - np.arange(op.grid[0]), 0, 1), op.tiles // op.grid[0])
    last = op.grid[-1]
    return np.resize(np.clip(fill * last - np.arange(last), 0, 1), op.tiles)


class Work:
    """What each task has to do, as Python lists of N floats.

    Args:
        fill: share of their full work that irregular operators have, where the context decides.

    Attributes:
        load: bytes that a task reads; early: those of them that it prefetches.
        demand: share of its reads that device memory serves.
        compute_s: seconds of arithmetic, beside the loads; fixed_s: seconds after both.
    """

    def __init__(self, plan: Plan, costs: Costs, fill: float) -> None:
        operators = plan.graph.operators
        share = np.concatenate([shares(op, fill) for op in operators])
        task = plan.column("task")[plan.column("kind") == NOTHING]
        share[task] = 0  # their bodies are left out

        def each(values: Sequence[float]) -> np.ndarray:
            return np.repeat(np.array(values, float), [op.tiles for op in operators])

        self.load = (share * each([op.tile_bytes for op in operators])).tolist()
        self.early = (share * each([op.early_bytes for op in operators])).tolist()
        self.demand = (1 / each([op.readers for op in operators])).tolist()
        self.compute_s = (share * each([op.tile_flops / costs.worker_flops_per_s for op in operators])).tolist()
        fixed = each([costs.task_s + op.joined * costs.joined_s for op in operators])
        self.fixed_s = np.where(share > 0, fixed, 0).tolist()
