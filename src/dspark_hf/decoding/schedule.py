"""Stage 3: how many drafts of each row go to verification.

A policy sees confidences only, never tokens. Its decision about slot k must follow from the confidences of slots 1..k
of that row and from other rows': those of the row read `x_<k` only, and rows draft independently, so the decision
cannot depend on `x_k` and verification stays lossless. The policies are in `policies/`.
"""

import torch
from torch import Tensor

from .policies.facts import RoundFacts, VerificationPolicy
from .types import Confidence


def schedule(policy: VerificationPolicy, confidence: Confidence, facts: RoundFacts) -> Tensor:
    """Drafts to verify per row, int64 `[rows]`.

    None of a row that has ended, none beyond the room that max_length leaves, and none from the first slot on that
    holds non-finite numbers.
    """
    return torch.minimum(policy.lengths(confidence, facts), facts.limits)
