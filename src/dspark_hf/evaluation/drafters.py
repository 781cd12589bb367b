"""A report about several drafters: tau with intervals, acceptance, confidence, shorter drafts, paired differences."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..training.answer_facts import AnswerFacts
from .acceptance_tables import GroupScore, confidence_by_slot, group_scores
from .calibration_quality import SlotQuality
from .cuts import CutPlan
from .depths import DepthScore, DrafterFacts
from .identity import PairFacts
from .intervals import Estimate
from .provenance import Provenance
from .replay import ReplayedText
from .results import domain_of
from .tau_tables import PairedDifference, mean_tau_of, tau_of

# What the tables of shorter drafts mean, by how the drafters were measured.
MEANING_OF_CUTS = {
    "replay": "every text was walked again with shorter drafts, so that rounds start where they would have started",
    "decoding": "the rounds of whole drafts were cut short one by one; with shorter drafts other rounds would have "
    "started elsewhere",
}


@dataclass(frozen=True)
class DrafterScore:
    """One drafter on all texts of one temperature.

    Attributes:
        drafter: Its name.
        temperature: Of the texts.
        tau: By domain, the part of a prompt's id before the slash; and `all`, pooled.
        mean_tau: Mean of the domains' taus.
        conditional_acceptance: Per slot, among rounds whose earlier slots were all accepted.
        confidence_auc: Per slot; empty without a confidence head.
        confidence_ece: Per slot, against the probability of acceptance; likewise.
        groups: More of it with intervals, for `all` and for each group of data sets.
    """

    drafter: str
    temperature: float
    tau: dict[str, Estimate]
    mean_tau: Estimate
    conditional_acceptance: list[float]
    confidence_auc: list[float]
    confidence_ece: list[float]
    groups: dict[str, GroupScore] = field(default_factory=dict)


@dataclass(frozen=True)
class TextResult:
    """One drafter on one text: tokens that rounds committed, and the expected number of rounds."""

    drafter: str
    temperature: float
    id: str
    num_tokens: int
    num_rounds: float


@dataclass(frozen=True)
class DraftersReport:
    """All drafters on all texts, each against the last one named, and what every text gave.

    Attributes:
        num_texts: By temperature.
        sources: Files of texts or prompts, and how texts were made.
        pairs: By drafter, what identifies it and the target.
        method: `replay` or `decoding`.
        meaning_of_cuts: What the tables of lengths and thresholds are of.
        settings: Of decoding; None for replays.
        drafters: By drafter, kind and size.
        depths: Drafters of one kind and several depths.
        reliability: By drafter and mode, predicted against realised survival; of decoding, where asked for.
    """

    target: str
    provenance: Provenance
    num_texts: dict[str, int]
    sources: list[AnswerFacts]
    pairs: dict[str, PairFacts]
    scores: list[DrafterScore]
    differences: list[PairedDifference]
    texts: list[TextResult]
    method: str = "replay"
    meaning_of_cuts: str = MEANING_OF_CUTS["replay"]
    settings: dict[str, Any] | None = None
    drafters: dict[str, DrafterFacts] = field(default_factory=dict)
    depths: list[DepthScore] = field(default_factory=list)
    reliability: dict[str, dict[str, list[SlotQuality]]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"kind": "evaluation", **asdict(self)}


def score(drafter: str, temperature: float, texts: Sequence[ReplayedText], plan: CutPlan, *, seed: int) -> DrafterScore:
    """Pool what a drafter did on the texts of one temperature."""
    domains: dict[str, list[ReplayedText]] = {}
    for text in texts:
        domains.setdefault(domain_of(text.id), []).append(text)
    reached = torch.stack([text.reached for text in texts]).sum(dim=0)
    accepted = torch.stack([text.accepted for text in texts]).sum(dim=0)
    return DrafterScore(
        drafter=drafter,
        temperature=temperature,
        tau={"all": tau_of(texts, seed=seed)}
        | {name: tau_of(part, seed=seed) for name, part in sorted(domains.items())},
        mean_tau=mean_tau_of(texts, seed=seed),
        conditional_acceptance=(accepted / reached.clamp(min=1e-12)).tolist(),
        confidence_auc=confidence_by_slot(texts, is_auc=True),
        confidence_ece=confidence_by_slot(texts, is_auc=False),
        groups=group_scores(texts, plan.cuts, seed=seed),
    )
