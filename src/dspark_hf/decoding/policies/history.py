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

# When so small a share of the rows is left, a step leaves room for drafts that were not worth verifying before.
ANEW_SHARE = 0.5


class RowHistory:
    """Accepted drafts of each row and of all rows together.

    A draft that was drawn and not verified counts as one that brought nothing: that is what its slot was worth under
    the policy of the call.

    Args:
        num_slots: Drafts of a whole block.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._drafted = np.zeros(num_slots)  # rows * rounds in which the slot was drafted, fading
        self._accepted = np.zeros(num_slots)  # drafts accepted there
        self._of_row: dict[int, tuple[Floats, Floats]] = {}  # the same of each row
        self._num_rows = 0  # when every slot was last unknown

    @property
    def num_drafted(self) -> Floats:
        """Rows * rounds in which each slot was drafted, `[slots]`; what is long ago counts less."""
        return self._drafted

    def observe(self, row_ids: Sequence[int], num_accepted: Sequence[int], num_slots: int) -> None:
        """Take a round that drafted `num_slots` slots of each of these rows."""
        slots = np.arange(self._num_slots)
        was_drafted = (slots < num_slots).astype(np.float64)
        is_kept = (slots < np.asarray(num_accepted)[:, None]).astype(np.float64)
        if len(row_ids) <= ANEW_SHARE * self._num_rows:
            self._drafted *= 0.0  # so that every slot is drafted until it is known again; rows keep what is theirs
            self._accepted *= 0.0
        if not self._drafted.any():
            self._num_rows = len(row_ids)
        keep = max(0.0, 1.0 - len(row_ids) / MEMORY_ROW_ROUNDS)
        self._drafted = keep * self._drafted + len(row_ids) * was_drafted
        self._accepted = keep * self._accepted + is_kept.sum(axis=0)
        for row, kept in zip(row_ids, is_kept, strict=True):
            drafted, accepted = self._of_row.get(row, (0.0, 0.0))
            faded = 1.0 - 1.0 / MEMORY_ROUNDS
            self._of_row[row] = faded * drafted + was_drafted, faded * accepted + kept

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
