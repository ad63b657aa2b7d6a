"""What things cost on a device: the few numbers from which the simulator predicts the time of a step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Rates in bytes or floating-point operations per second, times in seconds.

    Attributes:
        memory_bytes_per_s: what all workers together read from device memory.
        worker_bytes_per_s: the most that one worker reads; the bytes it has in flight over the memory's latency.
        worker_flops_per_s: the arithmetic of one worker.
        start_s: from the end of a task to the point where the next can wait: the notify, the prefetch.
        task_s: what a task needs after its wait besides loading and arithmetic: filling the load pipeline, the
            reduction, the epilogue, the barrier before its notify.
        joined_s: what tasks that leave parts of results need on top: their arrival, and adding up those of all.
        event_s: from the notify that completes an event to the moment when a waiter goes on.
        atomic_s: an atomic that returns a value. A tile from a drain costs one, a notify in dynamic mode one, a pop
            one or two, a push of up to PUSH_WIDTH tasks three.
    """

    memory_bytes_per_s: float
    worker_bytes_per_s: float
    worker_flops_per_s: float
    start_s: float
    task_s: float
    joined_s: float
    event_s: float
    atomic_s: float


H200_COSTS = Costs(
    memory_bytes_per_s=4.2e12,  # measured: a large copy
    worker_bytes_per_s=25e9,  # about 24 KB in flight over a latency of 1 us
    worker_flops_per_s=1.08e12,  # fitted to TPOT; what it stands for is mostly reading inputs from L2
    start_s=0.7e-6,  # measured in traces: most of it is the fence before the last task's notify
    task_s=2.8e-6,  # fitted to TPOT
    joined_s=2.5e-6,  # fitted to TPOT
    event_s=1e-6,  # measured: 0.96 us in traces, from the last end before a notify to the start behind the wait
    atomic_s=0.7e-6,  # measured
)
