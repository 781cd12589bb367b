"""How many slots a round drafts: those at the end are left out where drawing them costs more than they bring."""

import numpy as np
import pytest

from dspark_hf.decoding.policies.depth import MIN_ROW_ROUNDS, RETRY_ROUNDS, slots_worth_drafting
from dspark_hf.decoding.policies.facts import StepCosts
from dspark_hf.decoding.policies.history import PRIOR_ROW_ROUNDS, RowHistory
from dspark_hf.decoding.scheduler import conditional_shares

NUM_SLOTS = 4


def costs(slot_s, num_rows=8):
    return StepCosts.of([1.0] * (num_rows * (NUM_SLOTS + 1) + 1), draft_s=NUM_SLOTS * slot_s, slot_s=slot_s)


def run(history, price, accepted, num_rounds, weights=None):
    """Slots of each round, where row r accepts `accepted[r]` drafts if so many are drafted."""
    chosen, rows = [], range(len(accepted))
    for _ in range(num_rounds):
        num_slots = slots_worth_drafting(history, history.accepted_share(rows), price, weights)
        history.observe(rows, [min(n, num_slots) for n in accepted], num_slots)
        chosen.append(num_slots)
    return chosen


def test_every_slot_is_drafted_until_it_is_known():
    chosen = run(RowHistory(NUM_SLOTS), costs(0.5), [0] * 8, 20)
    num_needed = round(MIN_ROW_ROUNDS / 8)
    assert set(chosen[:num_needed]) == {NUM_SLOTS}
    assert set(chosen[num_needed:]) == {1}


@pytest.mark.parametrize(("accepted", "deep"), [([0] * 8, 1), ([1] * 8, 1), ([2] * 8, 2), ([3] * 8, 3), ([4] * 8, 4)])
def test_slots_that_are_accepted_stay(accepted, deep):
    assert run(RowHistory(NUM_SLOTS), costs(0.2), accepted, 40)[-1] == deep


@pytest.mark.parametrize("price", [0.02, 0.05, 0.09, 0.2])
def test_the_number_of_slots_is_the_best_of_all(price):
    """One row of eight accepts slot 2, a token a round."""
    accepted = [2] + [1] * 7
    rates = [(8 + sum(min(n, k) for n in accepted)) / (1.0 + k * price) for k in range(1, NUM_SLOTS + 1)]
    assert run(RowHistory(NUM_SLOTS), costs(price), accepted, 40)[-1] == 1 + int(np.argmax(rates))


def test_slots_that_are_free_and_accepted_are_never_left_out():
    assert set(run(RowHistory(NUM_SLOTS), costs(0.0), [4] * 8, 40)) == {NUM_SLOTS}


def test_what_was_left_out_is_drafted_again_and_stays_when_it_pays():
    history, price = RowHistory(NUM_SLOTS), costs(0.2)
    chosen = run(history, price, [0] * 8, 400)
    tried = [i for i, n in enumerate(chosen) if n > 1]
    assert set(np.diff(tried[5:])) == {RETRY_ROUNDS + 1} and {chosen[i] for i in tried} == {NUM_SLOTS}
    assert run(history, price, [4] * 8, 3 * RETRY_ROUNDS)[-1] == NUM_SLOTS


def test_slots_that_only_rows_of_little_weight_accept_are_left_out():
    accepted = [4] * 4 + [1] * 4
    assert run(RowHistory(NUM_SLOTS), costs(0.1), accepted, 40)[-1] == NUM_SLOTS
    late = np.array([0.05] * 4 + [1.95] * 4)
    assert run(RowHistory(NUM_SLOTS), costs(0.1), accepted, 40, late)[-1] == 1


def test_a_row_that_is_new_is_taken_for_the_mean_row():
    history = RowHistory(NUM_SLOTS)
    history.observe([0, 1], [4, 0], NUM_SLOTS)
    assert history.accepted_share([7]).tolist() == [[0.5] * NUM_SLOTS]
    assert history.accepted_share([0])[0, 0] == pytest.approx((1 + 8 * 0.5) / 9)


def test_costs_of_fewer_slots_are_those_of_a_shorter_draft():
    whole = costs(0.25)
    assert whole.without_slots(0) is whole
    assert whole.without_slots(3).draft_s == pytest.approx(0.25)
    assert whole.without_slots(3).round_seconds(8) == pytest.approx(1.25)


def test_when_half_of_the_rows_have_ended_every_slot_is_tried_again():
    history = RowHistory(NUM_SLOTS)
    assert run(history, costs(0.2), [0] * 8, 60)[-1] == 1
    assert run(history, costs(0.2, 4), [NUM_SLOTS] * 4, 12)[-1] == NUM_SLOTS


def test_what_a_slot_was_does_not_fade_until_it_is_seen_again():
    history = RowHistory(NUM_SLOTS)
    run(history, costs(0.2), [2] * 8, 40)
    shares = history.accepted_share([100])[0]
    for _ in range(20):
        history.observe(range(8), [1] * 8, 1)
    assert history.accepted_share([100])[0, 1:].tolist() == pytest.approx(shares[1:].tolist())
    history.observe(range(8), [4] * 8, NUM_SLOTS)  # behind 20 rounds these count for much of what is known
    assert history.accepted_share([100])[0, 3] > 0.15


def test_a_calibrated_drafter_needs_no_rounds_to_find_out():
    prior = [0.9, 0.05, 0.01, 0.0]
    assert PRIOR_ROW_ROUNDS >= MIN_ROW_ROUNDS
    assert set(run(RowHistory(NUM_SLOTS, prior), costs(0.2), [1] * 8, 20)) == {1}
    assert RowHistory(NUM_SLOTS, prior).accepted_share([3])[0].tolist() == pytest.approx(prior)
    assert run(RowHistory(2, prior), costs(0.2), [1] * 8, 20)[-1] == 1  # of shorter drafts


def test_rounds_outweigh_a_prior_that_is_wrong():
    assert run(RowHistory(NUM_SLOTS, [0.0] * 4), costs(0.2), [4] * 8, 3 * RETRY_ROUNDS)[-1] == NUM_SLOTS
    assert run(RowHistory(NUM_SLOTS, [1.0] * 4), costs(0.2), [0] * 8, 3 * RETRY_ROUNDS)[-1] == 1


def test_when_half_of_the_rows_have_ended_the_prior_counts_again():
    history = RowHistory(NUM_SLOTS, [1.0] * 4)
    assert run(history, costs(0.2), [0] * 8, 60)[-1] == 1
    assert run(history, costs(0.2, 4), [0] * 4, 2)[1] == NUM_SLOTS


def test_shares_given_that_all_before_were_accepted():
    assert conditional_shares([0.5, 0.25, 0.0, 0.0]) == [0.5, 0.5, 0.0, 0.0]
