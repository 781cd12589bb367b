"""How well survival estimates agree with outcomes, slot by slot, with intervals over prompts."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..decoding.calibrate import SlotCalibration, calibrate
from ..errors import CalibrationError
from ..fitting.metrics import NUM_BINS, calibrated_error_floor
from ..fitting.proposals import Proposals
from .intervals import Estimate, Floats, bootstrap

# As in the released evaluator; ranking inside a bin counts half.
NUM_AUC_BINS = 1000
NUM_RESAMPLES = 1000


@dataclass(frozen=True)
class ReliabilityBin:
    """Proposals whose predicted survival lies in one of the equal bins of [0, 1]."""

    mean_predicted: float
    share_accepted: float
    num_proposals: int


@dataclass(frozen=True)
class SurvivalQuality:
    """How well the predicted survival of one slot agrees with the outcomes.

    Attributes:
        mean_predicted: Mean of `a_k`.
        ece: Calibration error, 20 equal bins, all proposals.
        auc: Probability that an accepted prefix is ranked above a rejected one.
        brier: Mean squared error.
        bins: For a reliability diagram; empty bins are left out.
    """

    mean_predicted: float
    ece: Estimate
    auc: Estimate
    brier: Estimate
    bins: tuple[ReliabilityBin, ...]


@dataclass(frozen=True)
class SlotQuality:
    """One slot before and after calibration.

    Attributes:
        slot: From 1.
        num_proposals: Rounds in which the target saw the slot.
        share_accepted: Rounds in which all drafts up to the slot were accepted.
        before, after: Of the raw and the calibrated estimates.
        ece_change: ECE after minus before, paired over prompts.
        ece_floor, ece_floor_high: ECE of a perfectly calibrated head with the calibrated predictions, mean and 97.5 %
            quantile of simulated outcomes.
    """

    slot: int
    num_proposals: int
    share_accepted: float
    before: SurvivalQuality
    after: SurvivalQuality
    ece_change: Estimate
    ece_floor: float
    ece_floor_high: float

    @property
    def is_worse(self) -> bool:
        """Whether calibration made the error larger, by more than chance."""
        return self.ece_change.low is not None and self.ece_change.low > 0


def slot_qualities(proposals: Proposals, calibration: SlotCalibration, *, seed: int) -> list[SlotQuality]:
    """Compare raw with calibrated estimates on the same proposals.

    Args:
        seed: Of resampling and of simulated outcomes.

    Raises:
        CalibrationError: a slot was verified in no round.
    """
    raw, calibrated = (calibrate(proposals.logits, maps).survival for maps in (None, calibration))
    assert raw is not None and calibrated is not None, "logits give survival"
    return [_slot_quality(proposals, k, raw[:, k], calibrated[:, k], seed) for k in range(proposals.num_slots)]


def _slot_quality(proposals: Proposals, k: int, raw: Tensor, calibrated: Tensor, seed: int) -> SlotQuality:
    rows = proposals.is_verified[:, k]
    if not bool(rows.any()):
        raise CalibrationError(
            f"slot {k + 1} was verified in 0 of {len(proposals)} held-out rounds, and a fit is judged on 1 or more; "
            "record more held-out rounds, with more new tokens per prompt"
        )
    outcome = proposals.is_accepted[rows, k].double()
    _, prompt = proposals.prompt[rows].unique(return_inverse=True)
    before, after = (_Sums(values[rows].double(), outcome, prompt) for values in (raw, calibrated))
    floor, floor_high = calibrated_error_floor(calibrated[rows], seed=seed)
    size = NUM_BINS * 3

    def change(sums: Floats) -> Floats:
        return ece_of_sums(sums[..., size:]) - ece_of_sums(sums[..., :size])

    return SlotQuality(
        slot=k + 1,
        num_proposals=int(rows.sum()),
        share_accepted=float(outcome.mean()),
        before=before.quality(seed),
        after=after.quality(seed),
        ece_change=bootstrap_sums(np.concatenate([before.ece, after.ece], axis=1), change, seed),
        ece_floor=floor,
        ece_floor_high=floor_high,
    )


class _Sums:
    """What each prompt adds to the sums that the measures are made of."""

    def __init__(self, predicted: Tensor, outcome: Tensor, prompt: Tensor) -> None:
        self._predicted = predicted
        ones = torch.ones_like(predicted)
        self.ece = sums_by_prompt(predicted, prompt, NUM_BINS, [predicted, outcome, ones])
        self.auc = sums_by_prompt(predicted, prompt, NUM_AUC_BINS, [outcome, 1 - outcome])
        self.brier = sums_by_prompt(predicted, prompt, 1, [(predicted - outcome).square(), ones])

    def quality(self, seed: int) -> SurvivalQuality:
        predicted, outcome, count = self.ece.sum(axis=0).reshape(3, NUM_BINS)
        return SurvivalQuality(
            mean_predicted=float(self._predicted.mean()),
            ece=bootstrap_sums(self.ece, ece_of_sums, seed),
            auc=bootstrap_sums(self.auc, auc_of_sums, seed),
            brier=bootstrap_sums(self.brier, lambda sums: sums[..., 0] / sums[..., 1], seed),
            bins=tuple(
                ReliabilityBin(float(p / n), float(o / n), int(n))
                for p, o, n in zip(predicted, outcome, count, strict=True)
                if n > 0
            ),
        )


def sums_by_prompt(predicted: Tensor, prompt: Tensor, num_bins: int, values: list[Tensor]) -> Floats:
    """Sums of each value by prompt and bin of the prediction, `[prompts, len(values) * num_bins]`."""
    bins = (predicted * num_bins).long().clamp(0, num_bins - 1)
    num_prompts = int(prompt.max()) + 1
    flat = prompt * num_bins + bins
    tables = [
        torch.zeros(num_prompts * num_bins, dtype=torch.float64).index_add_(0, flat, value).view(num_prompts, num_bins)
        for value in values
    ]
    sums: Floats = torch.cat(tables, dim=1).numpy()
    return sums


def ece_of_sums(sums: Floats) -> Floats:
    """Calibration error `[...]` of sums `[..., 3 * bins]` of predictions, outcomes and counts."""
    predicted, outcome, count = np.split(sums, 3, axis=-1)
    error: Floats = np.abs(predicted - outcome).sum(axis=-1) / count.sum(axis=-1)
    return error


def auc_of_sums(sums: Floats) -> Floats:
    """Area under the curve `[...]` of sums `[..., 2 * bins]` of positives and negatives; inside a bin half counts."""
    positive, negative = np.split(sums, 2, axis=-1)
    below = negative.cumsum(axis=-1) - negative
    pairs = positive.sum(axis=-1) * negative.sum(axis=-1)
    share: Floats = (positive * (below + 0.5 * negative)).sum(axis=-1) / pairs
    return share


def bootstrap_sums(per_prompt: Floats, statistic: Callable[[Floats], Floats], seed: int) -> Estimate:
    """`intervals.bootstrap` for sums that come as one array `[prompts, sums]`."""
    names = [str(i) for i in range(per_prompt.shape[1])]
    return bootstrap(
        {name: per_prompt[:, i].tolist() for i, name in enumerate(names)},
        lambda sums: statistic(np.stack([sums[name] for name in names], axis=-1)),
        seed=seed,
        num_resamples=NUM_RESAMPLES,
    )
