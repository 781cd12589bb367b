"""What the stages of a round hand to each other."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DraftBlock:
    """Stage 1's result: drafted tokens and the exact law each was drawn from.

    Attributes:
        tokens: int64 `[rows, slots]`.
        draft_probs: float32 `[rows, slots, vocab]`, the law after all logits processors; None when drafting was
            greedy, so that the law is one-hot at `tokens`.
        confidence_logits: float32 `[rows, slots]`, raw; None without a confidence head.
        num_usable: int64 `[rows]`, slots before the first whose logits or confidence were NaN or infinite. A slot's
            numbers come from the tokens before it, so cutting there does not depend on the tokens that are kept.
    """

    tokens: Tensor
    draft_probs: Tensor | None
    confidence_logits: Tensor | None
    num_usable: Tensor


@dataclass(frozen=True)
class Confidence:
    """Stage 2's result: calibrated estimates, or both None without a confidence head.

    Attributes:
        conditional: `c_k` float32 `[rows, slots]`, probability that draft k is accepted if all before it were.
        survival: `a_k` float32 `[rows, slots]`, probability that drafts 1..k are all accepted.
    """

    conditional: Tensor | None
    survival: Tensor | None


@dataclass(frozen=True)
class Proposal:
    """Stages 1 to 3: a block, how sure the drafter is, and how much of it will be verified.

    Attributes:
        lengths: `ell`, int64 `[rows]`, drafts sent to verification, 0 to the number of slots.
    """

    block: DraftBlock
    confidence: Confidence
    lengths: Tensor


@dataclass(frozen=True)
class Verification:
    """Stage 4's result: what the target says at the anchor and at each verified draft.

    Attributes:
        logits: float32 `[rows, 1 + width, vocab]`, as the target's forward returned them.
        scores: float32, same shape, after all logits processors; `softmax(scores)` is the target law.
    """

    logits: Tensor
    scores: Tensor


@dataclass(frozen=True)
class Acceptance:
    """Stage 5's result.

    Attributes:
        num_accepted: int64 `[rows]`, drafts kept, 0 to `ell` (bonus token not counted).
        next_token: int64 `[rows]`, the target's own token after them (bonus, or residual draw after a rejection).
        is_valid: bool `[rows]`; False where the law of the next token holds NaN or no mass, so that plain sampling
            would fail as well.
    """

    num_accepted: Tensor
    next_token: Tensor
    is_valid: Tensor
