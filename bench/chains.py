"""Engines that run a chain of operators again and again: megaflow's kernel on a graph, and a replayed CUDA graph."""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch

from megaflow.graph import Graph
from megaflow.kinds import Buffers, Tiling
from megaflow.models.planner import bodies_of, make_plan, operator_table
from megaflow.runtime import LoadedPlan, new_control
from megaflow.scheduler import find_schedule
from megaflow.target import current_device
from megaflow.tasks.packing import padded

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Engine(Protocol[T_co]):
    """Something that runs a chain."""

    def run(self, times: int) -> None:
        """Run the chain from its start again and again; the GPU may still be at it on return."""

    def output(self) -> T_co:
        """What the latest run left; the next one overwrites it."""


class Kernel(Generic[T]):
    """megaflow's kernel on a graph. A launch is one of as many steps as there are runs.

    Args:
        cut: how the graph is cut.
        buffers: device tensors by name, at least one; those of the graph's that it lacks are made, all zero.
        read: from all buffers, what the chain leaves.
    """

    def __init__(
        self, graph: Graph, cut: Tiling, schedule: str, buffers: Buffers, read: Callable[[Buffers], T]
    ) -> None:
        where = next(iter(buffers.values())).device
        self._buffers = dict(buffers)  # the table has their addresses
        for tensor in graph.tensors.values():
            if tensor.name not in buffers:
                *rows, width = tensor.bind(cut.symbols)
                shape = (*rows, padded(width) if rows else width)
                kept = cut.config.torch_dtype if tensor.dtype == "model" else getattr(torch, tensor.dtype)
                self._buffers[tensor.name] = torch.zeros(shape, dtype=kept, device=where)
        plan = make_plan(graph, cut, find_schedule(schedule), current_device(where).workers)
        table = operator_table(graph, plan, self._buffers).to(where)
        self._plan = LoadedPlan(plan, table, new_control(where), bodies_of(graph), cut.config)
        self._read = read

    def run(self, times: int) -> None:
        self._plan.launch(times)
        self._plan.finish()

    def output(self) -> T:
        return self._read(self._buffers)


class Recorded(Generic[T]):
    """A function without arguments, replayed as a CUDA graph; on the CPU it is called."""

    def __init__(self, forward: Callable[[], T], device: torch.device) -> None:
        self._forward = torch.no_grad()(forward)
        self._replay = self._call
        if device.type == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # what is compiled, tuned and allocated at first
                for _ in range(3):
                    self._call()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._call()
            self._replay = graph.replay

    def _call(self) -> None:
        self._output = self._forward()

    def run(self, times: int) -> None:
        for _ in range(times):
            self._replay()

    def output(self) -> T:
        return self._output
