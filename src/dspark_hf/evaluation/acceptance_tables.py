"""Acceptance of one drafter in tables, by slot, proposal length and threshold, with intervals over prompts."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ..fitting.metrics import NUM_BINS, expected_calibration_error, roc_auc
from .calibration_quality import NUM_AUC_BINS, auc_of_sums, bootstrap_sums, ece_of_sums, sums_by_prompt
from .cuts import Cut
from .data_sets import ALL, groups_among
from .intervals import Estimate, Floats, Resamples, Sums
from .replay import ReplayedText
from .results import domain_of


@dataclass(frozen=True)
class RoundCounts:
    """What became of all drafts; expected numbers where texts are replayed.

    Attributes:
        num_tokens: Committed by rounds.
        num_rounds: Rounds.
        num_verified: Drafts that the target saw; replayed, without those behind a text's end.
        num_accepted, num_rejected: Of them; a draft behind a rejected one counts as rejected.
    """

    num_tokens: float
    num_rounds: float
    num_verified: float
    num_accepted: float
    num_rejected: float


@dataclass(frozen=True)
class SlotScore:
    """One slot of whole drafts.

    Attributes:
        slot: From 1.
        num_reached: Verified drafts whose predecessors were all accepted.
        num_accepted: Of them.
        conditional_acceptance: Their ratio (paper, Figure 2).
        confidence_auc, confidence_ece: Of the raw `c_k` of drafts that were reached; None without a confidence head,
            and for groups of data sets.
    """

    slot: int
    num_reached: float
    num_accepted: float
    conditional_acceptance: Estimate
    confidence_auc: Estimate | None = None
    confidence_ece: Estimate | None = None


@dataclass(frozen=True)
class CutScore:
    """Rounds with shorter drafts (paper, Figures 4 and 5).

    Attributes:
        value: Drafts kept, or the threshold on `c_k`.
        tau: Tokens per round, bonus counted.
        accepted, rejected: Verified drafts per round, bonus not counted.
        rate: Accepted of verified tokens, bonus counted in both, as in the paper.
        draft_rate: The same of drafts alone.
        conditional_acceptance: By slot; None where no round got that far. Of lengths only.
    """

    value: float
    tau: Estimate
    accepted: Estimate
    rejected: Estimate
    rate: Estimate
    draft_rate: Estimate
    conditional_acceptance: list[float | None] = field(default_factory=list)


@dataclass(frozen=True)
class GroupScore:
    """One drafter on a group of data sets.

    Attributes:
        data_sets: In it.
        num_texts: Prompts.
        counts: Of whole drafts.
        slots: Of whole drafts.
        lengths: By number of drafts kept, 1 to gamma.
        thresholds: By threshold on the raw confidence; empty without a confidence head.
        calibrated_thresholds: On the calibrated one; empty without a calibration.
    """

    data_sets: list[str]
    num_texts: int
    counts: RoundCounts
    slots: list[SlotScore]
    lengths: list[CutScore]
    thresholds: list[CutScore]
    calibrated_thresholds: list[CutScore]


def group_scores(texts: Sequence[ReplayedText], cuts: Sequence[Cut], *, seed: int) -> dict[str, GroupScore]:
    """Tables of all data sets together, `all`, and of each group of them that is there.

    Args:
        texts: Each with sums of these cuts, at least one.
        cuts: As `CutPlan.cuts` lists them.
        seed: Of resampling.
    """
    groups = groups_among(domain_of(text.id) for text in texts)
    scores = {}
    for group, data_sets in groups.items():
        part = [text for text in texts if domain_of(text.id) in data_sets]
        scores[group] = _group_score(part, cuts, data_sets, seed)
    scores[ALL] = dataclasses.replace(scores[ALL], slots=_with_confidence(scores[ALL].slots, texts, seed))
    return scores


_SLOT_SUMS = ("reached", "accepted")


def _group_score(texts: Sequence[ReplayedText], cuts: Sequence[Cut], data_sets: list[str], seed: int) -> GroupScore:
    resamples = Resamples(_columns(texts, cuts), seed=seed)
    whole = max((i for i, cut in enumerate(cuts) if cut.kind == "length"), key=lambda i: cuts[i].value)
    found = [text.cuts for text in texts if text.cuts is not None]
    assert len(found) == len(texts), "every text was asked for its cuts"
    total = {
        name: float(sum(getattr(one, f"num_{name}")[whole] for one in found))
        for name in ("tokens", "rounds", "verified", "accepted")
    }
    reached, accepted = (torch.stack([getattr(one, name) for one in found]).sum(dim=0) for name in _SLOT_SUMS)
    conditional = torch.where(reached > 0, accepted / reached, torch.nan)
    scores = [_cut_score(cut.value, i, resamples) for i, cut in enumerate(cuts)]
    by_kind = {
        kind: [score for cut, score in zip(cuts, scores, strict=True) if cut.kind == kind]
        for kind in ("length", "threshold", "calibrated")
    }
    return GroupScore(
        data_sets=data_sets,
        num_texts=len(texts),
        counts=RoundCounts(
            **{f"num_{name}": value for name, value in total.items()},
            num_rejected=total["verified"] - total["accepted"],
        ),
        slots=[
            SlotScore(k + 1, float(reached[whole, k]), float(accepted[whole, k]), resamples.estimate(_slot_ratio(k)))
            for k in range(reached.shape[1])
        ],
        lengths=[
            dataclasses.replace(score, conditional_acceptance=_known(conditional[i, : i + 1].tolist()))
            for i, score in enumerate(by_kind["length"])
        ],
        thresholds=by_kind["threshold"],
        calibrated_thresholds=by_kind["calibrated"],
    )


def _columns(texts: Sequence[ReplayedText], cuts: Sequence[Cut]) -> dict[str, list[float]]:
    columns: dict[str, list[float]] = {}
    for i in range(len(cuts)):
        for name in ("tokens", "rounds", "verified", "accepted"):
            columns[f"{i}/{name}"] = [float(getattr(text.cuts, f"num_{name}")[i]) for text in texts]
    for k in range(len(texts[0].reached)):
        columns[f"slot {k}/reached"] = [float(text.reached[k]) for text in texts]
        columns[f"slot {k}/accepted"] = [float(text.accepted[k]) for text in texts]
    return columns


def _slot_ratio(k: int) -> Callable[[Sums], Floats]:
    def ratio(sums: Sums) -> Floats:
        return sums[f"slot {k}/accepted"] / sums[f"slot {k}/reached"]

    return ratio


def _cut_score(value: float, i: int, resamples: Resamples) -> CutScore:
    def of(statistic: Callable[[Floats, Floats, Floats, Floats], Floats]) -> Estimate:
        names = [f"{i}/{name}" for name in ("tokens", "rounds", "verified", "accepted")]
        return resamples.estimate(lambda sums: statistic(*(sums[name] for name in names)))

    return CutScore(
        value=value,
        tau=of(lambda tokens, rounds, verified, accepted: tokens / rounds),
        accepted=of(lambda tokens, rounds, verified, accepted: accepted / rounds),
        rejected=of(lambda tokens, rounds, verified, accepted: (verified - accepted) / rounds),
        rate=of(lambda tokens, rounds, verified, accepted: (accepted + rounds) / (verified + rounds)),
        draft_rate=of(lambda tokens, rounds, verified, accepted: accepted / verified),
    )


def _known(values: list[float]) -> list[float | None]:
    return [value if value == value else None for value in values]


# --- confidence ----------------------------------------------------------------------------------------------------


def confidence_by_slot(texts: Sequence[ReplayedText], *, is_auc: bool) -> list[float]:
    """AUC or calibration error of the raw `c_k` among drafts that were reached; empty without confidences."""
    found = _confidences(texts)
    if found is None:
        return []
    predicted, acceptance, label, weight = found
    slots = range(predicted.shape[1])
    if is_auc:
        return [
            roc_auc(predicted[:, k], weight[:, k] * acceptance[:, k], weight[:, k] * (1 - acceptance[:, k]))
            for k in slots
        ]
    return [expected_calibration_error(predicted[:, k], label[:, k], weight[:, k]) for k in slots]


def _with_confidence(slots: list[SlotScore], texts: Sequence[ReplayedText], seed: int) -> list[SlotScore]:
    """The slots with intervals of the two measures of confidence."""
    found = _confidences(texts)
    if found is None:
        return slots
    predicted, acceptance, label, weight = found
    prompt = torch.cat([torch.full((len(text.acceptance),), i) for i, text in enumerate(texts)])
    exact_auc, exact_ece = (confidence_by_slot(texts, is_auc=is_auc) for is_auc in (True, False))
    scores = []
    for k, slot in enumerate(slots):
        c, w = predicted[:, k].double(), weight[:, k]
        ranks = sums_by_prompt(c, prompt, NUM_AUC_BINS, [w * acceptance[:, k], w * (1 - acceptance[:, k])])
        errors = sums_by_prompt(c, prompt, NUM_BINS, [w * c, w * label[:, k], w])
        auc, ece = bootstrap_sums(ranks, auc_of_sums, seed), bootstrap_sums(errors, ece_of_sums, seed)
        if auc.value is not None:  # without the ties that bins make
            auc = dataclasses.replace(auc, value=exact_auc[k])
        if ece.value is not None:
            ece = dataclasses.replace(ece, value=exact_ece[k])
        scores.append(dataclasses.replace(slot, confidence_auc=auc, confidence_ece=ece))
    return scores


def _confidences(
    texts: Sequence[ReplayedText],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """`c_k`, acceptance, label and weight of all rounds, each `[rounds, slots]`; None without confidences."""
    if any(text.confidence is None for text in texts):
        return None
    parts = [(text.confidence, text.acceptance, text.label, text.weight) for text in texts]
    predicted, acceptance, label, weight = (torch.cat([*column]) for column in zip(*parts, strict=True))
    return predicted, acceptance, label, weight
