"""Stage 3 over rounds: which step times a round is weighed by, and who is told what."""

import pytest
import torch

from dspark_hf.decoding.policies.block import BlockPolicy
from dspark_hf.decoding.policies.facts import RoundFacts, StepCosts
from dspark_hf.decoding.policies.lagged import LaggedPolicy
from dspark_hf.decoding.policies.prefix import PrefixPolicy
from dspark_hf.decoding.policies.simple import FullPolicy
from dspark_hf.decoding.scheduler import MAX_KNOWN_COSTS, Scheduler
from dspark_hf.decoding.types import Confidence, DraftBlock
from dspark_hf.fitting.throughput import MeasuredCosts, ProfileGrid

CPU = torch.device("cpu")
BLOCK = 7
FOUR = dict.fromkeys(range(4), 40)  # rows, each with 40 tokens to go


class Machine:
    grid = ProfileGrid((2, 4, 8), tuple(range(1, BLOCK + 2)), (1, 512))

    def step_costs(self, num_rows, context):
        step_s = torch.full((num_rows * (BLOCK + 1) + 1,), 1.0 + context / 1000).double()
        return MeasuredCosts(step_s, draft_s=0.8, slot_s=0.1)

    def overhead_s(self, num_rows):
        return 0.05


def scheduler(policy=None, num_slots=BLOCK, profile=Machine):
    return Scheduler(policy or PrefixPolicy(), num_slots, None if profile is None else profile(), CPU, block_size=BLOCK)


def confidence(values):
    conditional = torch.tensor(values)
    return Confidence(conditional, conditional.cumprod(-1))


def facts(num_rows, num_slots, costs=None):
    tokens = torch.zeros(num_rows, num_slots, dtype=torch.long)
    block = DraftBlock(tokens, None, None, torch.full((num_rows,), num_slots))
    return RoundFacts.of(block, costs=costs)


def test_costs_are_those_of_the_rows_and_the_context():
    stage = scheduler()
    assert stage.wants_draft(4, 100)
    assert stage.costs.seconds[4] == pytest.approx(1.1)
    assert (stage.costs.draft_s, stage.costs.overhead_s) == (0.8, 0.05)
    stage.wants_draft(1, 512)  # fewer rows than were measured cost what the fewest do
    assert stage.costs.seconds[1] == pytest.approx(1.512)


@pytest.mark.parametrize(("num_slots", "draft_s"), [(BLOCK, 0.8), (2, 0.3), (1, 0.2)])
def test_a_call_for_fewer_drafts_pays_for_fewer(num_slots, draft_s):
    stage = scheduler(num_slots=num_slots)
    stage.wants_draft(4, 100)
    assert stage.costs.draft_s == pytest.approx(draft_s)
    assert stage.slots(FOUR, num_slots) == num_slots
    assert stage.costs.draft_s == pytest.approx(draft_s), "nothing is known yet, so no slot is left out"


def test_near_the_end_fewer_slots_are_paid_for():
    stage = scheduler()
    stage.wants_draft(4, 100)
    assert stage.slots(FOUR, 3) == 3
    assert stage.costs.draft_s == pytest.approx(0.8 - 4 * 0.1)


def test_step_times_of_a_long_text_are_not_kept_for_ever():
    stage = scheduler()
    for context in range(0, 100_000, 16):
        stage.wants_draft(4, context)
        stage.slots(FOUR, 3)
    assert len(stage._known_costs) <= MAX_KNOWN_COSTS
    assert len(stage._known_shorter) <= MAX_KNOWN_COSTS


def test_without_a_profile_every_round_drafts_whole_blocks():
    stage = scheduler(FullPolicy(), profile=None)
    for _ in range(5):
        assert stage.wants_draft(8, 100) and stage.costs is None
        assert stage.slots(dict.fromkeys(range(8), 40), 5) == 5
        lengths = stage.lengths(confidence([[0.5] * 5] * 8), facts(8, 5))
        stage.observe(torch.zeros(8, dtype=torch.long), lengths, [0] * 8, [5] * 8, range(8))
    assert stage.verifies_all


def test_lagged_expects_of_slots_that_were_not_drafted_what_the_others_came_to():
    policy = LaggedPolicy(lag=1)
    costs = Machine().step_costs(2, 10)
    price = StepCosts.of(costs.step_s.tolist())  # steps cost the same at every B, so all is verified that is expected
    short, whole = facts(2, 2, price), facts(2, 5, price)
    policy.observe(confidence([[0.9, 0.9]] * 2), torch.tensor([2, 2]), torch.tensor([2, 2]), short)
    assert policy.lengths(confidence([[0.9] * 5] * 2), whole).tolist() == [5, 5]


@pytest.mark.parametrize("fills_freed_rows", [False, True])
def test_rows_that_hold_up_the_others_count_for_more_unless_freed_rows_are_filled(fills_freed_rows):
    stage = Scheduler(BlockPolicy(), BLOCK, Machine(), CPU, block_size=BLOCK, fills_freed_rows=fills_freed_rows)
    assert stage.wants_draft(2, 100)
    stage.slots({3: 40, 5: 8}, BLOCK)
    weights = stage.weights((5, 4, 3))
    if fills_freed_rows:
        assert weights is None
    else:
        assert weights[2] > 1.2 > 1.0 == weights[1] > weights[0]
    stage.wants_draft(1, 100)
    stage.slots({3: 40}, BLOCK)
    assert stage.weights((5, 4, 3)) is None, "one row holds up nobody"


def test_policies_that_weigh_no_rows_get_no_weights():
    stage = scheduler(PrefixPolicy())
    stage.wants_draft(2, 100)
    stage.slots({0: 40, 1: 8}, BLOCK)
    assert stage.weights((0, 1)) is None


def test_what_calibration_saw_decides_the_first_rounds():
    hopeless, sure = [0.05] * BLOCK, [0.99] * BLOCK

    def first(prior, num_slots=BLOCK):
        stage = Scheduler(BlockPolicy(), num_slots, Machine(), CPU, block_size=BLOCK, prior_survival=prior)
        drafts = stage.wants_draft(4, 100)
        return drafts, stage.slots(FOUR, num_slots)

    assert first(None) == (True, BLOCK)
    assert first(sure) == (True, BLOCK)
    assert first(hopeless) == (False, 1)
    assert first([0.9, 0.9, *[0.0] * (BLOCK - 2)]) == (True, 2)
    assert first([0.9, 0.9, *[0.0] * (BLOCK - 2)], num_slots=1) == (True, 1)
