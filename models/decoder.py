"""The decode loop's device side: buffers, request state, and plans by batch size and schedule."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megaflow.compilation import compile_ahead
from megaflow.device import STOP_STEP
from megaflow.errors import DeadlockError, InputError
from megaflow.graph import Graph, Tensor
from megaflow.kinds import Tiling
from megaflow.models.experts import SLOT_PARTS, routing_symbols
from megaflow.models.geometry import Geometry
from megaflow.models.kv_cache import PagedKVCache
from megaflow.models.planner import bodies_of, make_plan, mode_of, operator_table
from megaflow.models.qwen3 import LOGIT_PARTS, qwen3_graph
from megaflow.models.stream import RESIDUAL_PARTS
from megaflow.models.tiling import kernel_config, smallest_rows, tiling, token_tiles
from megaflow.models.tuning import tuned
from megaflow.models.weights import Weights
from megaflow.runtime import LoadedPlan, new_control
from megaflow.scheduler import Auto, Schedule
from megaflow.target import Device
from megaflow.tasks.common import LINE
from megaflow.tasks.packing import padded
from megaflow.tasks.select import MAX_EOS
from megaflow.trace import Trace

NO_TOKEN = -1
TUNING_STEPS = 8  # of a launch that is timed


class Decoder:
    """Runs decode steps for the sequences that are in the KV cache.

    Attributes:
        batch: number of sequences, 0 before start.
        steps_per_launch: most steps of one launch.
        constants, caches, working: the device tensors by name: what steps only read; keys and values of each layer;
            and the request's state, activations and workspace.
    """

    def __init__(
        self,
        model: Geometry,
        weights: Weights,
        cache: PagedKVCache,
        cos: torch.Tensor,
        sin: torch.Tensor,
        device: Device,
        max_batch_size: int,
        steps_per_launch: int,
    ) -> None:
        self.batch = 0
        self.steps_per_launch = steps_per_launch
        self._model = model
        self._cache = cache
        self._device = device
        self._dtype = weights.matrices["embedding"].data.dtype
        self._max_batch_size = max_batch_size
        self._graphs = {batch: qwen3_graph(model, cache.max_seq_len, batch) for batch in {1, max_batch_size}}
        self._lengths: list[int] = []
        self._trace: Trace | None = None
        self._plans: dict[tuple[int, Schedule], LoadedPlan] = {}
        self._compiled: frozenset[bool] = frozenset()  # the modes
        self._where = where = cos.device

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=where)

        self._state = {
            "tokens": ints(max_batch_size),
            "positions": ints(max_batch_size),
            "finished": ints(max_batch_size),
            "unfinished": ints(1),
            "generated": ints(max_batch_size, steps_per_launch),
            "eos": torch.full((MAX_EOS,), NO_TOKEN, dtype=torch.int32, device=where),
            "pad": ints(1),
        }
        units = max(max_batch_size * model.kv_heads, device.tiling_workers)
        group = kernel_config(model, 1, device, "bfloat16").group
        workspace = {
            "partial": torch.zeros(units * group * model.head_dim, device=where),
            "statistics": torch.zeros(units * group * 2, device=where),
            "arrived": ints(max_batch_size, model.kv_heads, LINE),
        }
        self.constants = {**weights.buffers(), "cos": cos, "sin": sin, "block_table": cache.block_table}
        self.caches = {f"layers.{i}.k_cache": keys for i, keys in enumerate(cache.keys)}
        self.caches |= {f"layers.{i}.v_cache": values for i, values in enumerate(cache.values)}
        self.working = {**workspace, **self._state}
        most_parts = -(-model.hidden // smallest_rows(model, device))
        limits = {
            "B": max_batch_size,
            RESIDUAL_PARTS.name: most_parts,
            SLOT_PARTS.name: most_parts,
            **routing_symbols(model.experts, max_batch_size),
            LOGIT_PARTS.name: -(-model.vocab // smallest_rows(model, device)),
        }
        # a plan's control block, of which stop_step is a word, comes with the plan
        known = {*self.buffers, "stop_step"}
        for graph in self._graphs.values():
            for tensor in graph.tensors.values():
                if tensor.name not in known:
                    self.working[tensor.name] = self._activation(tensor, limits)
                    known.add(tensor.name)

    @property
    def graph(self) -> Graph:
        """One decode step of the present batch size."""
        return self._graph(self.batch)

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """All device tensors by name."""
        return {**self.constants, **self.caches, **self.working}

    def _graph(self, batch: int) -> Graph:
        return self._graphs[1] if batch == 1 else self._graphs[self._max_batch_size]

    def tiling(self) -> Tiling:
        """How the graph is cut for the present batch size."""
        return self._tiling(self.batch)

    def _tiling(self, batch: int) -> Tiling:
        return tiling(self._model, batch, self._device, str(self._dtype).removeprefix("torch."))

    def _activation(self, tensor: Tensor, limits: dict[str, int]) -> torch.Tensor:
        *rows, width = tensor.bind(limits)
        dtype = self._dtype if tensor.dtype == "model" else getattr(torch, tensor.dtype)
        # rows are whole weight blocks wide; linear layers read the padding, which stays zero
        return torch.zeros((*rows, padded(width) if rows else width), dtype=dtype, device=self._where)

    def plan(self, schedule: Schedule) -> LoadedPlan:
        """The plan for the present batch size, made on first use; a schedule that tunes is timed then.

        The first plan of a schedule waits until the kernels of all batch sizes are compiled.

        Raises:
            DeadlockError: a schedule that was timed did not finish.
        """
        key = (self.batch, schedule)
        if key in self._plans:
            return self._plans[key]
        if isinstance(schedule, Auto) and schedule.tune:
            loaded = self.plan(tuned(schedule, self._tuning_key(), self._seconds_of_step))
        else:
            loaded = self.load(schedule)
        self.compile(schedule.modes | {loaded.plan.dynamic})
        self._plans[key] = loaded
        return loaded

    def load(self, schedule: Schedule) -> LoadedPlan:
        """A new plan for the present batch size."""
        graph, cut = self.graph, self.tiling()
        plan = make_plan(graph, cut, schedule, self._device.workers)
        control = new_control(self._where)
        table = operator_table(graph, plan, {**self.buffers, "stop_step": control[STOP_STEP.value :]})
        return LoadedPlan(plan, table.to(self._where), control, bodies_of(graph), cut.config)

    def compile(self, modes: frozenset[bool]) -> None:
        """Compile the kernels of all batch sizes, so that none waits for one later; `plan` has done so.

        Args:
            modes: Schedule.modes of the schedules that are to be used.
        """
        batches = sorted({min(tokens, self._max_batch_size) for tokens in token_tiles(self._model)})
        for dynamic in modes - self._compiled:
            for batch in batches:
                graph = self._graph(batch)
                with torch.cuda.device_of(self._state["tokens"]):
                    compile_ahead(bodies_of(graph), self._tiling(batch).config, mode_of(graph, dynamic))
        self._compiled |= modes

    def _tuning_key(self) -> str:
        """What the fastest schedule depends on, besides the candidates."""
        name = torch.cuda.get_device_name(self._where) if self._where.type == "cuda" else "interpreter"
        return (
            f"{name}, {self._device.workers} workers, {self._model}, {self._dtype}, batch {self.batch}, "
            f"{self._cache.max_seq_len} positions"
        )

    def _seconds_of_step(self, schedule: Schedule) -> float:
        """Time a launch from the present state, which is restored; cache entries that it writes lie beyond its end."""
        plan = self.plan(schedule)
        room = self._cache.max_seq_len - max(self._lengths)
        steps = max(1, min(TUNING_STEPS, self.steps_per_launch, room))
        self.reserve(steps)
        before = {name: tensor.clone() for name, tensor in self._state.items()}
        self._state["eos"].fill_(NO_TOKEN)  # all steps are to run
        try:
            return plan.timed_launch(steps) / steps
        finally:
            for name, tensor in before.items():
                self._state[name].copy_(tensor)

    def start(self, lengths: Sequence[int]) -> None:
        """Forget the sequences before and make room for new ones with `lengths` tokens, not finished."""
        self._cache.release_all()
        for sequence, length in enumerate(lengths):
            self._cache.reserve(sequence, length)
        self.batch = len(lengths)
        self._lengths = list(lengths)
        self.rewind(lengths)

    def rewind(self, lengths: Sequence[int]) -> None:
        """Cut each sequence back to its first tokens, `lengths` of them, not finished; pages stay."""
        assert all(kept <= length for kept, length in zip(lengths, self._lengths, strict=True))
        self._lengths = list(lengths)
        self._state["positions"][: self.batch] = torch.tensor(self._lengths, dtype=torch.int32)
        self.set_ends([], 0)

    def set_ends(self, eos: Sequence[int], pad: int) -> None:
        """Which tokens end a sequence and what follows an end; no sequence has finished yet."""
        self._state["eos"].fill_(NO_TOKEN)
        self._state["eos"][: len(eos)] = torch.tensor(list(eos), dtype=torch.int32)
        self._state["pad"].fill_(pad)
        self._state["finished"].zero_()
        self._state["unfinished"].fill_(self.batch)

    def finish(self, sequences: torch.Tensor) -> None:
        """Mark sequences (bool [B]) as finished."""
        self._state["finished"][: self.batch] = sequences.to(torch.int32)
        self._state["unfinished"].fill_(int((~sequences).sum()))

    def reserve(self, steps: int) -> None:
        """Make room for `steps` more tokens of each sequence. Raises CapacityError beyond max_seq_len."""
        for sequence, length in enumerate(self._lengths):
            self._cache.reserve(sequence, length + steps)

    def drop(self) -> None:
        """Forget the sequences; new ones can start."""
        self.batch = 0
        self._lengths = []

    def run(self, tokens: torch.Tensor, steps: int, schedule: Schedule) -> torch.Tensor:
        """Run up to `steps` decode steps in one launch.

        Args:
            tokens: integers [B], the token to append to each sequence first.
            steps: at most steps_per_launch; fewer are run when all sequences finish.
        Returns:
            int64 [B, steps that were run]: the greedy choice after each step.
        Raises:
            DeadlockError: the schedule did not finish; the sequences are dropped.
        """
        self.reserve(steps)
        self._state["tokens"][: self.batch] = tokens.to(torch.int32)
        try:
            plan = self.plan(schedule)
            stamps = plan.new_stamps(steps) if self._trace is not None else None
            plan.launch(steps, stamps)
            done = plan.finish()
        except DeadlockError:  # tasks may have stopped between their splits; the sequences are lost
            for name, buffer in self.working.items():
                if name.startswith("arriv"):
                    buffer.zero_()
            self.drop()
            raise
        if self._trace is not None and stamps is not None:
            self._trace.add(plan.plan, stamps[:done].cpu().numpy())
        self._lengths = self._state["positions"][: self.batch].tolist()
        return self._state["generated"][: self.batch, :done].long()

    @contextmanager
    def traced(self) -> Iterator[Trace]:
        """Inside the block launches are traced into what it yields. Raises InputError inside another such block."""
        if self._trace is not None:
            raise InputError("this model is being traced already; end that block first")
        self._trace = trace = Trace()
        try:
            yield trace
        finally:
            self._trace = None

    def logits(self) -> torch.Tensor:
        """float32 [B, vocab]: logits of the latest step."""
        return self.working["logits"][: self.batch, : self._model.vocab].clone()
