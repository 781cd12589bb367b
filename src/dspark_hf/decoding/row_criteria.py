"""Criteria that need to see the texts of a batch's rows."""

import torch
from torch import Tensor

from .row_state import Row
from .stopping import RowStops


def ask_criteria(
    stops: RowStops, ids: Tensor, rows: list[Row], facts: Tensor, scores: Tensor | None, *, ends_at_once: bool
) -> None:
    """Ask them about the new tokens of every row, and shorten what is kept.

    Args:
        ids: int64 `[rows, columns]`, each row's text with its new tokens behind it.
        facts: int64 on the host; its first rows say how many tokens each row keeps, and whether it ends, and are
            changed where a criterion stops a row.
        scores: Of this round, `[rows, tokens, vocab]`, if criteria are to be shown scores.
        ends_at_once: A row that is stopped has ended, also without end tokens: it is the only one.
    """
    kept: list[int] = facts[0].tolist()

    def scores_of(here: list[int], length: int) -> tuple[Tensor, ...] | None:
        if scores is None:
            return None
        steps = [(*rows[r].scores, *scores[r : r + 1, : length - rows[r].num_text].unbind(1)) for r in here]
        return tuple(torch.cat(step) for step in zip(*steps, strict=True))

    found = stops.first_stops(ids, [row.num_text for row in rows], kept, scores_of)
    for r, (row, (num_until, is_stopped)) in enumerate(zip(rows, found, strict=True)):
        if is_stopped and (stops.has_end_tokens or ends_at_once):
            facts[0, r], facts[1, r] = num_until, 1
        elif is_stopped:
            row.stopped_at = row.stopped_at or row.num_text + num_until
