"""Policies that judge each row on its own and remember nothing."""

import torch
from torch import Tensor

from ...errors import UnsupportedGenerationError
from ..types import Confidence
from .facts import RoundFacts


class FullPolicy:
    """Verify every draft."""

    name = "full"
    needs_confidence = False
    needs_costs = False

    def lengths(self, confidence: Confidence, facts: RoundFacts) -> Tensor:
        return torch.full_like(facts.room, facts.num_slots)

    def observe(self, confidence: Confidence, lengths: Tensor, num_accepted: Tensor, facts: RoundFacts) -> None:
        """Nothing to remember."""


class _FixedThreshold:
    """What policies with a threshold share.

    Raises:
        UnsupportedGenerationError: the threshold is no probability.
    """

    needs_confidence = True
    needs_costs = False

    def __init__(self, threshold: float) -> None:
        if not isinstance(threshold, int | float) or not 0.0 <= threshold <= 1.0:
            raise UnsupportedGenerationError(
                f"assistant_confidence_threshold must be a probability, 0 to 1, got {threshold!r}; leave it out for "
                "the drafter's own"
            )
        self.threshold = threshold

    def observe(self, confidence: Confidence, lengths: Tensor, num_accepted: Tensor, facts: RoundFacts) -> None:
        """Nothing to remember."""

    def _before_first_below(self, estimates: Tensor | None) -> Tensor:
        assert estimates is not None, "a drafter without confidence head is refused before drafting"
        return (estimates >= self.threshold).long().cumprod(dim=-1).sum(dim=-1)


class ThresholdPolicy(_FixedThreshold):
    """Verify up to the first slot whose conditional acceptance estimate `c_k` is below a threshold (released code)."""

    name = "threshold"

    def lengths(self, confidence: Confidence, facts: RoundFacts) -> Tensor:
        return self._before_first_below(confidence.conditional)


class SurvivalPolicy(_FixedThreshold):
    """Verify up to the first slot whose survival estimate `a_k`, of all drafts up to it, is below a threshold.

    The stop of SpecDec++ (Huang et al., arXiv 2405.19715): as soon as a rejection so far is likelier than one minus
    the threshold.
    """

    name = "survival"

    def lengths(self, confidence: Confidence, facts: RoundFacts) -> Tensor:
        return self._before_first_below(confidence.survival)
