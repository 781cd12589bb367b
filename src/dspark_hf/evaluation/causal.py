"""The best that a policy can do which may not look ahead: exact, for one or two rows and few levels of confidence."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..decoding.policies.facts import StepCosts

_STOP, _FIRST, _SECOND = 0, 1, 2


class CausalOptimum:
    """Backward induction over everything that one or two rows may have shown.

    The conditional confidence of each slot takes one of L equally likely values, independently. A state is what has
    been seen: the confidences of the admitted slots of each row and of its next one. From each, the best of stopping,
    which gives Theta, and of admitting either row's next draft. Memory grows with `L ** (slots of all rows)`.

    Args:
        levels: `[slots][L]` for each row, the values of `c`.
        costs: Step times for B up to all drafts of these rows.

    Attributes:
        theta: Expected Theta of the best policy, tokens a second.
    """

    def __init__(self, levels: Sequence[Sequence[Sequence[float]]], costs: StepCosts) -> None:
        assert 1 <= len(levels) <= 2
        self._rows = [torch.tensor(row, dtype=torch.float64) for row in levels]
        self._num_levels = self._rows[0].shape[1]
        self._num_slots = [len(row) for row in self._rows] + [0] * (2 - len(self._rows))
        sums = [_sums_of_survival(row) for row in self._rows] + [[torch.zeros(1, dtype=torch.float64)]]
        self._actions: dict[tuple[int, int], Tensor] = {}
        values: dict[tuple[int, int], Tensor] = {}
        first, second = self._num_slots
        for total in range(first + second, -1, -1):
            done = values
            values = {}
            for i in range(max(0, total - second), min(first, total) + 1):
                j = total - i
                tau = len(levels) + sums[0][i][:, None] + sums[1][j][None, :]
                options = [tau / float(costs.round_s[len(levels) + total])]
                options += [self._expected(done[i + 1, j], 0, i)] if i < first else [torch.zeros_like(tau)]
                options += [self._expected(done[i, j + 1], 1, j)] if j < second else [torch.zeros_like(tau)]
                best = torch.stack(options).max(dim=0)
                values[i, j] = best.values
                self._actions[i, j] = best.indices.to(torch.int8)
        self.theta = float(values[0, 0].mean())

    def lengths(self, chosen: Sequence[Sequence[int]]) -> list[int]:
        """`ell` of each row when slot k of row r has level `chosen[r][k]`."""
        taken = [0, 0]
        while True:
            place = tuple(self._place(chosen, row, taken[row]) for row in (0, 1))
            action = int(self._actions[taken[0], taken[1]][place])
            if action == _STOP:
                return taken[: len(self._rows)]
            taken[action - _FIRST] += 1

    def _place(self, chosen: Sequence[Sequence[int]], row: int, taken: int) -> int:
        """Index of what has been seen of a row with `taken` drafts admitted."""
        place = 0
        for k in range(min(taken + 1, self._num_slots[row])):
            place = place * self._num_levels + chosen[row][k]
        return place

    def _expected(self, values: Tensor, row: int, taken: int) -> Tensor:
        """Mean over the confidence that admitting one more of a row brings into view."""
        if taken + 2 > self._num_slots[row]:
            return values
        if row == 0:
            return values.view(-1, self._num_levels, values.shape[1]).mean(dim=1)
        return values.view(values.shape[0], -1, self._num_levels).mean(dim=2)


def _sums_of_survival(levels: Tensor) -> list[Tensor]:
    """Sum of `a_1..a_i` for i admitted drafts, by what has been seen of the row then; i from 0 to all slots."""
    num_slots, num_levels = levels.shape
    survival, sums = levels.new_ones(1), levels.new_zeros(1)
    by_count = []
    for k in range(num_slots):
        by_count.append(sums.repeat_interleave(num_levels))  # with the next one in view
        survival = (survival[:, None] * levels[k]).flatten()
        sums = by_count[-1] + survival
    return [*by_count, sums]
