"""The schedule that chooses among others: by the cost model, or by timing them on the device."""

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path

from megaflow.errors import PlanError, ScheduleError
from megaflow.plan import Plan
from megaflow.scheduler.costs import H200_COSTS, Costs
from megaflow.scheduler.dynamic import Dynamic
from megaflow.scheduler.policies import Hybrid, Static
from megaflow.scheduler.program import Program
from megaflow.scheduler.schedule import Schedule
from megaflow.scheduler.simulator import simulate

FEW_LAYERS, MORE_LAYERS = 2, 4  # of the shortened programs from which a longer one is extrapolated

NO_DIFFERENCE = 1.01  # times whose ratio is below this say nothing: the model's own error is larger


def predict(
    program: Program,
    schedule: Schedule,
    workers: int,
    kind_numbers: Mapping[str, int],
    costs: Costs = H200_COSTS,
    fill: float = 1.0,
) -> float:
    """Seconds of a step, simulated. Of many layers only a few are: the others take as long as the last of these.

    Raises:
        ScheduleError, PlanError: the schedule cannot plan the program.
    """

    def seconds(part: Program) -> float:
        return simulate(schedule.plan(part, workers, kind_numbers), costs, fill).seconds

    if program.layers <= MORE_LAYERS:
        return seconds(program)
    few, more = seconds(program.shortened(FEW_LAYERS)), seconds(program.shortened(MORE_LAYERS))
    return more + (program.layers - MORE_LAYERS) * (more - few) / (MORE_LAYERS - FEW_LAYERS)


def first_of_best(times: Mapping[Schedule, float]) -> Schedule:
    """The first schedule whose time is the least or does not differ from it."""
    least = min(times.values())
    return next(schedule for schedule, time in times.items() if time <= least * NO_DIFFERENCE)


@dataclass(frozen=True)
class Auto(Schedule):
    """The candidate with the least predicted time for the shape at hand, the first one where it makes no difference.

    Attributes:
        tune: let the decoder time the candidates on its device instead, once for each batch size, and remember the
            fastest in a file.
        candidates: what to choose from, in order of preference; with `tune` dataclasses, whose fields tell them apart
            in the file.
        costs: of the device, for predictions.
        fill: share of the longest context that predictions are made for.
        file: where timings are remembered; None: megaflow/tuning.json in the user's cache directory.
    """

    tune: bool = False
    candidates: tuple[Schedule, ...] = (Static(), Static(interleave=True), Hybrid(), Dynamic())
    costs: Costs = H200_COSTS
    fill: float = 0.5
    file: Path | None = None

    def __post_init__(self) -> None:
        if not self.candidates:
            raise ScheduleError("auto has no candidates; give it at least one Schedule")
        unnamed = [candidate for candidate in self.candidates if not is_dataclass(candidate)]
        if self.tune and unnamed:
            raise ScheduleError(
                f"candidate {unnamed[0].name} is no dataclass; make it a frozen one, so that its time can be remembered"
            )
        if not 0 <= self.fill <= 1:
            raise ScheduleError(f"fill is {self.fill}; it must be 0 to 1")

    @property
    def modes(self) -> frozenset[bool]:
        return frozenset(mode for candidate in self.candidates for mode in candidate.modes)

    def choose(self, program: Program, workers: int, kind_numbers: Mapping[str, int]) -> Schedule:
        """The candidate with the least predicted time, or an earlier one that is as good.

        Raises:
            ScheduleError, PlanError: no candidate can plan the program.
        """
        times: dict[Schedule, float] = {}
        failure: ScheduleError | PlanError | None = None
        for candidate in self.candidates:
            try:
                times[candidate] = predict(program, candidate, workers, kind_numbers, self.costs, self.fill)
            except (ScheduleError, PlanError) as error:
                failure = error
        if not times:
            assert failure is not None
            raise failure
        return first_of_best(times)

    def plan(self, program: Program, workers: int, kind_numbers: Mapping[str, int]) -> Plan:
        return self.choose(program, workers, kind_numbers).plan(program, workers, kind_numbers)
