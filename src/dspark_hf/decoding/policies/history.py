"""What each row of a call accepted so far, by slot; on the host, from rounds that have ended."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Rows * rounds after which an observation of all rows has lost most of its weight (1 - 1/e).
MEMORY_ROW_ROUNDS = 512.0

# Rounds that the mean of all rows weighs in what is known of one row, and after which one of its own has lost most of
# its weight.
PRIOR_ROUNDS = 8.0
MEMORY_ROUNDS = 64.0

# Rows * rounds that a drafter's calibration weighs in what is known of all rows.
PRIOR_ROW_ROUNDS = 48.0

# When so small a share of the rows is left, a step leaves room for drafts that were not worth verifying before.
ANEW_SHARE = 0.5


class RowHistory:
    """Accepted drafts of each row and of all rows together.

    A draft that was drawn and not verified counts as one that brought nothing: that is what its slot was worth under
    the policy of the call.

    Args:
        num_slots: Drafts of a whole block.
        prior_survival: Share of rounds in which each slot is accepted, as known before the call, `[slots]`; None:
            nothing is known.
    """

    def __init__(self, num_slots: int, prior_survival: Sequence[float] | None = None) -> None:
        self._num_slots = num_slots
        self._prior = None if prior_survival is None else np.asarray(prior_survival[:num_slots], dtype=np.float64)
        self._of_row: dict[int, tuple[Floats, Floats]] = {}  # rounds that drafted a slot and that accepted it, fading
        self._begin()

    def _begin(self) -> None:
        """Know no more than before the call; rows keep what is theirs."""
        weight = 0.0 if self._prior is None else PRIOR_ROW_ROUNDS
        self._drafted = np.full(self._num_slots, weight)  # rows * rounds in which the slot was drafted, fading
        self._accepted = np.zeros(self._num_slots) if self._prior is None else weight * self._prior
        self._num_left_out = np.zeros(self._num_slots)  # rounds since the slot was drafted
        self._num_rows = 0
        self._num_tried = weight

    @property
    def num_tried(self) -> float:
        """Rows * rounds that drafted every slot, the prior counted, since so many rows run."""
        return self._num_tried

    @property
    def num_shorter(self) -> int:
        """Rounds since the last one that drafted every slot."""
        return int(self._num_left_out[-1])

    def observe(self, row_ids: Sequence[int], num_accepted: Sequence[int], num_slots: int) -> None:
        """Take a round that drafted `num_slots` slots of each of these rows."""
        num_rows = len(row_ids)
        if num_rows <= ANEW_SHARE * self._num_rows:
            self._begin()
        self._num_rows = self._num_rows or num_rows
        slots = np.arange(self._num_slots)
        was_drafted = slots < num_slots
        counted = was_drafted.astype(np.float64)
        is_kept = (slots < np.asarray(num_accepted)[:, None]).astype(np.float64)
        # A slot fades by all rounds since it was drafted, but not before there is something in its place.
        keep = max(0.0, 1.0 - num_rows / MEMORY_ROW_ROUNDS) ** (1.0 + self._num_left_out)
        self._drafted = np.where(was_drafted, keep * self._drafted + num_rows, self._drafted)
        self._accepted = np.where(was_drafted, keep * self._accepted + is_kept.sum(axis=0), self._accepted)
        self._num_left_out = np.where(was_drafted, 0.0, self._num_left_out + 1.0)
        self._num_tried += num_rows if num_slots >= self._num_slots else 0
        for row, kept in zip(row_ids, is_kept, strict=True):
            drafted, accepted = self._of_row.get(row, (0.0, 0.0))
            faded = 1.0 - 1.0 / MEMORY_ROUNDS
            self._of_row[row] = faded * drafted + counted, faded * accepted + kept

    def accepted_share(self, row_ids: Sequence[int]) -> Floats:
        """Share of rounds that drafted a slot in which it was accepted, `[rows, slots]`; 0 where none ever did.

        Each row's own rounds, and `PRIOR_ROUNDS` of the mean row.
        """
        mean = self._accepted / np.maximum(self._drafted, 1e-9)
        nothing = np.zeros(self._num_slots)
        counts = [self._of_row.get(row, (nothing, nothing)) for row in row_ids]
        drafted, accepted = (np.stack(part) for part in zip(*counts, strict=True))
        share: Floats = (accepted + PRIOR_ROUNDS * mean) / (drafted + PRIOR_ROUNDS)
        return share
