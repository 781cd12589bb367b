"""Systems over loads: closed loops of more and more users, and Poisson arrivals."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..intervals import Estimate
from .measures import at_matched, measure, over_seeds, ratio_over_seeds
from .request import SimulationRequest
from .setting import MAX_POISSON_ROWS, Setting
from .systems import System

# Requests that a run measures, and lets pass before, for each row of the server.
MEASURED_PER_ROW, PASSED_PER_ROW = 2, 2


@dataclass(frozen=True)
class LoadPoint:
    """One system at one load.

    Attributes:
        system: Its name.
        load: Users of a closed loop, or Poisson arrivals as a share of what plain steps can do.
        rate_per_s: Of arrivals; None in a closed loop.
        by_seed: By the names of `MEASURES`, one number of each seed.
    """

    system: str
    load: float
    rate_per_s: float | None
    by_seed: dict[str, list[float]]

    def estimate(self, name: str) -> Estimate:
        """Mean over seeds."""
        return over_seeds(self.by_seed[name])

    def to_dict(self) -> dict[str, Any]:
        """With the mean and interval of every measure."""
        own = {name: getattr(self, name) for name in ("system", "load", "rate_per_s", "by_seed")}
        return own | {"estimates": {name: asdict(self.estimate(name)) for name in self.by_seed}}


Points = Sequence[LoadPoint]


def closed_points(
    setting: Setting,
    systems: Sequence[System],
    loops: Sequence[int],
    request: SimulationRequest,
    on_run: Callable[[], Any],
) -> list[LoadPoint]:
    """Every system with every number of users, `request.num_seeds` runs each."""
    points = []
    for users in loops:
        rows = min(users, setting.max_rows)
        first, count = PASSED_PER_ROW * rows, max(request.num_requests, MEASURED_PER_ROW * users)
        for system in systems:
            runs = []
            for seed in _seeds(request):
                run = setting.closed(system, users, seed=seed, first=first, count=count)
                runs.append(measure(run, first, count))
                on_run()
            points.append(LoadPoint(system.name, users, None, _by_name(runs)))
    return points


def poisson_points(
    setting: Setting, systems: Sequence[System], request: SimulationRequest, on_run: Callable[[], Any]
) -> list[LoadPoint]:
    """The same with arrivals at each of `request.loads`, on `MAX_POISSON_ROWS` rows at most."""
    setting = replace(setting, max_rows=min(setting.max_rows, MAX_POISSON_ROWS))
    first = PASSED_PER_ROW * setting.max_rows
    count = max(request.num_requests, MEASURED_PER_ROW * setting.max_rows)
    points = []
    for load in request.loads:
        rate_per_s = load * setting.plain_capacity() / setting.mean_tokens()[1]
        for system in systems:
            runs = []
            for seed in _seeds(request):
                run = setting.open(system, rate_per_s, seed=seed, first=first, count=count)
                runs.append(measure(run, first, count))
                on_run()
            points.append(LoadPoint(system.name, load, rate_per_s, _by_name(runs)))
    return points


def _seeds(request: SimulationRequest) -> Iterator[int]:
    yield from range(request.seed, request.seed + request.num_seeds)


def _by_name(runs: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    return {name: [run[name] for run in runs] for name in runs[0]}


# -- comparisons ------------------------------------------------------------------------------------------------------


def loads_of(points: Points) -> list[float]:
    """Ascending."""
    return sorted({point.load for point in points})


def curve(points: Points, system: str) -> list[LoadPoint]:
    """A system's points, by load."""
    return sorted((point for point in points if point.system == system), key=lambda point: point.load)


def point_of(points: Points, system: str, load: float) -> LoadPoint | None:
    """A system's point at a load."""
    return next((point for point in points if point.system == system and point.load == load), None)


def gain_at_load(points: Points, system: str, baseline: str, load: float) -> Estimate | None:
    """Throughput over a baseline's with as many users (figure 8); runs of one seed are compared."""
    ours, theirs = point_of(points, system, load), point_of(points, baseline, load)
    if ours is None or theirs is None:
        return None
    return ratio_over_seeds(ours.by_seed["throughput_tok_s"], theirs.by_seed["throughput_tok_s"])


def gain_at_throughput(points: Points, system: str, baseline: str, load: float) -> Estimate | None:
    """Speed of a user over the baseline's where all users together get what they get from the baseline at `load`.

    None where the system's load curve does not come to that throughput for every seed.
    """
    return _matched(points, system, baseline, load, "throughput_tok_s", "user_tok_s_mean")


def gain_at_user_speed(points: Points, system: str, baseline: str, load: float) -> Estimate | None:
    """Throughput over the baseline's where users get the speed that they get from the baseline at `load` (figure 7)."""
    return _matched(points, system, baseline, load, "user_tok_s_mean", "throughput_tok_s")


def _matched(points: Points, system: str, baseline: str, load: float, match: str, compare: str) -> Estimate | None:
    theirs, ours = point_of(points, baseline, load), curve(points, system)
    if theirs is None or len(ours) < 2:
        return None
    found = [
        at_matched([p.by_seed[match][i] for p in ours], [p.by_seed[compare][i] for p in ours], theirs.by_seed[match][i])
        for i in range(len(theirs.by_seed[match]))
    ]
    reached = [value for value in found if value is not None]
    if len(reached) < len(found):
        return None
    return ratio_over_seeds(reached, theirs.by_seed[compare])
