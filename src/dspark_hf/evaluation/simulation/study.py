"""The whole simulation: every machine, loads, fairness, a shift of traffic and a drift of calibration."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from ...decoding.policies.registry import COST_POLICIES
from ..provenance import Provenance, collect_provenance
from .bank import RoundBank
from .loads import LoadPoint, closed_points, loads_of, point_of, poisson_points
from .measures import MEASURES, student_quantile
from .paper import source
from .request import SimulationRequest
from .series import CHANGE_SHARE, Series, calibration_drift, hard_and_easy, study_seconds, traffic_shift
from .setting import Setting, banks_of, setting_of
from .systems import System
from .workload import TrafficMix

# Of the systems asked for, those that are followed over time; the second one only where it is among them.
DRIFT_POLICY = "prefix"
# A round whose tokens all together cost less of the rest than this has no slope but rounding.
FLAT_SHARE = 1e-6
NO_DRIFT, UNMENDED, MENDED = "no drift", "drift", "drift, fitted again"


@dataclass(frozen=True)
class Price:
    """What verifying costs at one number of users.

    Attributes:
        users: Rows of a round.
        draft_tokens: Tokens that all users could have had in the seconds that one more verified draft takes, on average
            up to whole blocks: a draft pays where its survival is above this.
        tokens_per_base: Verified tokens that cost as much as everything else in a round.
    """

    users: int
    draft_tokens: float
    tokens_per_base: float


@dataclass(frozen=True)
class MachineResult:
    """What a machine gave.

    Attributes:
        name, description, origin, prefill_token_s: Of the machine.
        max_rows: Of the server in closed loops.
        closed, poisson: Systems over loads.
        floor: The policies that weigh rows, with a floor, in the largest closed loop.
        prices: Of each closed loop.
        study_users: Of the two studies.
        shift: By system, one series a seed; None where there is one domain only.
        shift_domains: Before and after.
        drift: By `NO_DRIFT`, `UNMENDED` and `MENDED`, one series a seed.
        change_s: When either changes.
    """

    name: str
    description: str
    origin: dict[str, object] | None
    prefill_token_s: float
    max_rows: int
    closed: list[LoadPoint]
    poisson: list[LoadPoint]
    floor: list[LoadPoint]
    prices: list[Price]
    study_users: int
    change_s: float
    shift_domains: tuple[str, str] | None
    shift: dict[str, list[Series]]
    drift: dict[str, list[Series]]


@dataclass(frozen=True)
class SimulationReport:
    """All of it.

    Attributes:
        request: What was asked for.
        rounds_from: Where recorded rounds come from.
        slot_survival: Share of recorded rounds in which drafts 1 to k were all accepted, by domain.
        mtp_from: What `mtp-1` is.
        machines: In the order asked for.
        provenance: Of the run.
    """

    request: SimulationRequest
    rounds_from: dict[str, object]
    slot_survival: dict[str, list[float]]
    mtp_from: str
    machines: list[MachineResult]
    provenance: Provenance

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        asked = asdict(self.request)
        paths = {name: None if asked[name] is None else str(asked[name]) for name in ("output", "traces", "mtp_traces")}
        return {
            "kind": "simulation",
            "request": asked | paths,
            "rounds_from": self.rounds_from,
            "slot_survival": self.slot_survival,
            "mtp_from": self.mtp_from,
            "measures": MEASURES,
            "machines": [_machine_dict(one) for one in self.machines],
            "paper": source(),
            "provenance": asdict(self.provenance),
        }


def _machine_dict(result: MachineResult) -> dict[str, Any]:
    points = {name: [point.to_dict() for point in getattr(result, name)] for name in ("closed", "poisson", "floor")}
    series = {
        name: {key: [asdict(one) for one in runs] for key, runs in getattr(result, name).items()}
        for name in ("shift", "drift")
    }
    own = {name: getattr(result, name) for name in MachineResult.__dataclass_fields__}
    return own | {"prices": [asdict(price) for price in result.prices]} | points | series


def simulate(request: SimulationRequest, *, show_progress: bool = False) -> SimulationReport:
    """Run everything; nothing is written.

    Raises:
        ComparisonError: traces, machines and systems do not go together.
        ThroughputProfileError: a machine's file holds no profile.
    """
    drafts, mtp, rounds_from = banks_of(request)
    settings = [setting_of(name, drafts, mtp, request) for name in request.machines]
    systems = [System.named(name) for name in request.systems]
    for setting, _ in settings:
        for system in systems:  # refused now, not in the middle
            system.planner(setting.machine, drafts.num_slots)
    student_quantile(max(2, request.num_seeds))
    num_runs = sum(_num_runs(setting, loops, request) for setting, loops in settings)
    with tqdm(total=num_runs, desc="simulating", unit="run", disable=None if show_progress else True) as bar:
        machines = [_study(setting, loops, systems, request, bar.update) for setting, loops in settings]
    return SimulationReport(
        request=request,
        rounds_from=rounds_from,
        slot_survival=_survival_by_domain(drafts),
        mtp_from="the first slot of the drafter" if mtp is None else "a recording of its own",
        machines=machines,
        provenance=collect_provenance(torch.device("cpu"), torch.float32, seed=request.seed, n=request.num_seeds),
    )


def _study(
    setting: Setting,
    loops: Sequence[int],
    systems: Sequence[System],
    request: SimulationRequest,
    on_run: Callable[[], Any],
) -> MachineResult:
    closed = closed_points(setting, systems, loops, request, on_run)
    floors = _with_floor(request)
    floor = closed_points(setting, floors, loops[-1:], request, on_run) if floors else []
    poisson = poisson_points(setting, systems, request, on_run)
    users = study_users(loops)
    end_s = study_seconds(setting, users, request.study_rounds)
    change_s = CHANGE_SHARE * end_s
    domains = hard_and_easy(setting)
    shift: dict[str, list[Series]] = {}
    drift: dict[str, list[Series]] = {}
    has_shift = domains[0] != domains[1]
    mix = TrafficMix({domains[1]: 1.0}, {domains[0]: 1.0}, change_s)
    for seed in range(request.seed, request.seed + request.num_seeds):
        for system in systems if has_shift else ():
            shift.setdefault(system.name, []).append(traffic_shift(setting, system, users, mix, end_s, seed=seed))
            on_run()
        for name, factor, mends in _drifts(request):
            policy = System.named(DRIFT_POLICY)
            series = calibration_drift(setting, policy, users, factor, change_s, end_s, seed=seed, mends=mends)
            drift.setdefault(name, []).append(series)
            on_run()
    machine = setting.machine
    return MachineResult(
        name=machine.name,
        description=machine.description,
        origin=machine.origin,
        prefill_token_s=machine.prefill_token_s,
        max_rows=setting.max_rows,
        closed=closed,
        poisson=poisson,
        floor=floor,
        prices=[_price(setting, closed, int(load)) for load in loads_of(closed)],
        study_users=users,
        change_s=change_s,
        shift_domains=(domains[1], domains[0]) if has_shift else None,
        shift=shift,
        drift=drift,
    )


def study_users(loops: Sequence[int]) -> int:
    """Users of the studies over time: a load at which drafts are weighed, but not the highest."""
    return loops[-2] if len(loops) > 1 else loops[0]


def _drifts(request: SimulationRequest) -> list[tuple[str, float, bool]]:
    return [(NO_DRIFT, 1.0, False), (UNMENDED, request.odds_factor, False), (MENDED, request.odds_factor, True)]


def _with_floor(request: SimulationRequest) -> list[System]:
    names = [name for name in request.systems if name in COST_POLICIES]
    return [System.named(name, min_drafts_every=request.min_drafts_every) for name in names]


def _num_runs(setting: Setting, loops: Sequence[int], request: SimulationRequest) -> int:
    systems = len(request.systems)
    domains = hard_and_easy(setting)
    studies = systems * (domains[0] != domains[1]) + len(_drifts(request))
    points = systems * (len(loops) + len(request.loads)) + len(_with_floor(request))
    return request.num_seeds * (points + studies)


def _price(setting: Setting, closed: Sequence[LoadPoint], users: int) -> Price:
    """At the mean context of the traffic, by the throughput of the best system there."""
    rows = min(users, setting.max_rows)
    prompt, answer = setting.mean_tokens()
    costs = setting.machine.costs(rows, round(prompt + answer / 2))
    num_slots = setting.drafts.num_slots
    num_tokens = np.arange(rows, rows * (1 + num_slots) + 1)
    slope, base = np.polyfit(num_tokens, [costs.round_seconds(int(n)) for n in num_tokens], 1)
    found = [point for name in {p.system for p in closed} if (point := point_of(closed, name, users)) is not None]
    best = max(point.estimate("throughput_tok_s").value or 0.0 for point in found)
    is_flat = slope * num_tokens[-1] < FLAT_SHARE * base
    return Price(users, 0.0 if is_flat else best * float(slope), float("inf") if is_flat else float(base / slope))


def _survival_by_domain(drafts: RoundBank) -> dict[str, list[float]]:
    found = {}
    for domain in dict.fromkeys(drafts.domains):
        texts = [i for i, own in enumerate(drafts.domains) if own == domain]
        places = np.concatenate([np.arange(drafts.starts[i], drafts.starts[i + 1]) for i in texts])
        part = replace(drafts, conditional=drafts.conditional[places], num_accepted=drafts.num_accepted[places])
        found[domain] = part.slot_survival()
    return found
