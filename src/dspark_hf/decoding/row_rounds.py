"""Who is told how a batch's round went: the report's counts, the policy and its gate, observers."""

from collections.abc import Callable

import torch
from torch import Tensor

from .observers import RoundTeller
from .row_drafter import RowDrafter
from .row_state import Row, RowCounts
from .types import Acceptance, Proposal


class RoundBook:
    """Keeps the counts of a batch's rows, and passes rounds on.

    Args:
        num_rows: Of the whole batch.
        num_slots: Most drafts of a round.
    """

    def __init__(
        self, num_rows: int, num_slots: int, generator: RowDrafter, warn_of_unusable: Callable[[], None]
    ) -> None:
        self.counts = RowCounts(num_rows, num_slots)
        self._scheduler = generator.scheduler
        self._teller = RoundTeller(generator.drafter, is_sampled=generator.do_sample)
        self._warn_of_unusable = warn_of_unusable

    def add(self, rows: list[Row], facts: Tensor, proposal: Proposal | None, acceptance: Acceptance) -> None:
        """A round of `rows`, which stand as they stood before it.

        Args:
            facts: int64 on the host, a column for each row; from the third line on: drafts accepted, whether the law
                was one, drafts judged, slots without broken numbers.
        """
        places = [place for place, row in enumerate(rows) if not row.is_done]
        indices = [rows[place].index for place in places]
        num_drafted = 0 if proposal is None else proposal.block.tokens.shape[1]
        _, _, num_accepted, _, lengths, num_usable = facts[:, places]
        is_unusable = num_usable < num_drafted
        self.counts.add_round(torch.tensor(indices), num_drafted, lengths, num_accepted, is_unusable)
        if any(is_unusable.tolist()):
            self._warn_of_unusable()
        accepted, verified = num_accepted.tolist(), lengths.tolist()
        judged = None if proposal is None else proposal.lengths
        self._scheduler.observe(acceptance.num_accepted, judged, accepted, verified, indices)
        self._teller.tell(proposal, places, indices, verified, accepted)
