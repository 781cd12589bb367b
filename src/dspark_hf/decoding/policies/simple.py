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


class ThresholdPolicy:
    """Verify up to the first slot whose conditional acceptance estimate `c_k` is below a threshold (released code).

    Raises:
        UnsupportedGenerationError: the threshold is no probability.
    """

    name = "threshold"
    needs_confidence = True
    needs_costs = False

    def __init__(self, threshold: float) -> None:
        if not isinstance(threshold, int | float) or not 0.0 <= threshold <= 1.0:
            raise UnsupportedGenerationError(
                f"assistant_confidence_threshold must be a probability, 0 to 1, got {threshold!r}; leave it out for "
                "the drafter's own"
            )
        self.threshold = threshold

    def lengths(self, confidence: Confidence, facts: RoundFacts) -> Tensor:
        assert confidence.conditional is not None, "a drafter without confidence head is refused before drafting"
        keeps = confidence.conditional >= self.threshold
        return keeps.long().cumprod(dim=-1).sum(dim=-1)

    def observe(self, confidence: Confidence, lengths: Tensor, num_accepted: Tensor, facts: RoundFacts) -> None:
        """Nothing to remember."""
