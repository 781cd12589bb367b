"""Stage 2: raw confidence logits to conditional acceptance `c_k` and prefix survival `a_k`."""

import torch
from torch import Tensor

from .types import Confidence


def calibrate(confidence_logits: Tensor | None) -> Confidence:
    """`c_k = sigmoid(logit_k)` and `a_k = c_1 * ... * c_k` (paper, section 5).

    Args:
        confidence_logits: float32 `[rows, slots]`, or None for a drafter without a confidence head.
    """
    if confidence_logits is None:
        return Confidence(conditional=None, survival=None)
    conditional = torch.sigmoid(confidence_logits)
    return Confidence(conditional=conditional, survival=conditional.cumprod(dim=-1))
