"""Stage 3: how many drafts of each row go to verification.

A policy sees confidences only, never tokens. Its decision about slot k must follow from the confidences of slots 1..k
of that row: those read `x_<k` only, so the decision cannot depend on `x_k` and verification stays lossless.
"""

from typing import Protocol

import torch
from torch import Tensor

from ..errors import UnsupportedGenerationError
from .types import Confidence, DraftBlock


class VerificationPolicy(Protocol):
    """Chooses `ell` for each row."""

    name: str

    def lengths(self, confidence: Confidence, num_rows: int, num_slots: int, device: torch.device) -> Tensor:
        """Drafts to verify, int64 `[rows]`, each 0 to `num_slots`."""
        ...


class FullPolicy:
    """Verify every draft."""

    name = "full"

    def lengths(self, confidence: Confidence, num_rows: int, num_slots: int, device: torch.device) -> Tensor:
        return torch.full((num_rows,), num_slots, dtype=torch.long, device=device)


class ThresholdPolicy:
    """Verify up to the first slot whose conditional acceptance estimate `c_k` is below a threshold (released code)."""

    name = "threshold"

    def __init__(self, threshold: float) -> None:
        if not isinstance(threshold, int | float) or not 0.0 <= threshold <= 1.0:
            raise UnsupportedGenerationError(
                f"assistant_confidence_threshold must be a probability, 0 to 1, got {threshold!r}; leave it out for "
                "the drafter's own"
            )
        self.threshold = threshold

    def lengths(self, confidence: Confidence, num_rows: int, num_slots: int, device: torch.device) -> Tensor:
        assert confidence.conditional is not None, "a drafter without confidence head is refused before drafting"
        keeps = confidence.conditional >= self.threshold
        return keeps.long().cumprod(dim=-1).sum(dim=-1)


def schedule(policy: VerificationPolicy, block: DraftBlock, confidence: Confidence) -> Tensor:
    """Drafts to verify per row, int64 `[rows]`; none from the first slot on that holds non-finite numbers."""
    num_rows, num_slots = block.tokens.shape
    lengths = policy.lengths(confidence, num_rows, num_slots, block.tokens.device)
    return torch.minimum(lengths, block.num_usable)
