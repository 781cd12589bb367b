"""Sequential temperature scaling: confidences that agree with outcomes, slot by slot (paper, section 5).

The paper fits, from left to right, the temperature of each slot that minimises the calibration error of the cumulative
product up to it. It says neither grid nor bins nor what the temperature divides. Here it divides the logit of the
conditional `c_k`: dividing the product's would let survival rise from one slot to the next.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config_rules import is_calibration_map
from ..decoding.calibrate import SlotCalibration, calibrate
from ..errors import CalibrationError
from .metrics import expected_calibration_error
from .proposals import Proposals

# Temperatures tried: 1/8 to 8, evenly in the logarithm, 1 among them; then between the best one's neighbours, twice.
LARGEST_LOG2_TEMPERATURE = 3.0
COARSE_STEP = 1 / 8
NUM_REFINEMENTS = 2
STEPS_PER_REFINEMENT = 8

# Below these a slot's calibration error is mostly noise.
MIN_PROPOSALS = 500
MIN_OUTCOMES = 20

MAX_NEWTON_STEPS = 50

MAPS = ("temperature", "platt", "auto")
JUDGING_FRACTION = 0.3  # of the prompts, for `auto`

_RECORD_MORE = (
    "record more, with verification policy 'full': a higher --num-proposals and --num-held-out-proposals, more or "
    "other prompts, or more --max-new-tokens"
)


@dataclass(frozen=True)
class FittedCalibration:
    """What was fitted.

    Attributes:
        temperatures: `T_k`, one per slot.
        platt: `(a_k, b_k)` per slot, if Platt maps were fitted, which then stand for the temperatures.
        slots_left_as_they_are: Slots, counted from 1, whose fitted map was worse than none on held-out proposals.
        slots_not_fitted: Slots that got no map since they have too few verified proposals, or nearly all have one
            outcome.
    """

    temperatures: tuple[float, ...]
    platt: tuple[tuple[float, float], ...] | None
    slots_left_as_they_are: tuple[int, ...]
    slots_not_fitted: tuple[int, ...] = ()

    @property
    def slot_calibration(self) -> SlotCalibration:
        """As stage 2 applies it."""
        return SlotCalibration.of({"temperatures": self.temperatures, "platt": self.platt})


class SequentialTemperatureScaling:
    """Fits one temperature per slot, left to right, to recorded proposals.

    Args:
        maps: `temperature`, the paper's; `platt`: besides, a Platt map `c_k = sigmoid(a_k * logit + b_k)` per slot, by
            logistic regression on the rounds that reached the slot, which mends what no temperature can: estimates
            that are too high or too low on the whole; `auto`: Platt maps where their mean error over slots is smaller
            on a part of the prompts that was kept from both, then fitted on all.

    Example:
        ```python
        with record_proposals() as record:
            target.generate(**inputs, assistant_model=drafter, verification_policy="full", max_new_tokens=64)
        fitted = SequentialTemperatureScaling().fit(record.proposals())
        ```
    """

    def __init__(self, *, maps: str = "temperature") -> None:
        if maps not in MAPS:
            raise CalibrationError(f"maps must be one of {', '.join(MAPS)}, got {maps!r}; `auto` lets the data decide")
        self.maps = maps

    def fit(self, proposals: Proposals, held_out: Proposals | None = None) -> FittedCalibration:
        """Temperatures that minimise the error of the product up to each slot, those before it fixed.

        A slot with too few verified proposals, or nearly all of one outcome, is left as it is.

        Args:
            proposals: To fit on.
            held_out: Of other prompts. A slot whose map is worse on them than none, behind the same maps before it,
                is left as it is.

        Raises:
            CalibrationError: no slot can be fitted.
        """
        problems = {k: why for k in range(proposals.num_slots) if (why := _why_unfit(proposals, k)) is not None}
        if len(problems) == proposals.num_slots:
            raise CalibrationError(f"{problems[0]}; {_RECORD_MORE}" if problems else "proposals have no slot to fit")
        temperatures, left_as_is = _fit_slots(proposals, held_out, _fit_temperature, problems)
        platt = None
        if self.maps == "platt" or (self.maps == "auto" and _prefers_platt(proposals, problems)):
            platt, left_as_is = _fit_slots(proposals, held_out, _fit_platt, problems)
        return FittedCalibration(
            tuple(1.0 / scale for scale, _ in temperatures),
            None if platt is None else tuple(platt),
            tuple(left_as_is),
            tuple(k + 1 for k in problems),
        )


_Map = tuple[float, float]  # scale and shift of a slot's logit
_NO_MAP: _Map = (1.0, 0.0)


@dataclass(frozen=True)
class _Slot:
    """One slot of the rounds that verified it."""

    logit: Tensor  # float32 [n]
    survival_before: Tensor  # float32 [n], calibrated, of the slots before
    is_accepted: Tensor  # bool [n], this slot and all before it
    is_reached: Tensor  # bool [n], all before it accepted

    def error(self, candidate: _Map) -> float:
        """Calibration error of the product up to this slot."""
        scale, shift = candidate
        survival = self.survival_before * torch.sigmoid(self.logit * scale + shift)
        return expected_calibration_error(survival, self.is_accepted.float())


def _fit_slots(
    proposals: Proposals, held_out: Proposals | None, fit_slot: Callable[[_Slot], _Map], unfit: Container[int]
) -> tuple[list[_Map], list[int]]:
    """One map per slot, none for those `unfit` (from 0), and which slots had theirs taken away."""
    maps: list[_Map] = []
    left_as_is = []
    for k in range(proposals.num_slots):
        if k in unfit:
            maps.append(_NO_MAP)
            continue
        found = fit_slot(_slot(proposals, maps, k))
        if held_out is not None and bool(held_out.is_verified[:, k].any()):
            judge = _slot(held_out, maps, k)
            if judge.error(found) > judge.error(_NO_MAP):
                found = _NO_MAP
                left_as_is.append(k + 1)
        maps.append(found)
    return maps, left_as_is


def _prefers_platt(proposals: Proposals, unfit: Container[int]) -> bool:
    """Whether Platt maps have the smaller mean error on prompts that neither kind was fitted on."""
    fitting, judging = proposals.split(JUDGING_FRACTION, seed=0)

    def mean_error(fit_slot: Callable[[_Slot], _Map]) -> float:
        maps, _ = _fit_slots(fitting, None, fit_slot, unfit)
        errors = [_slot(judging, maps[:k], k).error(maps[k]) for k in range(len(maps)) if k not in unfit]
        return sum(errors) / len(errors)

    return mean_error(_fit_platt) < mean_error(_fit_temperature)


def _slot(proposals: Proposals, maps: list[_Map], k: int) -> _Slot:
    rows = proposals.is_verified[:, k]
    before = proposals.logits[rows, :k]
    if k == 0:
        survival_before, is_reached = torch.ones(len(before)), torch.ones(len(before), dtype=torch.bool)
    else:
        scale, shift = (torch.tensor(values) for values in zip(*maps, strict=True))
        survival = calibrate(before, SlotCalibration(scale, shift)).survival
        assert survival is not None, "logits give survival"
        survival_before, is_reached = survival[:, -1], proposals.is_accepted[rows, k - 1]
    return _Slot(proposals.logits[rows, k], survival_before, proposals.is_accepted[rows, k], is_reached)


def _fit_temperature(slot: _Slot) -> _Map:
    """The best temperature of a grid that is refined around its best point; of equals the nearest to 1."""
    centre, step, reach = 0.0, COARSE_STEP, round(LARGEST_LOG2_TEMPERATURE / COARSE_STEP)
    errors: dict[float, float] = {}
    for _ in range(1 + NUM_REFINEMENTS):
        for i in range(-reach, reach + 1):
            log2_temperature = centre + i * step
            if abs(log2_temperature) <= LARGEST_LOG2_TEMPERATURE and log2_temperature not in errors:
                errors[log2_temperature] = slot.error((2.0**-log2_temperature, 0.0))
        # Sums of thousands of numbers differ in the last digits without meaning it.
        centre = min(errors, key=lambda x: (round(errors[x], 9), abs(x), x))
        step, reach = step / STEPS_PER_REFINEMENT, STEPS_PER_REFINEMENT - 1
    return 2.0**-centre, 0.0


def _fit_platt(slot: _Slot) -> _Map:
    """Logistic regression of acceptance on the logit, among rounds that reached the slot, by Newton's method.

    Outcomes are pulled a little towards the middle (Platt, 1999), so that a perfect separation has a solution too.
    """
    logit = slot.logit[slot.is_reached].double()
    accepted = slot.is_accepted[slot.is_reached].double()
    num_accepted, num_rejected = float(accepted.sum()), float((1 - accepted).sum())
    goal = torch.where(accepted > 0, (num_accepted + 1) / (num_accepted + 2), 1 / (num_rejected + 2))
    columns = torch.stack([logit, torch.ones_like(logit)], dim=1)
    weights = torch.tensor([1.0, 0.0], dtype=torch.float64)

    def loss(candidate: Tensor) -> Tensor:
        return torch.nn.functional.binary_cross_entropy_with_logits(columns @ candidate, goal)

    for _ in range(MAX_NEWTON_STEPS):
        predicted = torch.sigmoid(columns @ weights)
        gradient = columns.T @ (predicted - goal) / len(goal)
        curvature = (columns * (predicted * (1 - predicted))[:, None]).T @ columns / len(goal)
        step = torch.linalg.solve(curvature + 1e-9 * torch.eye(2, dtype=torch.float64), gradient)
        while float(step.abs().max()) > 1e-9 and loss(weights - step) > loss(weights):
            step = step / 2  # a full step may overshoot far from the solution
        weights = weights - step
        if float(step.abs().max()) <= 1e-9:
            break
    scale, shift = weights.tolist()
    # A confidence head that ranks the wrong way round is not mended by turning it, nor one without rank by scaling it.
    return (scale, shift) if is_calibration_map(scale, shift) else _NO_MAP


def _why_unfit(proposals: Proposals, slot: int) -> str | None:
    """Why no map can be fitted to a slot, counted from 0."""
    rows = proposals.is_verified[:, slot]
    num_proposals = int(rows.sum())
    if num_proposals < MIN_PROPOSALS:
        return f"slot {slot + 1} has {num_proposals} verified proposals, and a calibration needs {MIN_PROPOSALS}"
    num_accepted = int(proposals.is_accepted[rows, slot].sum())
    if min(num_accepted, num_proposals - num_accepted) < MIN_OUTCOMES:
        return (
            f"slot {slot + 1}: {num_accepted} of {num_proposals} proposals were accepted up to it, and a calibration "
            f"needs {MIN_OUTCOMES} accepted and as many rejected ones"
        )
    return None
