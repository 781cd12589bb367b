"""Where a run of committed tokens stops: generate()'s stopping criteria, asked about every new prefix."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

ScoresUpTo = Callable[[int], tuple[Tensor, ...] | None]


class StopChecker:
    """Finds the first new token after which one of a call's criteria stops.

    Plain generation asks the criteria after each token, and so does this: on every prefix that ends in a new token,
    after verification, until the first that stops. Criteria of transformers that need no call per prefix are answered
    for all prefixes at once; custom ones see the calls they would see without a drafter.
    """

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        self._batched = [criterion for criterion in criteria if type(criterion) in _BATCHED]
        self._others = StoppingCriteriaList(criterion for criterion in criteria if type(criterion) not in _BATCHED)

    def first_stop(self, ids: Tensor, num_new: int, scores_up_to: ScoresUpTo) -> tuple[int, bool]:
        """How many of the new tokens stay, and whether generation is over.

        Args:
            ids: int64 `[1, length + num_new]`, the sequence with the new tokens at its end.
            num_new: New tokens, >= 1.
            scores_up_to: Gives the scores tuple that plain generation would hold after `i` new tokens.

        Returns:
            `(num_kept, is_done)` with 1 <= num_kept <= num_new.
        """
        stops = [_BATCHED[type(criterion)](criterion, ids, num_new) for criterion in self._batched]
        num_kept = min([stop for stop in stops if stop is not None], default=num_new)
        is_done = any(stop is not None for stop in stops)
        if self._others:
            length = ids.shape[1] - num_new
            for kept in range(1, num_kept + 1):
                if bool(self._others(ids[:, : length + kept], scores_up_to(kept)).all()):
                    return kept, True
        return num_kept, is_done


class RowStops:
    """The same for several rows: end tokens without asking each row, everything else row by row.

    The length limit is left to the caller, who knows the rows' lengths.
    """

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        self._end_tokens = [criterion.eos_token_id for criterion in criteria if type(criterion) is EosTokenCriteria]
        asked = [criterion for criterion in criteria if type(criterion) not in (EosTokenCriteria, MaxLengthCriteria)]
        self._checker = StopChecker(StoppingCriteriaList(asked))
        self.asks_rows = bool(asked)
        self.has_end_tokens = bool(self._end_tokens)

    def end_after(self, new: Tensor, counts: Tensor) -> Tensor:
        """Tokens up to the first end token among the first `counts` of `new` `[rows, tokens]`.

        Returns:
            int64 `[rows]`, more than there are tokens where there is none.
        """
        steps = torch.arange(new.shape[1], device=new.device)
        is_end = torch.zeros_like(new, dtype=torch.bool)
        for ids in self._end_tokens:
            is_end |= torch.isin(new, ids.to(new.device))
        return torch.where(is_end & (steps < counts[:, None]), steps + 1, new.shape[1] + 1).amin(dim=1)

    def first_stop(self, ids: Tensor, num_new: int, scores_up_to: ScoresUpTo) -> tuple[int, bool]:
        """As [`StopChecker.first_stop`], for one row and the criteria that need to see it."""
        return self._checker.first_stop(ids, num_new, scores_up_to)


def _eos_stop(criterion: StoppingCriteria, ids: Tensor, num_new: int) -> int | None:
    assert isinstance(criterion, EosTokenCriteria)
    hits = torch.isin(ids[0, -num_new:], criterion.eos_token_id.to(ids.device))
    return _first_true(hits)


def _length_stop(criterion: StoppingCriteria, ids: Tensor, num_new: int) -> int | None:
    assert isinstance(criterion, MaxLengthCriteria)
    criterion(ids, None)  # warns once when the model's own maximum is passed
    length = ids.shape[1] - num_new
    return max(1, criterion.max_length - length) if ids.shape[1] >= criterion.max_length else None


def _stop_string_stop(criterion: StoppingCriteria, ids: Tensor, num_new: int) -> int | None:
    assert isinstance(criterion, StopStringCriteria)
    window = criterion.maximum_token_len
    length = ids.shape[1] - num_new
    if length + 1 >= window:
        # The criterion looks at the last `window` ids only, so the prefixes can be rows of one call.
        rows = torch.cat([ids[:, length + i - window : length + i] for i in range(1, num_new + 1)])
        return _first_true(criterion(rows, None))
    for kept in range(1, num_new + 1):
        if bool(criterion(ids[:, : length + kept], None).all()):
            return kept
    return None


def _first_true(hits: Tensor) -> int | None:
    positions = hits.nonzero()
    return int(positions[0]) + 1 if len(positions) else None


_BATCHED: dict[type, Callable[[StoppingCriteria, Tensor, int], int | None]] = {
    EosTokenCriteria: _eos_stop,
    MaxLengthCriteria: _length_stop,
    StopStringCriteria: _stop_string_stop,
}
