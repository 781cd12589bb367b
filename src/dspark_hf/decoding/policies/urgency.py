"""What a token of each row is worth: generate() returns when its last row has ended.

A call takes `sum over rounds of (F + R_live * s)` seconds: F for a round whatever its rows, s for each row that still
runs. A row r with `n_r` rounds to go adds `s * n_r`, and the last one to end also decides how many times F is paid. So
a token that row r gains, which saves it `1 / rate_r` rounds, is worth `(F * P(r ends last) + s) / rate_r` seconds. A
server that fills freed rows with new requests has no last row, and all tokens are worth the same there.
"""

import numpy as np

from .facts import StepCosts
from .history import Floats

# Standard deviation of the rounds that a row has to go, over the square root of their number.
ROUNDS_SPREAD = 1.5


def token_weights(num_to_go: Floats, tokens_per_round: Floats, costs: StepCosts) -> Floats:
    """Worth of a token of each row, over the mean of all rows; all 1 where rows are alike.

    Args:
        num_to_go: Tokens that each live row may still get, > 0, `[rows]`.
        tokens_per_round: Of each row, >= 1, from rounds that have ended, `[rows]`.
        costs: For these rows.
    """
    num_rows = len(num_to_go)
    rounds = num_to_go / tokens_per_round
    spread = ROUNDS_SPREAD * np.sqrt(max(1.0, float(rounds.max())))
    ends_last = np.exp((rounds - rounds.max()) / spread)
    ends_last /= ends_last.sum()
    every_round_s = max(0.0, costs.seconds[num_rows] + costs.draft_s + costs.overhead_s - num_rows * costs.row_s)
    worth_s = (every_round_s * ends_last + costs.row_s) / tokens_per_round
    weights: Floats = worth_s / worth_s.mean()
    return weights
