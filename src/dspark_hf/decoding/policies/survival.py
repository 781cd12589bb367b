"""How drafts have fared so far, by slot: a prior for rows that have no history of their own."""

import torch
from torch import Tensor
from torch.nn.functional import pad

# Conditional acceptance of every slot before anything was seen, and the number of drafts that this opinion weighs.
INITIAL_ACCEPTANCE = 0.85
PRIOR_DRAFTS = 8.0


class RealisedSurvival:
    """Share of drafts accepted, by slot, of those verified whose predecessors were accepted; kept on the device.

    Slots that are rarely verified say little, and what was not verified says nothing: no bias from short lengths.
    """

    def __init__(self) -> None:
        self._counts: Tensor | None = None  # float [2, slots]: drafts that came to be judged, drafts accepted

    def expected(self, num_slots: int, like: Tensor) -> Tensor:
        """`a_k` of a row that nothing is known of, `[slots]`, in dtype and on the device of `like`."""
        counts = like.new_zeros(2, num_slots)
        if self._counts is not None:
            counts = pad(self._counts, (0, num_slots - self._counts.shape[1])).to(like)
        judged, accepted = counts
        return ((INITIAL_ACCEPTANCE * PRIOR_DRAFTS + accepted) / (PRIOR_DRAFTS + judged)).cumprod(dim=0)

    def observe(self, lengths: Tensor, num_accepted: Tensor, num_slots: int) -> None:
        """Take the drafts verified and accepted of a round, both int64 `[rows]`."""
        slots = torch.arange(num_slots, device=lengths.device)
        judged = (slots < lengths[:, None]) & (slots <= num_accepted[:, None])
        accepted = slots < torch.minimum(lengths, num_accepted)[:, None]
        counts = torch.stack([judged.sum(dim=0), accepted.sum(dim=0)]).float()
        if self._counts is not None:
            width = max(num_slots, self._counts.shape[1])
            counts = pad(counts, (0, width - num_slots)) + pad(self._counts, (0, width - self._counts.shape[1]))
        self._counts = counts
