"""A least share of drafts for every row, so that none starves behind more promising ones."""

from typing import Protocol

import torch
from torch import Tensor

from ...errors import UnsupportedGenerationError
from .facts import RoundFacts


class Floor(Protocol):
    """Says which rows get their first draft verified, whatever the others offer."""

    def is_due(self, facts: RoundFacts) -> Tensor:
        """bool `[rows]`."""
        ...

    def observe(self, lengths: Tensor, facts: RoundFacts) -> None:
        """Take the drafts verified, int64 `[rows]`, of a round."""
        ...


class NoFloor:
    """Rows may starve: the best candidates of all rows are verified."""

    def is_due(self, facts: RoundFacts) -> Tensor:
        return torch.zeros_like(facts.is_live)

    def observe(self, lengths: Tensor, facts: RoundFacts) -> None:
        """Nothing to remember."""


class DraftFloor:
    """Each row has a draft verified at least once in `every` drafted rounds. It decides from past rounds only.

    Raises:
        UnsupportedGenerationError: `every` is no whole number >= 1.
    """

    def __init__(self, every: int) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise UnsupportedGenerationError(
                f"min_drafts_every must be a whole number of rounds >= 1, got {every!r}; leave it out for no floor"
            )
        self._every = every
        self._num_waited: Tensor | None = None  # int64 [ids], drafted rounds since a row's last verified draft

    def is_due(self, facts: RoundFacts) -> Tensor:
        return self._waited(facts)[_index(facts)] >= self._every - 1

    def observe(self, lengths: Tensor, facts: RoundFacts) -> None:
        waited, index = self._waited(facts), _index(facts)
        waited[index] = torch.where(lengths > 0, 0, waited[index] + 1)

    def _waited(self, facts: RoundFacts) -> Tensor:
        num_ids = max(facts.row_ids) + 1
        if self._num_waited is None:
            self._num_waited = facts.room.new_zeros(num_ids)
        elif len(self._num_waited) < num_ids:
            missing = num_ids - len(self._num_waited)
            self._num_waited = torch.nn.functional.pad(self._num_waited, (0, missing))
        return self._num_waited


def _index(facts: RoundFacts) -> Tensor:
    return torch.tensor(facts.row_ids, device=facts.room.device)


def floor_of(min_drafts_every: int | None) -> Floor:
    """The floor for `min_drafts_every` drafted rounds; None: none."""
    return NoFloor() if min_drafts_every is None else DraftFloor(min_drafts_every)
