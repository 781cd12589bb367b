"""How many slots a round drafts: from past rounds and step times only, before anything of the round is known."""

import numpy as np

from .facts import StepCosts
from .history import Floats, RowHistory

# Slots are judged when all of them were drafted in so many rows * rounds.
MIN_ROW_ROUNDS = 48.0

# Shorter drafts after which a whole block is tried again.
RETRY_ROUNDS = 32


def slots_worth_drafting(history: RowHistory, shares: Floats, costs: StepCosts, weights: Floats | None = None) -> int:
    """The number of slots with which a round promises most tokens a second, the most of equals, at least 1.

    Each number of slots is forecast with the best set of drafts to verify, if each row accepted what it did on average.
    Every slot is drafted until enough is known of it, and again now and then. A policy still decides how much of what
    was drafted is verified.

    Args:
        history: Of this call.
        shares: What each live row accepts of each slot, `[rows, slots]`, as from [`RowHistory.accepted_share`].
        costs: For these rows and whole blocks.
        weights: What a token of each row is worth, `[rows]`, 1 on average; None: all the same.
    """
    num_rows, num_slots = shares.shape
    if num_slots == 1 or history.num_tried < MIN_ROW_ROUNDS or history.num_shorter >= RETRY_ROUNDS:
        return num_slots
    gains = shares if weights is None else shares * weights[:, None]
    seconds = np.asarray(costs.seconds)
    best, best_rate = num_slots, 0.0
    for k in range(num_slots, 0, -1):  # a round may turn out better than the mean: slots that cost nothing stay
        drafts = -np.sort(-gains[:, :k], axis=None)
        tokens = num_rows + np.concatenate([[0.0], drafts.cumsum()])
        verified = np.minimum(num_rows + np.arange(len(tokens)), len(seconds) - 1)
        rounds_s = seconds[verified] + costs.draft_s - (num_slots - k) * costs.slot_s + costs.overhead_s
        rate = float((tokens / rounds_s).max())
        if rate > best_rate * (1.0 + 1e-9):
            best, best_rate = k, rate
    return best
