"""What a token of a row is worth when generate() waits for its last row."""

from dataclasses import replace

import numpy as np
import pytest

from dspark_hf.decoding.policies.facts import StepCosts
from dspark_hf.decoding.policies.urgency import token_weights

COSTS = StepCosts.of([1.0, 1.0, 1.1, 1.2, 1.3], draft_s=0.2, row_s=0.1)


def weights(to_go, rates, costs=COSTS):
    found = token_weights(np.array(to_go, dtype=float), np.array(rates, dtype=float), costs)
    assert found.mean() == pytest.approx(1.0)
    assert (found > 0).all()
    return found.tolist()


def test_rows_that_are_alike_count_alike():
    assert weights([30, 30, 30], [2.0, 2.0, 2.0]) == pytest.approx([1.0, 1.0, 1.0])


def test_rows_behind_count_for_more_and_more():
    near, far = weights([30, 26], [2.0, 2.0]), weights([30, 6], [2.0, 2.0])
    assert 1.0 < near[0] < far[0] < 2.0


def test_slow_rows_are_the_ones_that_others_wait_for():
    slow, quick = weights([30, 30], [1.1, 3.0])
    assert slow > 1.5 > quick


def test_rows_that_cost_all_and_rounds_that_cost_nothing_leave_only_what_a_row_costs():
    """Then a token saves its row `1 / rate` rounds, whoever ends last."""
    only_rows = replace(COSTS, draft_s=0.0, row_s=0.55)
    only_rows.__dict__["seconds"] = COSTS.seconds
    assert weights([30, 3], [1.0, 1.0], only_rows) == pytest.approx([1.0, 1.0])
    assert weights([30, 3], [1.0, 2.0], only_rows) == pytest.approx([4 / 3, 2 / 3])


def test_weights_are_the_seconds_that_a_token_saves():
    """Against the sum that they come from: seconds of the call with a token more or less to go."""
    spread_out = [200.0, 4.0]  # so far apart that the first ends last for certain

    def seconds(to_go):
        return max(to_go) / 2.0 * (COSTS.seconds[2] + 0.2 - 2 * 0.1) + sum(to_go) / 2.0 * 0.1

    saved = [seconds(spread_out) - seconds([spread_out[0] - (r == 0), spread_out[1] - (r == 1)]) for r in range(2)]
    found = weights(spread_out, [2.0, 2.0])
    assert found[1] / found[0] == pytest.approx(saved[1] / saved[0], rel=0.15)
