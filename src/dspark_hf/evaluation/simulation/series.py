"""What changes while a server runs: the mix of traffic, or how right the confidence head is."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch

from ...decoding.drift import DriftWatch
from ...decoding.observers import EndedRounds
from ...fitting.proposals import proposals_of
from ...fitting.refit import fit_past
from .estimates import DriftingEstimates
from .server import Round, RoundView
from .setting import Setting
from .systems import System
from .workload import ClosedLoop, TrafficMix

NUM_BINS = 40
# With fewer users a study takes as much longer, so that watches see as many rounds of requests.
STUDY_USERS = 30
# The change comes after this share of it; the first bins are left out of means, as all users begin at once.
CHANGE_SHARE, WARM_SHARE = 0.35, 0.1
# Rows * rounds behind the warning that a new calibration is fitted on.
REFIT_ROW_ROUNDS = 4000


@dataclass(frozen=True)
class Series:
    """One run in bins of time.

    Attributes:
        system: Its name.
        bin_s: Seconds of a bin.
        tokens_per_s, tau, budget: Of each bin; see `MEASURES`.
        survival_gap: Mean predicted minus realised survival over verified drafts; None without confidences.
        warned_s, refitted_s: When the drift watch warned, and when the new calibration came into use.
    """

    system: str
    bin_s: float
    tokens_per_s: list[float]
    tau: list[float]
    budget: list[float]
    survival_gap: list[float | None] = field(default_factory=list)
    warned_s: float | None = None
    refitted_s: float | None = None

    def mean(self, name: str, begin_s: float, end_s: float) -> float:
        """Over the bins that lie inside."""
        values: list[float] = getattr(self, name)
        inside = [v for i, v in enumerate(values) if begin_s <= i * self.bin_s and (i + 1) * self.bin_s <= end_s + 1e-9]
        return float(np.mean(inside)) if inside else float("nan")


def study_seconds(setting: Setting, users: int, num_rounds: int) -> float:
    """How long a study with so many users lasts: as `num_rounds` rounds that verify no draft."""
    costs = setting.machine.costs(users, round(sum(setting.mean_tokens())))
    return num_rounds * max(1.0, STUDY_USERS / users) * costs.round_seconds(users)


def traffic_shift(setting: Setting, system: System, users: int, mix: TrafficMix, end_s: float, *, seed: int) -> Series:
    """A system while the mix of domains changes."""
    server = setting.server(system, ClosedLoop(users), seed=seed, mix=mix)
    run = server.run(lambda one: one.now_s >= end_s)
    return Series(system.name, *_binned(run.rounds, end_s))


def calibration_drift(
    setting: Setting,
    system: System,
    users: int,
    odds_factor: float,
    drift_s: float,
    end_s: float,
    *,
    seed: int,
    mends: bool,
) -> Series:
    """One system while its confidence head becomes wrong, watched by the package's drift watch.

    Args:
        odds_factor: What odds of acceptance estimates are multiplied by from `drift_s` on.
        mends: Whether a warning is answered by a new calibration from rounds behind it.
    """
    estimates = DriftingEstimates(odds_factor, drift_s)
    mender = Mender(setting.drafts.num_slots, estimates, mends=mends)
    server = setting.server(system, ClosedLoop(users), seed=seed, estimates=estimates, on_round=mender)
    run = server.run(lambda one: one.now_s >= end_s)
    gaps = _binned_gaps(mender.gaps, end_s)
    return Series(system.name, *_binned(run.rounds, end_s), gaps, mender.warned_s, mender.refitted_s)


class Mender:
    """Watches rounds with `DriftWatch`; after its warning collects new ones, and fits them as `refit` does."""

    def __init__(self, num_slots: int, estimates: DriftingEstimates, *, mends: bool) -> None:
        self._estimates = estimates
        self._mends = mends
        self._num_slots = num_slots
        self._watch = DriftWatch(num_slots)
        self._fresh: DriftWatch | None = None  # rounds behind the warning
        self._num_fresh = 0
        self.warned_s: float | None = None
        self.refitted_s: float | None = None
        self.gaps: list[tuple[float, float, int]] = []  # time, sum of predicted minus realised survival, drafts

    def __call__(self, view: RoundView) -> None:
        self._note_gap(view)
        ended = _ended_rounds(view)
        if self.warned_s is None:
            self._watch(ended)
            if self._watch.has_warned:
                self.warned_s = view.ended_s
                self._fresh = DriftWatch(self._num_slots, window_rounds=REFIT_ROW_ROUNDS)
            return
        if self._fresh is None or self.refitted_s is not None or not self._mends:
            return
        self._fresh.has_warned = True  # it has been said
        self._fresh(ended)
        self._num_fresh += len(view.ids)
        if self._num_fresh >= REFIT_ROW_ROUNDS:
            self._refit(self._fresh.rounds)
            self.refitted_s = view.ended_s

    def _refit(self, rounds: Sequence[EndedRounds]) -> None:
        self._estimates.calibration = fit_past(proposals_of(rounds)).slot_calibration

    def _note_gap(self, view: RoundView) -> None:
        assert view.confidence.survival is not None, "simulated heads are sure of something"
        slots = np.arange(view.confidence.survival.shape[1])
        is_verified = slots < view.lengths[:, None]
        gap = (view.confidence.survival.numpy() - (slots < view.num_accepted[:, None]))[is_verified].sum()
        self.gaps.append((view.ended_s, float(gap), int(is_verified.sum())))


def _ended_rounds(view: RoundView) -> EndedRounds:
    """As generate() tells observers; there is no drafter, and neither the watch nor the fit looks at one."""
    return EndedRounds(
        drafter=cast(Any, None),
        generation=0,
        rows=tuple(view.ids.tolist()),
        confidence_logits=torch.from_numpy(view.logits),
        survival=view.confidence.survival,
        num_verified=tuple(view.lengths.tolist()),
        num_accepted=tuple(view.num_accepted.tolist()),
        is_sampled=True,
    )


def _binned(rounds: Sequence[Round], end_s: float) -> tuple[float, list[float], list[float], list[float]]:
    """Seconds of a bin; tokens/s, tau and budget of each."""
    bin_s = end_s / NUM_BINS
    sums = np.zeros((NUM_BINS, 3))  # tokens, rows, verified drafts
    last_s = np.zeros(NUM_BINS + 1)  # when the last round of a bin ended; whole rounds, or their number would ripple
    for one in rounds:
        if one.ended_s < end_s:
            place = int(one.ended_s / bin_s)
            sums[place] += one.num_tokens, one.num_rows, one.num_verified
            last_s[place + 1 :] = one.ended_s
    tokens, rows, verified = sums.T
    rows, seconds = np.maximum(rows, 1), np.diff(last_s)
    tokens_per_s = np.divide(tokens, seconds, out=np.zeros(NUM_BINS), where=seconds > 0)
    return bin_s, tokens_per_s.tolist(), (tokens / rows).tolist(), (1 + verified / rows).tolist()


def _binned_gaps(gaps: Sequence[tuple[float, float, int]], end_s: float) -> list[float | None]:
    sums = np.zeros((NUM_BINS, 2))
    for time_s, gap, num_drafts in gaps:
        if time_s < end_s:
            sums[int(time_s / end_s * NUM_BINS)] += gap, num_drafts
    return [float(gap / count) if count else None for gap, count in sums]


def hard_and_easy(setting: Setting) -> tuple[str, str]:
    """The domains whose drafts fare worst and best."""
    drafts = setting.drafts
    counts: dict[str, list[float]] = {}
    for text, domain in enumerate(drafts.domains):
        own = drafts.num_accepted[drafts.starts[text] : drafts.starts[text + 1]]
        counts.setdefault(domain, []).append(float(own.mean()))
    means = {domain: float(np.mean(values)) for domain, values in counts.items()}
    return min(means, key=lambda name: means[name]), max(means, key=lambda name: means[name])
