"""What kind of drafter each is, and drafters that differ in depth side by side (paper, Figure 3)."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from ..configuration_dspark import DSparkConfig
from .data_sets import groups_among
from .intervals import Estimate
from .replay import ReplayedText
from .results import domain_of
from .tau_tables import PairedDifference, mean_tau_of, paired_differences, tau_of


@dataclass(frozen=True)
class DrafterFacts:
    """Kind and size of a drafter.

    Attributes:
        family: What drafters that differ in size only have in common, such as `DSpark, vanilla head` or `DFlash`.
        num_layers: Draft layers; None where its config does not say.
        num_draft_tokens: gamma.
        num_parameters: Of its own; what it borrows of the target is not counted.
    """

    family: str
    num_layers: int | None
    num_draft_tokens: int
    num_parameters: int


@dataclass(frozen=True)
class DepthScore:
    """One drafter among those of its family that differ in depth.

    Attributes:
        tau: By data set, by group, `all` and `mean of data sets`.
        gains: Over the drafter of the next smaller depth, on the same prompts; empty for the shallowest one.
    """

    family: str
    num_layers: int
    drafter: str
    temperature: float
    tau: dict[str, Estimate]
    gains: list[PairedDifference]


def drafter_facts(drafter: PreTrainedModel, num_draft_tokens: int) -> DrafterFacts:
    """Facts about a loaded drafter of any class."""
    config = drafter.config
    return DrafterFacts(
        family=_family(config),
        num_layers=getattr(config, "num_hidden_layers", None),
        num_draft_tokens=num_draft_tokens,
        num_parameters=sum(parameter.numel() for parameter in drafter.parameters()),
    )


def _family(config: object) -> str:
    model_type = str(getattr(config, "model_type", "unknown"))
    if model_type != DSparkConfig.model_type:
        kind = str(getattr(config, "drafter_type", model_type))
        return {"mtp": "MTP", "eagle3": "Eagle3"}.get(kind, kind)
    if not getattr(config, "markov_rank", 0):
        return "DFlash"
    return f"DSpark, {getattr(config, 'markov_head_type', 'unknown')} head"


def depth_scores(
    facts: Mapping[str, DrafterFacts], texts: Mapping[tuple[str, float], Sequence[ReplayedText]], *, seed: int
) -> list[DepthScore]:
    """Scores of drafters that have others of their family, of the same gamma and another depth, beside them."""
    kinds: dict[tuple[str, int], list[str]] = {}
    for name, one in facts.items():
        if one.num_layers is not None:
            kinds.setdefault((one.family, one.num_draft_tokens), []).append(name)
    scores: list[DepthScore] = []
    temperatures = dict.fromkeys(temperature for _, temperature in texts)
    for ((family, _), names), temperature in itertools.product(kinds.items(), temperatures):
        depths = {name: facts[name].num_layers or 0 for name in names}
        if len(set(depths.values())) < 2:
            continue
        for name in sorted(names, key=lambda name: depths[name]):
            shallower = [other for other in names if depths[other] < depths[name]]
            gains: list[PairedDifference] = []
            if shallower:
                before = max(shallower, key=lambda name: depths[name])
                pair = (texts[name, temperature], texts[before, temperature])
                gains = paired_differences((name, before), temperature, pair, seed=seed)
            tau = _taus(texts[name, temperature], seed)
            scores.append(DepthScore(family, depths[name], name, temperature, tau, gains))
    return scores


def _taus(texts: Sequence[ReplayedText], seed: int) -> dict[str, Estimate]:
    data_sets = list(dict.fromkeys(domain_of(text.id) for text in texts))
    parts = {name: [name] for name in data_sets} | groups_among(data_sets)
    taus = {
        part: tau_of([text for text in texts if domain_of(text.id) in members], seed=seed)
        for part, members in parts.items()
    }
    return taus | {"mean of data sets": mean_tau_of(texts, seed=seed)}
