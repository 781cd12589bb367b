"""Checks of what the drafter does with this target: overflow, layout, feature layers, mask, acceptance."""

from typing import Any

import torch
from torch import Tensor, nn

from ...errors import IncompatibleTargetError
from ..intervals import Estimate, bootstrap
from ..provenance import dtype_name
from ..replay import Replay
from .case import Case
from .findings import Finding, NotExamined
from .probes import Cure, probing_of

# A draft costs at least so much of a target step: who accepts fewer first drafts is of no use anywhere.
NEGLIGIBLE_ACCEPTANCE = 0.05

_CURED_BY = {
    "draft_layout": "the drafter's block is laid out otherwise: draft_layout is {before!r}, and {value!r} accepts",
    "target_layer_ids": "the feature layers are off: target_layer_ids are {before}, and {value} accept",
    "mask_token_id": "the mask is another token: mask_token_id is {before}, and {value} accepts",
}
_CAUSES = {
    "draft_layout": "a block laid out otherwise",
    "target_layer_ids": "feature layers that are off",
    "mask_token_id": "another mask token",
}


def check_overflow(case: Case) -> tuple[str, list[Finding]]:
    """The first module whose output is not finite, on a text of the target."""
    texts = case.greedy.texts[:1]
    if not texts:
        raise NotExamined("the target answers no prompt with two tokens or more")
    with _Watch(case.drafter) as watch:
        try:
            Replay(case.target, texts, alter_features=watch.features).run(case.drafter)
        except IncompatibleTargetError as error:
            raise NotExamined(f"drafts cannot be replayed: {error}") from error
    unusable, rounds = case.greedy.report.num_unusable_rounds, case.greedy.report.num_rounds
    case.measured["overflow"] = {"largest": watch.largest, "num_unusable_rounds": unusable, "num_rounds": rounds}
    dtype = case.drafter.dtype
    if watch.first is None and not unusable:
        return f"all numbers are finite in {dtype_name(dtype)}, the largest {watch.largest:.4g}", []
    case.causes.append("numbers that overflow")
    where = watch.first or "a draft's logits"
    if dtype == torch.float16:
        mend = "load both models with dtype=torch.bfloat16 (--dtype bfloat16), or the drafter in float32"
    else:
        mend = "load the drafter again from a file that is whole; if the weights are, compare with dtype=torch.float32"
    return "", [
        Finding(
            f"the drafter computes NaN or infinity in {dtype_name(dtype)}, first in {where}, where numbers were up to "
            f"{watch.largest:.4g} before; {unusable} of {rounds} rounds had no usable draft",
            "certain: computed on a text of the target" + (" (float16 ends at 65504)" if _is_half(case) else ""),
            mend,
        )
    ]


def _is_half(case: Case) -> bool:
    return torch.float16 in (case.drafter.dtype, case.target.dtype)


class _Watch:
    """Notes the first output that is not finite, and the largest finite number, while drafts are made."""

    def __init__(self, drafter: nn.Module) -> None:
        self.first: str | None = None
        self.largest = 0.0
        self._drafter = drafter
        self._hooks: list[Any] = []

    def __enter__(self) -> "_Watch":
        for name, module in self._drafter.named_modules():
            if not list(module.children()):
                self._hooks.append(module.register_forward_hook(self._hook(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def features(self, features: Tensor) -> Tensor:
        self._see("the target's features", features)
        return features

    def _hook(self, name: str) -> Any:
        return lambda module, inputs, output: self._see(name, output)

    def _see(self, name: str, output: Any) -> None:
        if self.first is not None or not isinstance(output, Tensor) or not output.is_floating_point():
            return
        if bool(output.isfinite().all()):
            self.largest = max(self.largest, float(output.abs().max()) if output.numel() else 0.0)
        else:
            self.first = name


def check_layout(case: Case) -> tuple[str, list[Finding]]:
    """Whether the block is the anchor and masks behind it, or masks that fill in the tokens behind the anchor."""
    return _probed(case, "draft_layout", "save the drafter with {field}={value!r} in config.json")


def check_layer_ids(case: Case) -> tuple[str, list[Finding]]:
    """Whether features one layer on or back are those that the drafter was trained with."""
    return _probed(case, "target_layer_ids", "write {field}: {value} into config.json (0 is the first decoder layer)")


def check_mask(case: Case) -> tuple[str, list[Finding]]:
    """Whether another special token is the mask that the drafter was trained with."""
    return _probed(case, "mask_token_id", "write {field}: {value} into config.json")


def _probed(case: Case, field: str, mend: str) -> tuple[str, list[Finding]]:
    _refuse_broken_numbers(case)
    probing = probing_of(case)
    cure = next((cure for cure in probing.cures if cure.change.field == field), None)
    gains = [gain for change, gain in probing.tried if change.field == field]
    case.measured.setdefault("probes", {})[field] = [
        {"value": change.value, "gain": gain} for change, gain in probing.tried if change.field == field
    ]
    if cure is None:
        if not gains:
            raise NotExamined("there is no other value to try")
        open_ones = sum(gain.high is None or gain.high >= 0 for gain in gains)
        told = f"{open_ones} undecided, give more prompts" if open_ones else "all surely accept less"
        return f"{len(gains)} other values tried, {told} ({probing.num_drafts} drafts each)", []
    case.causes.append(_CAUSES[field])
    return "", [_cured(cure, mend)]


def _cured(cure: Cure, mend: str) -> Finding:
    values = {"field": cure.change.field, "before": cure.before, "value": cure.change.value}
    return Finding(
        _CURED_BY[cure.change.field].format(**values) + " more",
        f"acceptance of a draft is higher by {cure.gain.told('points')}, the best of {cure.num_tried} tried",
        mend.format(**values),
        evidence=cure.gain,
    )


def _refuse_broken_numbers(case: Case) -> None:
    if {"weights that are not finite", "numbers that overflow"} & set(case.causes):
        raise NotExamined("the drafter's numbers are not finite; mend that first")


def check_features(case: Case) -> tuple[str, list[Finding]]:
    """Whether the drafter reads this target's features at all: another target's say nothing to it."""
    _refuse_broken_numbers(case)
    probing = probing_of(case)
    told = probing.feature_gain.told("points more acceptance than with features of other positions")
    case.measured["feature_gain"] = probing.feature_gain
    if probing.reads_features:
        return told, []
    if probing.feature_gain.low is None:
        raise NotExamined(f"one prompt settles nothing: {told}")
    if case.causes:
        raise NotExamined(f"low acceptance is explained by {case.causes[0]}")
    case.causes.append("features that say nothing to the drafter")
    return "", [
        Finding(
            "the drafter makes nothing of this target's features: with those of other positions it accepts as much. "
            "It was trained with another target (of the same sizes), with its layers in another order, or not at all",
            f"{told}; that is within chance, or next to nothing",
            "load the target that it was trained with: its card or training_report.json names it; one that was never "
            "trained has to be: `dspark train`",
            evidence=probing.feature_gain,
        )
    ]


def check_acceptance(case: Case) -> tuple[str, list[Finding]]:
    """Acceptance by slot, by really decoding."""
    report = case.greedy.report
    rounds = [one for one in case.greedy.rounds if one.num_accepted]
    slots = [_slot(case, k) for k in range(len(report.reached_per_slot))]
    case.measured["acceptance"] = {
        "tau": _tau(case),
        "slots": slots,
        "num_rounds": report.num_rounds,
        "num_prompts": len(rounds),
    }
    num_first = report.reached_per_slot[0] if slots else 0
    if not num_first:
        raise NotExamined("no draft was verified")
    accepted = report.accepted_per_slot[0]
    # Above this share, so few accepted ones would be met in one of a hundred runs only.
    bound = 1 - 0.01 ** (1 / num_first)
    if accepted or bound > NEGLIGIBLE_ACCEPTANCE:
        return f"{accepted} of {num_first} first drafts accepted, tau {report.tau:.2f}", []
    causes = " and ".join(dict.fromkeys(case.causes)) or (
        "layout, layer ids, mask, dtype, chat template or target, none of which another check could name"
    )
    return "", [
        Finding(
            f"no draft was accepted, of {num_first} in slot 1",
            f"below {bound:.1%} at 99 %, rounds taken for independent",
            f"likely causes: {causes}",
        )
    ]


def _slot(case: Case, k: int) -> dict[str, Any]:
    """What became of slot k + 1, with an interval over prompts."""
    columns: dict[str, list[float]] = {"reached": [], "accepted": []}
    for one in case.greedy.rounds:
        pairs = list(zip(one.num_verified, one.num_accepted, strict=True))
        columns["reached"].append(sum(verified > k and accepted >= k for verified, accepted in pairs))
        columns["accepted"].append(sum(verified > k and accepted > k for verified, accepted in pairs))
    return {
        "slot": k + 1,
        "num_reached": int(sum(columns["reached"])),
        "num_accepted": int(sum(columns["accepted"])),
        "conditional_acceptance": bootstrap(columns, lambda s: s["accepted"] / s["reached"], seed=case.seed),
    }


def _tau(case: Case) -> Estimate:
    columns: dict[str, list[float]] = {
        "rounds": [len(one.num_accepted) for one in case.greedy.rounds],
        "tokens": [len(one.num_accepted) + sum(one.num_accepted) for one in case.greedy.rounds],
    }
    return bootstrap(columns, lambda sums: sums["tokens"] / sums["rounds"], seed=case.seed)
