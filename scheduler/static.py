"""The static schedule: per-worker queues, filled on the host, operator by operator in program order.

Each operator's tiles are dealt out evenly; where they do not divide, the workers that have read the fewest bytes so
far get one more, so the balance carries over from one operator to the next. A wait is dropped where an earlier task
in the same queue has already waited for it.
"""

from collections.abc import Mapping

import numpy as np

from megaflow.events import NONE
from megaflow.plan import Plan, make_records
from megaflow.taskgraph import TaskGraph


def spread(loads: np.ndarray, tiles: int) -> np.ndarray:
    """Give `tiles` equal tasks to workers in equal numbers, and one more to the least loaded as needed.

    The workers meet again at the end of each operator, so nobody gets two more than another, whatever the loads.

    Args:
        loads: int64 [W], what each worker has already.
    Returns:
        int64 [tiles], the worker of each tile.
    """
    least_loaded = np.argsort(loads, kind="stable")
    return np.resize(least_loaded, tiles)


def assign_workers(graph: TaskGraph, workers: int) -> np.ndarray:
    """int64 [N]: the worker of each task."""
    loads = np.zeros(workers, np.int64)
    chosen = []
    for op in graph.operators:
        cost = max(op.tile_bytes, 1)
        chosen.append(spread(loads, op.tiles))
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
