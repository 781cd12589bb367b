"""Schedules of one drafter, compared on its acceptance traces: what scheduling gains while the drafter stays the same.

Static schedules are tuned on one half of the prompts, for each load and machine, and everything is judged on the other.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from ..decoding.policies.block import BlockPolicy
from ..decoding.policies.facts import StepCosts, VerificationPolicy
from ..decoding.policies.goodput import GoodputPolicy
from ..decoding.policies.lagged import LaggedPolicy
from ..decoding.policies.prefix import PrefixPolicy, SmoothedPolicy
from ..decoding.policies.simple import FullPolicy, SurvivalPolicy
from ..fitting.profile_store import load_profile
from .ablation_cells import Cell, Place, cells_of
from .hindsight import HindsightPolicy
from .lookahead import LookaheadCheck, check_lookahead
from .machines import Machine, machines_for, staircase
from .provenance import Provenance, collect_provenance
from .schedules import (
    GeneratedSchedule,
    GoodputSchedule,
    MakeSchedule,
    PolicySchedule,
    fixed,
    survival_threshold,
)
from .settings import ComparisonError
from .trace_replay import FlatTraces, Load, RoundLog, deal, replay
from .traces import AcceptanceTraces, load_traces

THRESHOLDS = tuple(round(0.05 * i, 2) for i in range(20))

# Rows, stair and scale of the checks that no policy looks ahead: tokens so dear that searching ahead pays.
LOOKAHEAD_CASES = ((1, 2, 4), (4, 4, 8))

_POLICIES = (PrefixPolicy, SmoothedPolicy, BlockPolicy, LaggedPolicy)
GATED_BLOCK = "gated block"

# Rounds in which each row gets a draft at least, of `block` with a floor.
FLOOR_EVERY = 4
FLOORED_BLOCK = "floored block"


def _on_policy(make: Callable[[], VerificationPolicy]) -> MakeSchedule:
    return lambda traces, costs, num_rows: PolicySchedule(make(), traces, costs, num_rows)


# Schedules that read step times, by name.
_WEIGHING: dict[str, MakeSchedule] = {
    "goodput": GoodputSchedule,
    **{policy.name: _on_policy(policy) for policy in _POLICIES},
    FLOORED_BLOCK: lambda traces, costs, num_rows: PolicySchedule(BlockPolicy(FLOOR_EVERY), traces, costs, num_rows),
    GATED_BLOCK: lambda traces, costs, num_rows: GeneratedSchedule(BlockPolicy(), traces, costs, num_rows),
    HindsightPolicy.name: _on_policy(HindsightPolicy),
}

# In the order of tables.
SCHEDULES = ("plain", "full", "fixed", "survival", *_WEIGHING)


@dataclass(frozen=True)
class AblationRequest:
    """What is compared.

    Attributes:
        traces: Files of `dspark traces`, one at least.
        profile: Of `dspark profile`; None: staircases only.
        num_rows: Loads: rows that decode together.
        stair_widths: Tokens of a stair of each staircase; 1 is a line.
        max_rounds: Rounds of whole drafts that each load is worth, about.
        context: Tokens of context at which the profile is read; None: the mean of the traces.
        seed: Of halves, queues and resampling.

    Raises:
        ComparisonError: a value breaks its rule.
    """

    traces: tuple[Path, ...]
    profile: Path | None = None
    num_rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    stair_widths: tuple[int, ...] = (1, 8, 16, 64)
    max_rounds: int = 250
    context: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _require(bool(self.traces), "traces", self.traces, "one file at least")
        for name in ("num_rows", "stair_widths"):
            values = getattr(self, name)
            _require(all(v >= 1 for v in values), name, values, "whole numbers >= 1")
            _require(len(set(values)) == len(values), name, values, "each given once")
        _require(bool(self.num_rows), "num_rows", self.num_rows, "one at least")
        has_machine = self.profile is not None or bool(self.stair_widths)
        _require(has_machine, "stair_widths", self.stair_widths, "one at least where there is no profile")
        _require(self.max_rounds >= 1, "max_rounds", self.max_rounds, ">= 1")
        _require(self.context is None or self.context >= 1, "context", self.context, ">= 1")


@dataclass(frozen=True)
class TraceFacts:
    """A file of traces, and how its prompts were halved.

    Attributes:
        num_tuning, num_judged: Prompts.
        domains: Prompts judged, by domain.
        tau: Of whole drafts, bonus counted.
        source: As the file has it.
    """

    file: str
    mode: str
    layout: str
    num_slots: int
    num_tuning: int
    num_judged: int
    domains: dict[str, int]
    tau: float
    source: dict[str, Any]


@dataclass(frozen=True)
class AblationReport:
    """Every cell, and what it stands on.

    Attributes:
        machines: Names, with the unit of time.
        lookahead: By policy; of `hindsight`, a control, some violations are expected.
        seconds: That the comparison took.
    """

    traces: list[TraceFacts]
    machines: dict[str, str]
    cells: list[Cell]
    lookahead: dict[str, LookaheadCheck]
    seconds: float
    provenance: Provenance

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"kind": "ablation", **asdict(self)}


def run_ablation(request: AblationRequest, *, show_progress: bool = False) -> AblationReport:
    """Compare every schedule at every load on every machine.

    Raises:
        ComparisonError: traces cannot be read, or are too few; two files have the same mode.
        ThroughputProfileError: the profile cannot be read, or is of another drafter's block.
        OSError: likewise.
    """
    started = time.perf_counter()
    recordings = [load_traces(path) for path in request.traces]
    modes = [traces.mode for traces in recordings]
    _require(len(set(modes)) == len(modes), "traces", modes, "files of different modes")
    profile = None if request.profile is None else load_profile(request.profile)
    context = request.context or round(float(np.mean([_mean_context(traces) for traces in recordings])))
    cells: list[Cell] = []
    machines: dict[str, str] = {}
    facts = []
    for path, traces in zip(request.traces, recordings, strict=True):
        found = machines_for(request.stair_widths, profile, traces.num_slots, context)
        machines |= {machine.name: machine.unit for machine in found}
        halves = traces.halves(seed=request.seed)
        facts.append(_facts(path, traces, halves))
        cells += _study(halves, found, request, show_progress)
    provenance = collect_provenance(
        torch.device("cpu"), torch.float64, seed=request.seed, n=sum(fact.num_judged for fact in facts)
    )
    lookahead = _lookahead(recordings[0], request.seed)
    return AblationReport(facts, machines, cells, lookahead, time.perf_counter() - started, provenance)


def _study(
    halves: tuple[AcceptanceTraces, AcceptanceTraces],
    machines: Sequence[Machine],
    request: AblationRequest,
    show_progress: bool,
) -> Iterator[Cell]:
    """The cells of one recording."""
    mode = halves[0].mode
    tuning, judged = (FlatTraces.of(half) for half in halves)
    loads = [(machine, n) for n in request.num_rows for machine in machines if n <= (machine.max_rows or n)]
    statics: dict[int, _Statics] = {}
    with tqdm(total=len(loads), unit="load", desc=mode, disable=None if show_progress else True) as bar:
        for machine, num_rows in loads:
            if num_rows not in statics:
                statics = {num_rows: _Statics(tuning, judged, num_rows, request)}
            yield from _load_cells(statics[num_rows], Place(mode, machine.name, num_rows), machine, request)
            bar.update()


def _load_cells(statics: "_Statics", place: Place, machine: Machine, request: AblationRequest) -> list[Cell]:
    costs, plain_costs = machine.costs(place.num_rows), machine.plain_costs(place.num_rows)
    settings = statics.tune(costs, plain_costs)
    logs = {
        "plain": statics.judged("fixed", 0),
        "full": statics.judged("fixed", statics.traces.num_slots),
        **{name: statics.judged(name, setting) for name, (setting, _) in settings.items()},
        **{
            name: replay(statics.traces, statics.load, make(statics.traces, costs, place.num_rows))
            for name, make in _WEIGHING.items()
        },
    }
    best = max(settings, key=lambda name: settings[name][1])
    tuned = {name: float(setting) for name, (setting, _) in settings.items()}
    costs_by_name = {name: costs for name in logs} | {"plain": plain_costs}
    if not settings["fixed"][0]:
        costs_by_name["fixed"] = plain_costs
    return cells_of(place, logs, tuned, best, statics.traces, costs_by_name, seed=request.seed)


class _Statics:
    """Static schedules at one load: replays that serve every machine."""

    def __init__(self, tuning: FlatTraces, judged: FlatTraces, num_rows: int, request: AblationRequest) -> None:
        self.traces = judged
        self.load = self._deal(judged, num_rows, request)
        self._settings: Mapping[str, Sequence[float]] = {
            "fixed": range(judged.num_slots + 1),
            "survival": THRESHOLDS,
        }
        load = self._deal(tuning, num_rows, request)
        self._tuning_logs = {
            (name, setting): replay(tuning, load, _static(tuning, name, setting))
            for name, settings in self._settings.items()
            for setting in settings
        }
        self.judged = cache(self._judged)

    def tune(self, costs: StepCosts, plain_costs: StepCosts) -> dict[str, tuple[float, float]]:
        """The best setting of each kind on the tuning half, and its Theta there; the first of equals.

        Args:
            costs: Of a round with a drafter.
            plain_costs: Of one without, which is what a fixed length of 0 is.
        """
        best: dict[str, tuple[float, float]] = {}
        for (name, setting), log in self._tuning_logs.items():
            own = plain_costs if (name, setting) == ("fixed", 0) else costs
            theta = float(log.tokens.sum() / log.text_seconds(own).sum())
            if name not in best or theta > best[name][1]:
                best[name] = setting, theta
        return best

    def _judged(self, name: str, setting: float) -> RoundLog:
        return replay(self.traces, self.load, _static(self.traces, name, setting))

    @staticmethod
    def _deal(traces: FlatTraces, num_rows: int, request: AblationRequest) -> Load:
        return deal(traces, num_rows, max_rounds=request.max_rounds, seed=request.seed)


def _static(traces: FlatTraces, name: str, setting: float) -> Any:
    return fixed(traces, int(setting)) if name == "fixed" else survival_threshold(traces, setting)


def _lookahead(traces: AcceptanceTraces, seed: int) -> dict[str, LookaheadCheck]:
    flat = FlatTraces.of(traces)
    makers: dict[str, Callable[[], VerificationPolicy]] = {
        FullPolicy.name: FullPolicy,
        SurvivalPolicy.name: lambda: SurvivalPolicy(0.5),
        GoodputPolicy.name: GoodputPolicy,
        **{policy.name: policy for policy in _POLICIES},
        HindsightPolicy.name: HindsightPolicy,
    }
    found = {}
    for name, make in makers.items():
        checks = [
            check_lookahead(make(), flat, staircase(width, traces.num_slots, scale).costs(rows), rows, seed=seed)
            for rows, width, scale in LOOKAHEAD_CASES
        ]
        found[name] = LookaheadCheck(sum(c.num_trials for c in checks), sum(c.num_violations for c in checks))
    return found


def _facts(path: Path, traces: AcceptanceTraces, halves: tuple[AcceptanceTraces, AcceptanceTraces]) -> TraceFacts:
    judged = halves[1].prompts
    return TraceFacts(
        file=path.name,
        mode=traces.mode,
        layout=traces.layout,
        num_slots=traces.num_slots,
        num_tuning=len(halves[0].prompts),
        num_judged=len(judged),
        domains={domain: sum(p.domain == domain for p in judged) for domain in halves[1].domains},
        tau=sum(p.num_tokens for p in traces.prompts) / sum(p.num_rounds(traces.num_slots) for p in traces.prompts),
        source=dict(traces.source),
    )


def _mean_context(traces: AcceptanceTraces) -> float:
    """Tokens before a place, on average over prompts."""
    return float(np.mean([prompt.prompt_length + prompt.num_tokens / 2 for prompt in traces.prompts]))


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise ComparisonError(f"{name} must be {rule}, got {value!r}")
