"""How loading workers share the memory's bandwidth in a simulation."""

import heapq

NEVER = float("inf")


class Bandwidth:
    """Loads that share the bandwidth evenly.

    All of them advance at the same rate, so one clock, the bytes that each has loaded since the beginning, says when
    the next one ends (virtual time of processor sharing).

    Args:
        together: bytes per second of all loads; each: the most of one.
    """

    def __init__(self, together: float, each: float) -> None:
        self._together = together
        self._each = each
        self._heap: list[tuple[float, int]] = []
        self._ends: dict[int, float] = {}  # worker: the clock at which its load ends
        self._began: dict[int, tuple[float, float]] = {}  # worker: the clock then, its demand
        self._demand = 0.0  # loads; those that read the same bytes count once
        self._clock = 0.0

    def _rate(self) -> float:
        return min(self._each, self._together / self._demand)

    def next_end(self) -> float:
        """Seconds until the next load ends."""
        while self._heap and self._ends.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)  # it was stopped
        return max(0.0, self._heap[0][0] - self._clock) / self._rate() if self._heap else NEVER

    def advance(self, seconds: float) -> None:
        """Let time go on, at most to the next end."""
        if self._ends:
            self._clock += seconds * self._rate()

    def end_next(self) -> int:
        """End the load that is due. Returns its worker."""
        self._clock, worker = heapq.heappop(self._heap)
        self.stop(worker)
        return worker

    def begin(self, worker: int, size: float, demand: float) -> None:
        """A worker loads `size` bytes, of which this share comes from memory and is not another worker's too."""
        end = self._clock + size
        self._ends[worker] = end
        self._began[worker] = (self._clock, demand)
        self._demand += demand
        heapq.heappush(self._heap, (end, worker))

    def stop(self, worker: int) -> float:
        """End a worker's load before its time. Returns the bytes that it has loaded, 0 if there is none."""
        if worker not in self._ends:
            return 0.0
        del self._ends[worker]
        began, demand = self._began[worker]
        self._demand = self._demand - demand if self._ends else 0.0
        return self._clock - began
