"""What recorded rounds say about calibration: errors by domain, setting and kind of map, and under changed traffic.

The measures behind calibration_study.py, which reads the rounds and writes the report.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from sklearn.isotonic import IsotonicRegression

from dspark_hf import CalibrationError
from dspark_hf.decoding.calibrate import SlotCalibration, calibrate
from dspark_hf.decoding.drift import DriftWatch
from dspark_hf.evaluation.calibration_quality import slot_qualities
from dspark_hf.evaluation.intervals import Estimate, Floats, Sums, bootstrap
from dspark_hf.fitting.metrics import NUM_BINS, calibrated_error_floor, expected_calibration_error
from dspark_hf.fitting.proposals import Proposals
from dspark_hf.fitting.sts import SequentialTemperatureScaling

logger = logging.getLogger(__name__)

CHAT = ("chat",)
NUM_RESAMPLES = 1000
NUM_SPLITS = 8
HELD_OUT_FRACTION = 0.3
JUDGED_FRACTION = 0.4

Rounds = dict[str, dict[str, Proposals]]  # by setting and domain


@dataclass(frozen=True)
class Traffic:
    """What changed traffic does to a calibration; calibration errors are means over slots.

    Attributes:
        fitted_on, judged_on: Domains.
        before: Error on the traffic fitted on, prompts that the fit did not see.
        after: The same maps on a part of the new traffic's prompts.
        raw: No maps, there.
        refitted: Maps fitted to the other part, there.
        floor: Error that perfect estimates would show there by chance, under the refitted maps.
        largest_gap: Predicted minus realised survival at the worst slot of the new traffic.
        warned_after: Rounds of the new traffic until a drift watch warned; None: it did not.
        warned_before: The same of the traffic fitted on.
    """

    setting: str
    fitted_on: str
    judged_on: str
    before: Estimate
    after: Estimate
    raw: Estimate
    refitted: Estimate
    floor: float
    largest_gap: float
    warned_after: int | None
    warned_before: int | None


def joined(parts: Sequence[Proposals]) -> Proposals:
    """All rounds; prompts of different parts are different."""
    starts = np.cumsum([0, *(int(part.prompt.max()) + 1 for part in parts)]).tolist()
    prompts = [part.prompt + start for part, start in zip(parts, starts, strict=False)]
    tables = [[getattr(part, name) for part in parts] for name in ("logits", "is_accepted", "is_verified")]
    return Proposals(*map(torch.cat, tables), torch.cat(prompts))


def mode_of(setting: str) -> str:
    """Whose maps generate() applies."""
    return "greedy" if setting == "greedy" else "sampled"


# -- calibration error ------------------------------------------------------------------------------------------------


def mean_error(proposals: Proposals, maps: SlotCalibration | None, seed: int) -> Estimate:
    """Mean over slots of the calibration error of survival, with an interval over prompts."""
    survival = calibrate(proposals.logits, maps).survival
    assert survival is not None
    prompts, place = proposals.prompt.unique(return_inverse=True)
    bins = (survival * NUM_BINS).long().clamp(0, NUM_BINS - 1)
    columns: dict[str, list[float]] = {}
    for k in range(proposals.num_slots):
        seen = proposals.is_verified[:, k].double()
        for name, values in (("p", survival[:, k]), ("o", proposals.is_accepted[:, k]), ("n", torch.ones_like(seen))):
            table = torch.zeros(len(prompts), NUM_BINS, dtype=torch.float64)
            table.index_put_((place, bins[:, k]), values.double() * seen, accumulate=True)
            columns |= {f"{name}/{k}/{b}": table[:, b].tolist() for b in range(NUM_BINS)}

    def statistic(sums: Sums) -> Floats:
        errors = []
        for k in range(proposals.num_slots):
            predicted, outcome, count = (np.stack([sums[f"{part}/{k}/{b}"] for b in range(NUM_BINS)]) for part in "pon")
            errors.append(np.abs(predicted - outcome).sum(axis=0) / count.sum(axis=0))
        mean: Floats = np.mean(errors, axis=0)
        return mean

    return bootstrap(columns, statistic, seed=seed, num_resamples=NUM_RESAMPLES)


def mean_floor(proposals: Proposals, maps: SlotCalibration | None, seed: int) -> float:
    """Mean over slots of the error that chance alone would show."""
    survival = calibrate(proposals.logits, maps).survival
    assert survival is not None
    floors = [
        calibrated_error_floor(survival[proposals.is_verified[:, k], k], seed=seed, num_draws=200)[0]
        for k in range(proposals.num_slots)
    ]
    return float(np.mean(floors))


def by_domain(rounds: Rounds, maps: Mapping[str, SlotCalibration], seed: int) -> list[dict[str, Any]]:
    """Each setting and domain, slot by slot, before and after the drafter's own maps."""
    rows = []
    for setting, domains in rounds.items():
        for domain, proposals in domains.items():
            slots = slot_qualities(proposals, maps[mode_of(setting)], seed=seed)
            rows.append(
                {
                    "setting": setting,
                    "domain": domain,
                    "num_prompts": proposals.num_prompts,
                    "num_rounds": len(proposals),
                    "share_accepted": [slot.share_accepted for slot in slots],
                    "ece_before": [asdict(slot.before.ece) for slot in slots],
                    "ece_after": [asdict(slot.after.ece) for slot in slots],
                    "ece_floor": [slot.ece_floor for slot in slots],
                    "auc": [asdict(slot.after.auc) for slot in slots],
                }
            )
    return rows


def by_setting(rounds: Rounds, maps: Mapping[str, SlotCalibration], seed: int) -> list[dict[str, Any]]:
    """Mean error of each set of maps, and of none, under each setting; all domains pooled."""
    rows = []
    for setting, domains in rounds.items():
        proposals = joined(list(domains.values()))
        fitting, judging = proposals.split(0.5, seed=seed)
        own = SequentialTemperatureScaling(maps="auto").fit(fitting).slot_calibration
        candidates: dict[str, SlotCalibration | None] = {"none": None, **maps, "fitted for it": own}
        rows.append(
            {
                "setting": setting,
                "num_prompts": judging.num_prompts,
                "num_rounds": len(judging),
                "errors": {name: asdict(mean_error(judging, found, seed)) for name, found in candidates.items()},
                "floor": mean_floor(judging, own, seed),
            }
        )
    return rows


# -- shapes of maps ---------------------------------------------------------------------------------------------------


def by_shape(rounds: Rounds, seed: int) -> list[dict[str, Any]]:
    """Error at slot 1 of several kinds of maps, fitted on one half of the prompts and judged on the other."""
    rows = []
    for setting, domains in rounds.items():
        proposals = joined(list(domains.values()))
        errors: dict[str, list[float]] = {"none": [], "temperature": [], "platt": [], "isotonic": []}
        for split in range(NUM_SPLITS):
            fitting, judging = proposals.split(0.5, seed=seed + split)
            outcome = judging.is_accepted[:, 0].float()
            for name, predicted in _first_slot(fitting, judging).items():
                errors[name].append(expected_calibration_error(predicted, outcome))
        floor = calibrated_error_floor(torch.sigmoid(judging.logits[:, 0]), seed=seed, num_draws=200)[0]
        rows.append({"setting": setting, "num_rounds": len(judging), "errors": errors, "floor": floor})
    return rows


def _first_slot(fitting: Proposals, judging: Proposals) -> dict[str, torch.Tensor]:
    """Predicted acceptance of slot 1 in the rounds to be judged."""
    predicted = {"none": torch.sigmoid(judging.logits[:, 0])}
    for kind in ("temperature", "platt"):
        found = SequentialTemperatureScaling(maps=kind).fit(fitting).slot_calibration
        predicted[kind] = torch.sigmoid(judging.logits[:, 0] * found.scale[0] + found.shift[0])
    steps = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip")
    steps.fit(fitting.logits[:, 0].double().numpy(), fitting.is_accepted[:, 0].double().numpy())
    predicted["isotonic"] = torch.from_numpy(steps.predict(judging.logits[:, 0].double().numpy())).float()
    return predicted


# -- changed traffic --------------------------------------------------------------------------------------------------


def by_traffic(rounds: Rounds, seed: int) -> list[Traffic]:
    """Fit on chat or on the rest, and meet the other."""
    found = []
    for setting, domains in rounds.items():
        chat = [part for name, part in domains.items() if name in CHAT]
        rest = [part for name, part in domains.items() if name not in CHAT]
        if chat and rest:
            kinds = {"math and code": joined(rest), "chat": joined(chat)}
            for first, second in (("math and code", "chat"), ("chat", "math and code")):
                try:
                    found.append(meet(setting, (first, kinds[first]), (second, kinds[second]), seed))
                except CalibrationError as error:  # too few rounds: no row of the table
                    logger.warning("%s, %s, then %s: left out, %s", setting, first, second, error)
    return found


def meet(setting: str, known: tuple[str, Proposals], new: tuple[str, Proposals], seed: int) -> Traffic:
    """Fit on one kind of traffic and judge on another, before and after a refit from other prompts of its own."""
    fitting, before = known[1].split(HELD_OUT_FRACTION, seed=seed)
    earlier, later = new[1].split(JUDGED_FRACTION, seed=seed)
    scaling = SequentialTemperatureScaling(maps="auto")
    maps, refitted = (scaling.fit(part).slot_calibration for part in (fitting, earlier))
    survival = calibrate(new[1].logits, maps).survival
    assert survival is not None
    gaps = survival.mean(dim=0) - new[1].is_accepted.float().mean(dim=0)
    return Traffic(
        setting=setting,
        fitted_on=known[0],
        judged_on=new[0],
        before=mean_error(before, maps, seed),
        after=mean_error(later, maps, seed),
        raw=mean_error(later, None, seed),
        refitted=mean_error(later, refitted, seed),
        floor=mean_floor(later, refitted, seed),
        largest_gap=float(gaps[gaps.abs().argmax()]),
        warned_after=rounds_to_warning(new[1], maps, setting),
        warned_before=rounds_to_warning(before, maps, setting),
    )


def rounds_to_warning(proposals: Proposals, maps: SlotCalibration, setting: str) -> int | None:
    """Rounds that a drift watch needs to warn, under its default bounds."""
    watch = DriftWatch(proposals.num_slots, mode=mode_of(setting))
    survival = calibrate(proposals.logits, maps).survival
    assert survival is not None
    verified, accepted = (table.sum(dim=1).tolist() for table in (proposals.is_verified, proposals.is_accepted))
    for start in range(0, len(proposals), 8):
        end = start + 8
        watch.observe(survival[start:end], verified[start:end], accepted[start:end])
        if watch.has_warned:
            return min(end, len(proposals))
    return None
