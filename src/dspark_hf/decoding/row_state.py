"""Where the rows of a batch stand: on the device for its arithmetic, and for the host as it was last read."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .report import SpeculationReport


@dataclass(eq=False)
class Row:
    """One row in progress, for the host.

    Attributes:
        index: Its place in the result.
        num_text: Tokens of its text so far, padding of the prompt counted.
        num_real: The same, padding not counted.
        stopped_at: Where a criterion stopped it that is no end token; the row goes on if there are no end tokens, as
            in plain generation, until all have stopped.
        scores, logits: One `[1, vocab]` for each new token, if asked for.
    """

    index: int
    num_text: int
    num_real: int
    is_done: bool = False
    stopped_at: int | None = None
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


class RowState:
    """The same numbers of the rows in the caches, int64 or bool `[rows]` on the device.

    Args:
        num_text, num_real: As in [`Row`].
    """

    def __init__(self, num_text: Tensor, num_real: Tensor) -> None:
        self.num_text = num_text
        self.num_real = num_real
        self.is_live = torch.ones_like(num_text, dtype=torch.bool)

    def advance(self, num_kept: Tensor, ends: Tensor) -> None:
        """Each row has `num_kept` tokens more, and has ended where `ends`."""
        self.num_text = self.num_text + num_kept
        self.num_real = self.num_real + num_kept
        self.is_live = self.is_live & ~ends

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but those of int64 `rows`."""
        self.num_text, self.num_real = self.num_text[rows], self.num_real[rows]
        self.is_live = self.is_live[rows]


class RowCounts:
    """What speculation did in each row, counted for all rows of a round at once.

    Args:
        num_rows: Of the whole batch.
        num_slots: Most drafts of a round.
    """

    def __init__(self, num_rows: int, num_slots: int) -> None:
        # By row: how often so many drafts were verified, accepted, and verified or judged in vain.
        self._verified, self._accepted, self._reached = (
            torch.zeros(num_rows, num_slots + 1, dtype=torch.long) for _ in range(3)
        )
        self._num_drafted = torch.zeros(num_rows, dtype=torch.long)
        self._num_unusable = torch.zeros(num_rows, dtype=torch.long)
        self._num_new = torch.zeros(num_rows, dtype=torch.long)
        self._one = torch.ones((), dtype=torch.long)

    def add_tokens(self, rows: Tensor, num_kept: Tensor) -> None:
        """Rows `rows` int64 `[n]` have `num_kept` int64 `[n]` new tokens, negative where they are taken back."""
        self._num_new[rows] += num_kept

    def add_round(
        self, rows: Tensor, num_drafted: int, lengths: Tensor, num_accepted: Tensor, is_unusable: Tensor
    ) -> None:
        """A round of rows `rows`, all int64 `[n]` on the host; `is_unusable` bool."""
        for counts, values in (
            (self._verified, lengths),
            (self._accepted, num_accepted),
            (self._reached, torch.minimum(lengths, num_accepted + 1)),
        ):
            counts.index_put_((rows, values), self._one, accumulate=True)
        self._num_drafted[rows] += num_drafted
        self._num_unusable[rows] += is_unusable.long()

    def reports(self) -> list[SpeculationReport]:
        """One report for each row, without seconds and forwards, which belong to all rows together."""
        per_slot = [self._at_least(counts).tolist() for counts in (self._verified, self._accepted, self._reached)]
        num_rounds = self._verified.sum(dim=1).tolist()
        return [
            SpeculationReport(
                num_calls=1,
                num_rounds=num_rounds[r],
                num_target_forwards=num_rounds[r],
                num_new_tokens=int(self._num_new[r]),
                num_drafted=int(self._num_drafted[r]),
                num_verified=sum(per_slot[0][r]),
                num_accepted=sum(per_slot[1][r]),
                verified_per_slot=per_slot[0][r],
                accepted_per_slot=per_slot[1][r],
                reached_per_slot=per_slot[2][r],
                num_unusable_rounds=int(self._num_unusable[r]),
            )
            for r in range(len(num_rounds))
        ]

    @staticmethod
    def _at_least(counts: Tensor) -> Tensor:
        """From "how often exactly n" `[rows, slots + 1]` to "how often slot k was among them" `[rows, slots]`."""
        return counts.flip(1).cumsum(1).flip(1)[:, 1:]
