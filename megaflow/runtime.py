"""Launching a plan: its arrays and counters on the device, the launch itself, and what a failed wait means."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megaflow.backend import interpreted
from megaflow.device import ABORT, CONTROL_WORDS, EPOCH, QUEUE_HEADER_WORDS, REPORT_WORDS, STEPS_DONE, TAIL
from megaflow.errors import BackendError, DeadlockError
from megaflow.kernel import fingerprint, megakernel
from megaflow.kinds import ROW_WIDTH, KernelConfig
from megaflow.plan import Plan
from megaflow.records import OF_GROUP
from megaflow.stamps import STAMP_WIDTH

WARPS = 4
# registers of a thread: else ptxas may put numbers away to fit more workers on an SM than there will be
COMPILE_OPTIONS = {"num_warps": WARPS, "maxnreg": 255}
LAUNCH_OPTIONS = {} if interpreted() else COMPILE_OPTIONS | {"launch_cooperative_grid": True}
WAIT_TIMEOUT_S = 1.0


class LoadedPlan:
    """A plan on the device, ready to launch.

    Args:
        plan: the plan.
        table: int64 [operators, ROW_WIDTH], the operators' rows.
        control: int32 [CONTROL_WORDS], the plan's control block; task bodies may hold pointers into it.
        bodies: Triton functions of the task kinds, in the order of their numbers.
        config: compiled into the kernel.
        timeout_s: bound of every wait in the kernel, in seconds.
    """

    def __init__(
        self,
        plan: Plan,
        table: torch.Tensor,
        control: torch.Tensor,
        bodies: Sequence[Any],
        config: KernelConfig,
        timeout_s: float = WAIT_TIMEOUT_S,
    ) -> None:
        assert table.shape == (len(plan.graph.operators), ROW_WIDTH) and table.dtype == torch.int64
        self.plan = plan
        self._table = table
        self._control = control
        self._constants = constants(bodies, config, plan.dynamic)
        self._timeout_ns = int(timeout_s * 1e9)
        device = table.device

        def put(array: np.ndarray) -> torch.Tensor:
            array = array if array.size else np.zeros(1, np.int32)  # the kernel wants a pointer in any case
            return torch.from_numpy(np.ascontiguousarray(array, np.int32)).to(device, copy=True)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        tasks = plan.graph.tasks
        self._events = zeros(len(plan.event_need), 32)
        self._arrivals = zeros(tasks)
        self._queues = zeros(max(plan.ready_queues, 1), QUEUE_HEADER_WORDS + tasks + plan.workers)
        self._tickets = zeros(max(plan.drains, 1), 32)
        self._arrays = (
            put(np.pad(plan.records, ((0, 2), (0, 0)))),  # workers look two records ahead
            put(plan.queue_offsets), table, self._events, put(plan.event_need),
            put(plan.triggers_of), put(plan.triggers), put(plan.wait_count), self._arrivals, put(plan.initial),
            self._queues, self._tickets, control,
        )  # fmt: skip
        self._bounds = put(plan.bounds) if plan.creates_tasks else None
        self.reset()

    def reset(self) -> None:
        """Forget all counters: needed before the first launch and after a failed one."""
        for state in (self._events, self._arrivals, self._queues, self._tickets, self._control):
            state.zero_()
        for index in range(self.plan.ready_queues):
            ready = self.plan.initial[index :: self.plan.ready_queues] + 1
            self._queues[index, TAIL.value] = len(ready)
            self._queues[index, QUEUE_HEADER_WORDS : QUEUE_HEADER_WORDS + len(ready)] = torch.from_numpy(ready)

    def stop_after(self, operator: str) -> None:
        """Leave out what comes after an operator from the next launch on, as Plan.stopped_after says."""
        self._arrays[0][:-2].copy_(torch.from_numpy(self.plan.stopped_after(operator).records))

    def launch(self, steps: int, stamps: torch.Tensor | None = None) -> None:
        """Enqueue one launch of up to `steps` steps on the current stream; capturable in a CUDA graph.

        Args:
            stamps: from new_stamps: the launch is traced into it, by a kernel that is compiled on first use.
        Raises:
            BackendError: if the workers do not all fit on the device at once.
        """
        plan = self.plan
        assert isinstance(steps, int) and steps >= 1, steps
        assert plan.graph.tasks * steps < 2**31, "tickets are int32"
        assert stamps is None or stamps.shape == (steps, plan.graph.tasks, STAMP_WIDTH)
        try:
            with torch.cuda.device_of(self._control):
                megakernel[(plan.workers,)](
                    *self._arrays,
                    stamps,
                    self._bounds,
                    plan.graph.tasks,
                    len(plan.initial),
                    plan.graph.final_event,
                    steps,
                    plan.ready_queues,
                    self._timeout_ns,
                    **self._constants,
                    **LAUNCH_OPTIONS,
                )
        except RuntimeError as error:
            if "cooperative" not in str(error):
                raise
            raise BackendError(
                f"{plan.workers} workers of {WARPS} warps are not resident on this device at once; "
                "use fewer workers"
            ) from error

    def timed_launch(self, steps: int) -> float:
        """Launch and wait for the end. Returns seconds, on a GPU by its own clock. Raises DeadlockError."""
        if self._control.device.type != "cuda":
            began = time.perf_counter()
            self.launch(steps)
            self.finish()
            return time.perf_counter() - began
        with torch.cuda.device_of(self._control):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self.launch(steps)
            end.record()
        self.finish()
        return start.elapsed_time(end) / 1e3

    def new_stamps(self, steps: int) -> torch.Tensor:
        """Room for the stamps of a launch of up to `steps` steps: int64 [steps, N, STAMP_WIDTH], zeros."""
        shape = (steps, self.plan.graph.tasks, STAMP_WIDTH)
        return torch.zeros(shape, dtype=torch.int64, device=self._control.device)

    def finish(self) -> int:
        """Wait for the latest launch to end and check it.

        Returns:
            Steps that were run; fewer than asked for if all sequences finished.
        Raises:
            DeadlockError: if a wait in it ran out of time; the counters are reset, so the plan stays usable.
        """
        control = self._control.cpu()
        code, worker, event, seen, wanted = control[ABORT.value : ABORT.value + REPORT_WORDS].tolist()
        if code == 0:
            return int(control[STEPS_DONE.value])
        counters = self._events[:, 0].cpu().numpy().copy()
        epoch = int(control[EPOCH.value] - control[STEPS_DONE.value])  # it counts abandoned steps too
        self.reset()
        waited = f"waited {self._timeout_ns / 1e9:g} s"
        if event < 0:
            raise DeadlockError(f"worker {worker} {waited} for a ready task; {self._missing(counters, epoch)}")
        where = "the start of a step"
        if code - 1 < self.plan.graph.tasks:
            where = self.plan.graph.task_name(code - 1)
        raise DeadlockError(
            f"worker {worker} {waited} at {where} for event {self.plan.event_name(event)}: "
            f"seen {seen}, needed {wanted}; the launch was abandoned"
        )

    def _missing(self, counters: np.ndarray, epoch: int) -> str:
        """In words, the first tile that waits for an event which is not complete in the step that did not end.

        Args:
            counters: int32 [E], as the launch left them.
            epoch: steps completed before it.
        """
        plan = self.plan
        need = plan.event_need.astype(np.int64)
        final = plan.graph.final_event
        step = epoch + (int(counters[final]) - epoch * int(need[final])) // int(need[final]) + 1
        wanted = need * step
        if plan.creates_tasks:  # an event of a group counts from 0; nobody waits for that of a group that is not there
            of_group = plan.bounds[:, 0] == OF_GROUP
            wanted[of_group] = np.where(counters > 0, need, 0)[of_group]
        incomplete = counters < wanted
        stuck = (incomplete[plan.graph.waits] & (plan.graph.waits >= 0)).any(1)
        if not stuck.any():
            return "no event is incomplete; the launch was abandoned"
        # in program order the first is the one that the others wait for
        task = int(stuck.argmax())
        event = next(int(e) for e in plan.graph.waits[task] if e >= 0 and incomplete[e])
        return (
            f"first in line is {plan.graph.task_name(task)}, which waits for event {plan.event_name(event)}: "
            f"seen {counters[event]}, needed {wanted[event]}; the launch was abandoned"
        )


def constants(bodies: Sequence[Any], config: KernelConfig, dynamic: bool) -> dict[str, Any]:
    """The kernel's arguments that are compiled in, by name."""
    return {
        "DYNAMIC": dynamic,
        "BODIES": tuple(bodies),
        "CONFIG": config,
        "FINGERPRINT": fingerprint(bodies),
    }


def new_control(device: torch.device) -> torch.Tensor:
    """An empty control block, int32 [CONTROL_WORDS]."""
    return torch.zeros(CONTROL_WORDS, dtype=torch.int32, device=device)
