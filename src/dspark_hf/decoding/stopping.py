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
ScoresOf = Callable[[list[int], int], tuple[Tensor, ...] | None]


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
    """The same for several rows: end tokens without asking each row, custom criteria once for rows of equal length.

    The length limit is left to the caller, who knows the rows' lengths.
    """

    def __init__(self, criteria: StoppingCriteriaList, device: torch.device) -> None:
        ends = [criterion.eos_token_id.to(device) for criterion in criteria if type(criterion) is EosTokenCriteria]
        self._end_tokens = torch.cat(ends).unique() if ends else None
        asked = [criterion for criterion in criteria if type(criterion) not in (EosTokenCriteria, MaxLengthCriteria)]
        self._strings = [criterion for criterion in asked if type(criterion) is StopStringCriteria]
        self._others = StoppingCriteriaList(criterion for criterion in asked if criterion not in self._strings)
        self.asks_rows = bool(asked)
        # As plain generation asks: any criterion that names end tokens makes it pad rows behind their end.
        self.has_end_tokens = any(hasattr(criterion, "eos_token_id") for criterion in criteria)

    def end_after(self, new: Tensor, counts: Tensor) -> Tensor:
        """Tokens up to the first end token among the first `counts` of `new` `[rows, tokens]`.

        Returns:
            int64 `[rows]`, more than there are tokens where there is none.
        """
        steps = torch.arange(new.shape[1], device=new.device)
        never = new.shape[1] + 1
        if self._end_tokens is None:
            return torch.full_like(counts, never)
        # torch.isin may sort, whose result the host waits for.
        is_end = (new[..., None] == self._end_tokens).any(dim=-1)
        return torch.where(is_end & (steps < counts[:, None]), steps + 1, never).amin(dim=1)

    def first_stops(
        self, ids: Tensor, lengths: list[int], num_new: list[int], scores_of: ScoresOf
    ) -> list[tuple[int, bool]]:
        """As [`StopChecker.first_stop`] for every row, asking the criteria that need to see texts.

        Args:
            ids: int64 `[rows, columns]`, each row's text with its new tokens behind it.
            lengths: Tokens of each row without the new ones.
            num_new: New tokens of each row; 0: it is not asked about.
            scores_of: Gives the scores tuple that plain generation would hold for `(rows, length)`.
        """
        kept, stopped = list(num_new), [False] * len(num_new)
        for row, count in enumerate(num_new):
            text = ids[row : row + 1, : lengths[row] + count]
            stops = [_stop_string_stop(criterion, text, count) for criterion in self._strings if count]
            for stop in stops:
                if stop is not None:
                    kept[row], stopped[row] = min(kept[row], stop), True
        last = max((length + count for length, count in zip(lengths, kept, strict=True) if count), default=0)
        for length in range(min(lengths) + 1, last + 1 if self._others else 0):
            here = [r for r in range(len(kept)) if lengths[r] < length <= lengths[r] + kept[r]]
            if not here:
                continue
            index = torch.tensor(here, device=ids.device)
            for row, stops_here in zip(
                here, self._others(ids[index, :length], scores_of(here, length)).tolist(), strict=True
            ):
                if stops_here:
                    kept[row], stopped[row] = length - lengths[row], True
        return list(zip(kept, stopped, strict=True))


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
