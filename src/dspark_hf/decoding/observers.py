"""Watching rounds as they end: what was predicted, how much was verified, how much accepted."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

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
        confidence_logits: float32 `[len(rows), slots]`, raw, on the target's device; None without a confidence head,
            and where nothing was drafted.
        survival: float32 `[len(rows), slots]`, `a_k` as the policy saw it; likewise.
        num_verified: Drafts of each row that the target saw.
        num_accepted: Drafts of each row that were accepted (bonus token not counted).
        is_sampled: Whether the generation samples; what is accepted in greedy ones follows another law.
        draft_tokens: int64 `[len(rows), slots]`, on the target's device; None where nothing was drafted.
    """

    drafter: DSparkDraftModel
    generation: int
    rows: tuple[int, ...]
    confidence_logits: Tensor | None
    survival: Tensor | None
    num_verified: tuple[int, ...]
    num_accepted: tuple[int, ...]
    is_sampled: bool
    draft_tokens: Tensor | None = None


RoundObserver: TypeAlias = Callable[[EndedRounds], None]


class _Listener(NamedTuple):
    observer: RoundObserver
    hears_plain: bool


_LISTENERS: ContextVar[tuple[_Listener, ...]] = ContextVar("dspark_round_observers", default=())
_GENERATIONS = itertools.count()


@contextmanager
def observe_rounds(observer: RoundObserver, *, with_plain: bool = False) -> Iterator[None]:
    """Call `observer` after every round of this thread (or asyncio task) inside the block. Blocks nest.

    It is called between rounds, so it must be quick, and not read from the device if that matters. What it raises ends
    the generate() call.

    Args:
        with_plain: Whether it also hears of rounds in which nothing was drafted.
    """
    token = _LISTENERS.set((*_LISTENERS.get(), _Listener(observer, with_plain)))
    try:
        yield
    finally:
        _LISTENERS.reset(token)


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
            proposal: Of all rows; None: nothing was drafted, so only who asked for plain rounds is told.
            places: Which rows of the proposal.
            rows, num_verified, num_accepted: As in [`EndedRounds`], one per place.
        """
        listeners = [listener for listener in _LISTENERS.get() if proposal is not None or listener.hears_plain]
        if not listeners or not places:
            return
        index = list(places)
        logits = survival = tokens = None
        if proposal is not None:
            logits, survival = proposal.block.confidence_logits, proposal.confidence.survival
            tokens = proposal.block.tokens[index]
        ended = EndedRounds(
            drafter=self._drafter,
            generation=self._generation,
            rows=tuple(self._first_row + row for row in rows),
            confidence_logits=None if logits is None else logits[index],
            survival=None if survival is None else survival[index],
            num_verified=tuple(num_verified),
            num_accepted=tuple(num_accepted),
            is_sampled=self._is_sampled,
            draft_tokens=tokens,
        )
        for listener in listeners:
            listener.observer(ended)
