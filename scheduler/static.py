"""The static schedule: per-worker queues, filled on the host, operator by operator in program order.

Each tile goes to the worker that will have read the fewest bytes so far; the balance carries over from one
operator to the next. A wait is dropped where an earlier task in the same queue has already waited for it.
"""

from collections.abc import Mapping

import numpy as np

from megaflow.events import NONE
from megaflow.plan import Plan, make_records
from megaflow.taskgraph import TaskGraph


def spread(loads: np.ndarray, tiles: int, cost: int) -> np.ndarray:
    """Give `tiles` tasks of equal `cost` to workers, each to the least loaded one (the first among equals).

    Args:
        loads: int64 [W], what each worker has already.
    Returns:
        int64 [tiles], the worker of each tile.
    """
    # worker w's j-th new tile would find it at loads[w] + j * cost; the `tiles` lowest of these are taken
    rounds = min(tiles, -(-tiles // len(loads)) + int(np.ptp(loads)) // cost + 1)
    start = loads[None, :] + np.arange(rounds, dtype=np.int64)[:, None] * cost
    return np.argsort(start, axis=None, kind="stable")[:tiles] % len(loads)


def assign_workers(graph: TaskGraph, workers: int) -> np.ndarray:
    """int64 [N]: the worker of each task."""
    loads = np.zeros(workers, np.int64)
    chosen = []
    for op in graph.operators:
        cost = max(op.tile_bytes, 1)
        chosen.append(spread(loads, op.tiles, cost))
        loads += np.bincount(chosen[-1], minlength=workers) * cost
        loads -= loads.min()
    return np.concatenate(chosen)


def prune_waits(waits: np.ndarray, worker: np.ndarray, previous_step: np.ndarray) -> np.ndarray:
    """Drop waits that an earlier task of the same worker has already done in this step.

    Args:
        waits: int32 [N, 2]; worker: [N]; tasks are in queue order within each worker.
    """
    pruned = waits.copy()
    flat = pruned.reshape(-1)  # a task's waits in order, task after task
    live = np.flatnonzero((flat != NONE) & ~np.repeat(previous_step, waits.shape[1]))
    key = np.repeat(worker, waits.shape[1])[live] * (int(flat.max(initial=0)) + 1) + flat[live]
    first = np.unique(key, return_index=True)[1]
    repeated = np.ones(len(live), bool)
    repeated[first] = False
    flat[live[repeated]] = NONE
    return pruned


def static_plan(graph: TaskGraph, workers: int, kind_numbers: Mapping[str, int]) -> Plan:
    """Per-worker queues for `workers` workers."""
    worker = assign_workers(graph, workers)
    records = make_records(graph, prune_waits(graph.waits, worker, graph.previous_step), kind_numbers)
    order = np.argsort(worker, kind="stable")
    offsets = np.concatenate(([0], np.cumsum(np.bincount(worker, minlength=workers)))).astype(np.int32)
    none = np.zeros(0, np.int32)
    return Plan(graph, False, workers, records[order], offsets, none, none, none, none)
