"""Goodput: one length for all rows, the best under an acceptance rate estimated from past rounds."""

import torch
from torch import Tensor

from ..types import Confidence
from .facts import RoundFacts, StepCosts
from .gate import MEMORY_ROW_ROUNDS, PRIOR_ACCEPTANCE, PRIOR_DRAFTS


class GoodputPolicy:
    """Verify the same number of drafts of each row, one at least: that with the most expected tokens per second.

    Expected of one rate for every slot and row, the share of judged drafts that were accepted lately. No confidence is
    read, so drafters without a confidence head can have it. Whether to draft at all is the gate's to say. The choice
    of lengths by goodput is that of TurboSpec (Liu et al., arXiv 2406.14066).
    """

    name = "goodput"
    needs_confidence = False
    needs_costs = True

    def __init__(self) -> None:
        self._counts: Tensor | None = None  # float32 [2], on the device: drafts accepted, drafts judged

    def lengths(self, confidence: Confidence, facts: RoundFacts) -> Tensor:
        assert facts.costs is not None, "a policy without costs is refused before drafting"
        goodput = self.goodput(facts.num_slots, facts.num_live, facts.costs)
        return (1 + goodput[1:].argmax()).expand(len(facts.row_ids))

    def goodput(self, num_slots: int, num_live: Tensor, costs: StepCosts) -> Tensor:
        """Expected tokens per second of a drafted round by the drafts verified of each row, float `[num_slots + 1]`.

        Args:
            num_live: int64 scalar, rows that have not ended.
        """
        rate = self.rate(costs.step_s)
        tau = num_live * torch.cat([rate.new_ones(1), rate.expand(num_slots)]).cumprod(dim=0).cumsum(dim=0)
        counts = num_live * torch.arange(1, num_slots + 2, device=rate.device)
        return tau / costs.round_s[counts.clamp(max=len(costs.round_s) - 1)]

    def rate(self, like: Tensor) -> Tensor:
        """Share of judged drafts that are accepted, a scalar in dtype and on the device of `like`."""
        counts = like.new_tensor(_PRIOR) if self._counts is None else self._counts.to(like)
        return counts[0] / counts[1]

    def observe(self, confidence: Confidence, lengths: Tensor, num_accepted: Tensor, facts: RoundFacts) -> None:
        """Take what a drafted round came to."""
        accepted = torch.minimum(num_accepted, lengths)
        judged = torch.minimum(accepted + 1, lengths)  # behind a rejection nobody looked
        new = torch.stack([accepted.sum(), judged.sum()]).float()
        keep = (1.0 - facts.num_live / MEMORY_ROW_ROUNDS).clamp(min=0.0)
        before = new.new_tensor(_PRIOR) if self._counts is None else self._counts
        self._counts = keep * before + new


_PRIOR = (PRIOR_ACCEPTANCE * PRIOR_DRAFTS, PRIOR_DRAFTS)
