"""How many slots a round drafts: those at the end are left out where drawing them costs more than they bring."""

import pytest

from dspark_hf.decoding.policies.depth import MIN_ROW_ROUNDS, DraftDepth
from dspark_hf.decoding.policies.facts import StepCosts

NUM_SLOTS = 4


def costs(slot_s, num_rows=8):
    return StepCosts.of([1.0] * (num_rows * (NUM_SLOTS + 1) + 1), draft_s=NUM_SLOTS * slot_s, slot_s=slot_s)


def run(depth, price, accepted, num_rounds):
    """Slots of each round, where row r accepts `accepted[r]` drafts if so many are drafted."""
    chosen = []
    for _ in range(num_rounds):
        num_slots = depth.slots(len(accepted), price)
        taken = [min(n, num_slots) for n in accepted]
        depth.observe(taken, [num_slots] * len(accepted), num_slots, price.without_slots(NUM_SLOTS - num_slots))
        chosen.append(num_slots)
    return chosen


def test_every_slot_is_drafted_until_it_is_known():
    chosen = run(DraftDepth(NUM_SLOTS), costs(0.5), [0] * 8, 20)
    num_needed = round(MIN_ROW_ROUNDS / 8)
    assert set(chosen[:num_needed]) == {NUM_SLOTS}
    assert chosen[num_needed + 2] == 1


@pytest.mark.parametrize(("accepted", "deep"), [([0] * 8, 1), ([1] * 8, 1), ([2] * 8, 2), ([3] * 8, 3), ([4] * 8, 4)])
def test_slots_that_are_accepted_stay(accepted, deep):
    chosen = run(DraftDepth(NUM_SLOTS), costs(0.2), accepted, 40)
    assert chosen[-1] == deep


@pytest.mark.parametrize(("price", "deep"), [(0.05, 2), (0.2, 1)])
def test_a_slot_is_worth_its_share_of_the_rate(price, deep):
    """One row of eight accepts slot 2, a token a round; a round makes 17 tokens in little more than a second."""
    assert (price * 17 / (1.0 + 2 * price) <= 1.0) == (deep == 2)
    assert run(DraftDepth(NUM_SLOTS), costs(price), [2] + [1] * 7, 40)[-1] == deep


def test_slots_that_are_free_are_never_left_out():
    assert set(run(DraftDepth(NUM_SLOTS), costs(0.0), [0] * 8, 40)) == {NUM_SLOTS}


def test_what_was_left_out_is_drafted_again_and_stays_when_it_pays():
    depth, price = DraftDepth(NUM_SLOTS), costs(0.2)
    chosen = run(depth, price, [0] * 8, 400)
    assert 0 < sum(n > 1 for n in chosen[10:]) < 0.1 * len(chosen)
    assert run(depth, price, [4] * 8, 400)[-1] == NUM_SLOTS


def test_costs_of_fewer_slots_are_those_of_a_shorter_draft():
    whole = costs(0.25)
    assert whole.without_slots(0) is whole
    assert whole.without_slots(3).draft_s == pytest.approx(0.25)
    assert whole.without_slots(3).round_seconds(8) == pytest.approx(1.25)
