"""Watching rounds as they end: what was predicted, how much was verified, how much accepted."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from ..modeling_dspark import DSparkDraftModel
from .types import Proposal


@dataclass(frozen=True)
class EndedRounds:
    """Rounds of one or several rows that ended together.

    Attributes:
        drafter: Whose rounds they are.
        generation: A number that tells generations of this process apart.
        rows: Each row's place in the batch of its generate() call.
        confidence_logits: float32 `[len(rows), slots]`, raw, on the target's device; None without a confidence head.
        survival: float32 `[len(rows), slots]`, `a_k` as the policy saw it; likewise.
        num_verified: Drafts of each row that the target saw.
        num_accepted: Drafts of each row that were accepted (bonus token not counted).
        is_sampled: Whether the generation samples; what is accepted in greedy ones follows another law.
    """

    drafter: DSparkDraftModel
    generation: int
    rows: tuple[int, ...]
    confidence_logits: Tensor | None
    survival: Tensor | None
    num_verified: tuple[int, ...]
    num_accepted: tuple[int, ...]
    is_sampled: bool


RoundObserver: TypeAlias = Callable[[EndedRounds], None]

_OBSERVERS: ContextVar[tuple[RoundObserver, ...]] = ContextVar("dspark_round_observers", default=())
_GENERATIONS = itertools.count()


@contextmanager
def observe_rounds(observer: RoundObserver) -> Iterator[None]:
    """Call `observer` after every round of this thread (or asyncio task) inside the block. Blocks nest.

    It is called between rounds, so it must be quick, and not read from the device if that matters.
    """
    token = _OBSERVERS.set((*_OBSERVERS.get(), observer))
    try:
        yield
    finally:
        _OBSERVERS.reset(token)


class RoundTeller:
    """Tells observers of one generation's rounds; costs nothing when there are none.

    Args:
        is_sampled: As in [`EndedRounds`].
        first_row: Place of the generation's first row in the batch of its generate() call.
    """

    def __init__(self, drafter: DSparkDraftModel, *, is_sampled: bool, first_row: int = 0) -> None:
        self._drafter = drafter
        self._is_sampled = is_sampled
        self._generation = next(_GENERATIONS)
        self._first_row = first_row

    def tell(
        self,
        proposal: Proposal | None,
        places: Sequence[int],
        rows: Sequence[int],
        num_verified: Sequence[int],
        num_accepted: Sequence[int],
    ) -> None:
        """Report rounds that ended.

        Args:
            proposal: Of all rows; None: nothing was drafted, so nothing is told.
            places: Which rows of the proposal.
            rows, num_verified, num_accepted: As in [`EndedRounds`], one per place.
        """
        observers = _OBSERVERS.get()
        if not observers or proposal is None or not places:
            return
        logits, survival = proposal.block.confidence_logits, proposal.confidence.survival
        index = list(places)
        ended = EndedRounds(
            drafter=self._drafter,
            generation=self._generation,
            rows=tuple(self._first_row + row for row in rows),
            confidence_logits=None if logits is None else logits[index],
            survival=None if survival is None else survival[index],
            num_verified=tuple(num_verified),
            num_accepted=tuple(num_accepted),
            is_sampled=self._is_sampled,
        )
        for observer in observers:
            observer(ended)
