"""Checks of the calibration: is there one for each mode, does it hold, and are maps at each other's place."""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...config_rules import CALIBRATION_MODES
from ...decoding.calibrate import SlotCalibration, calibrate
from ...decoding.drift import DriftWatch, SlotDrift
from ...fitting.proposals import Proposals
from .case import Case, Law
from .evidence import Evidence, jackknife, stretches
from .findings import Finding, NotExamined


def check_calibration(case: Case) -> tuple[str, list[Finding]]:
    """Predicted against realised survival in each mode, and maps that would serve better at another place."""
    config = case.drafter.config
    if not config.enable_confidence_head:
        raise NotExamined("the drafter has no confidence head")
    if case.causes:  # estimates cannot hold where drafts fail for a reason of their own
        raise NotExamined(f"mend first: {case.causes[0]}")
    fitted: Mapping[str, Any] = config.calibration or {}
    findings = [] if fitted else [_absent(case)]
    told = []
    for mode in CALIBRATION_MODES:
        if mode not in fitted:
            if fitted:
                findings.append(_absent(case, mode))
            continue
        proposals = case.greedy.proposals if mode == "greedy" else _sampled(case, fitted[mode])
        slots, has_drifted = _survival(case, mode, fitted[mode], proposals)
        swaps = _swaps(mode, fitted, proposals)
        findings += [_swapped(mode, *swap) for swap in swaps[:1]]
        if not swaps and has_drifted:
            findings.append(_drifted(mode, max(has_drifted, key=lambda slot: abs(slot.gap))))
        told.append(
            f"{mode}: largest gap {max((abs(s.gap) for s in slots), default=0.0):.1%} of {len(proposals)} rounds"
        )
    return "; ".join(told), findings


def _absent(case: Case, mode: str | None = None) -> Finding:
    return Finding(
        "the drafter's confidence is not calibrated" + ("" if mode is None else f" for {mode} decoding"),
        "certain: config.json holds no such calibration",
        f"dspark calibrate --target {case.target_name or 'TARGET'} --drafter {case.drafter_name or 'DRAFTER'} "
        "--prompts PROMPTS --output OUTPUT; policy full does without",
        is_fault=False,
    )


def _sampled(case: Case, entry: Mapping[str, Any]) -> Proposals:
    """Rounds of decoding under the settings that the mode was fitted for."""
    settings = entry["settings"]
    law = Law(
        float(settings.get("temperature", 1.0)),
        float(settings.get("top_p", 1.0)) if settings.get("top_p", 1.0) < 1 else None,
        int(settings["top_k"]) if settings.get("top_k") else None,
    )
    return case.decode(case.encoded, law).proposals


def _survival(
    case: Case, mode: str, entry: Mapping[str, Any], proposals: Proposals
) -> tuple[list[SlotDrift], list[SlotDrift]]:
    """Predicted and realised survival of every slot, and those that are further apart than `watch_drift` allows."""
    survival = calibrate(proposals.logits, SlotCalibration.of(entry)).survival
    assert survival is not None, "logits give survival"
    watch = DriftWatch(proposals.num_slots, mode=mode, window_rounds=max(2000, 10 * len(proposals)))
    watch.has_warned = True  # this report says it
    watch.observe(survival, proposals.is_verified.sum(dim=1).tolist(), proposals.is_accepted.sum(dim=1).tolist())
    slots = watch.check()
    case.measured.setdefault("calibration", {})[mode] = {
        "num_rounds": len(proposals),
        "slots": [vars(slot) | {"gap": slot.gap} for slot in slots],
    }
    return slots, [slot for slot in slots if watch.has_drifted(slot)]


def _swaps(mode: str, fitted: Mapping[str, Any], proposals: Proposals) -> list[tuple[str, str, Evidence]]:
    """Exchanges of maps under which the rounds are surely more likely, the best first: what, how to undo it, gain."""
    maps = SlotCalibration.of(fitted[mode])
    candidates: list[tuple[str, str, SlotCalibration]] = []
    for i, j in itertools.combinations(range(proposals.num_slots), 2):
        order = list(range(proposals.num_slots))
        order[i], order[j] = j, i
        other = SlotCalibration(maps.scale[order], maps.shift[order])
        what = f"the maps of slots {i + 1} and {j + 1} are at each other's place"
        candidates.append(
            (what, f"exchange entries {i + 1} and {j + 1} of calibration[{mode!r}] in config.json", other)
        )
    for name in fitted:
        if name != mode:
            what = f"the maps fitted for {name} decoding fit better: the modes are at each other's place"
            candidates.append(
                (what, "exchange the two modes of calibration in config.json", SlotCalibration.of(fitted[name]))
            )
    candidates = [one for one in candidates if not _is_same(one[2], maps)]
    found = [
        (what, mend, _gain(proposals, other, maps, num_comparisons=len(candidates))) for what, mend, other in candidates
    ]
    return sorted((one for one in found if one[2].is_above_zero), key=lambda one: -(one[2].value or 0.0))


def _is_same(one: SlotCalibration, other: SlotCalibration) -> bool:
    return torch.equal(one.scale, other.scale) and torch.equal(one.shift, other.shift)


def _gain(proposals: Proposals, other: SlotCalibration, own: SlotCalibration, *, num_comparisons: int) -> Evidence:
    """How much more likely, in nats a round, the outcomes are under other maps."""
    gain = _log_loss(proposals, own) - _log_loss(proposals, other)
    by_prompt = [gain[proposals.prompt == prompt] for prompt in proposals.prompt.unique()]
    columns = {
        "gain": [part for one in by_prompt for part in stretches(one)],
        "rounds": [part for one in by_prompt for part in stretches(torch.ones_like(one))],
    }
    return jackknife(
        columns,
        lambda sums: sums["gain"] / sums["rounds"],
        num_drafts=int(proposals.is_verified.sum()),
        num_prompts=len(by_prompt),
        num_comparisons=num_comparisons,
    )


def _log_loss(proposals: Proposals, maps: SlotCalibration) -> Tensor:
    """Of the outcome of every slot whose predecessors were accepted, summed by round: float64 `[n]`."""
    logits = (proposals.logits * maps.scale + maps.shift).double()
    before = torch.cat([torch.ones(len(proposals), 1, dtype=torch.bool), proposals.is_accepted[:, :-1]], dim=1)
    counts = proposals.is_verified & before
    loss = torch.nn.functional.softplus(logits) - proposals.is_accepted.double() * logits
    return torch.where(counts, loss, 0.0).sum(dim=1)


def _swapped(mode: str, what: str, mend: str, gain: Evidence) -> Finding:
    return Finding(
        f"calibration for {mode} decoding: {what}",
        f"with that undone outcomes are more likely, by {gain.told('nats a round')}",
        f"{mend}, or fit it again: `dspark calibrate`",
        evidence=gain,
    )


def _drifted(mode: str, slot: SlotDrift) -> Finding:
    return Finding(
        f"calibration for {mode} decoding does not hold on these prompts: drafts 1 to {slot.slot} were all accepted in "
        f"{slot.realised:.0%} of rounds where {slot.predicted:.0%} was predicted",
        f"{abs(slot.gap) / max(slot.standard_error, 1e-9):.1f} standard errors apart, {slot.num_rounds} rounds",
        "fit it on prompts like yours: `dspark calibrate`; output is unaffected, policies decide worse",
    )
