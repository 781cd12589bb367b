"""What each policy admits: the paper's vectors, edges of the staircase, order, limits; and that none looks ahead."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_laws import confidence_of, facts_of, lengths_of

from dspark_hf import UnsupportedGenerationError
from dspark_hf.config_rules import VERIFICATION_POLICIES
from dspark_hf.decoding.policies.block import MAX_CHECKPOINTS, BlockPolicy
from dspark_hf.decoding.policies.facts import RoundFacts, StepCosts
from dspark_hf.decoding.policies.lagged import LaggedPolicy
from dspark_hf.decoding.policies.pool import Pool
from dspark_hf.decoding.policies.prefix import PrefixPolicy, SmoothedPolicy, early_stop
from dspark_hf.decoding.policies.registry import policy_factory
from dspark_hf.decoding.schedule import schedule
from dspark_hf.decoding.types import Confidence
from dspark_hf.evaluation.hindsight import HindsightPolicy

POOLED = (PrefixPolicy, SmoothedPolicy, BlockPolicy, LaggedPolicy)

# Conditional confidences, SPS from B = rows on, lengths by early stop and by full scan, Theta with n drafts.
V3 = ([[0.9, 0.5], [0.6, 0.6]], [1, 0.8, 0.55, 0.5, 0.3], [1, 0], [1, 0], [2.0, 2.32, 1.925, 1.975, 1.293])
V4 = (
    [[0.95, 0.85, 0.70], [0.80, 0.55, 0.30], [0.65, 0.25, 0.10]],
    [1, 0.85, 0.70, 0.60, 0.42, 0.30, 0.20, 0.12, 0.07, 0.04],
    [1, 0, 0],
    [1, 0, 0],
    [3.0, 3.3575, 3.33025, 3.3345, 2.60715, 2.031825, 1.44255, 0.88503, 0.5255075, 0.30094],
)
V5 = ([[0.9, 0.9, 0.9]], [1.0, 0.52, 0.50, 0.45], [0], [3], [1.0, 0.988, 1.355, 1.54755])
V5B = ([[1.0, 1.0]], [1.0, 0.5, 0.5], [0], [2], [1.0, 1.0, 1.5])
V6_HIGH = ([[0.8, 0.9]], [1.0, 0.5, 0.45], [0], [2], [1.0, 0.9, 1.134])
V6_ZERO = ([[0.8, 0.0]], [1.0, 0.5, 0.45], [0], [0], [1.0, 0.9, 0.81])


def pool_of(conditional):
    survival = torch.tensor(conditional, dtype=torch.float64).cumprod(-1)
    num_rows, num_slots = survival.shape
    return Pool.of(survival, torch.full((num_rows,), num_slots), torch.tensor(num_rows))


@pytest.mark.parametrize("vector", [V3, V4, V5, V5B, V6_HIGH, V6_ZERO], ids=["V3", "V4", "V5", "V5b", "V6", "V6 zero"])
def test_algorithm_1_and_hindsight(vector):
    conditional, sps, early, best, theta = vector
    assert lengths_of(PrefixPolicy(), conditional, sps) == early
    assert lengths_of(HindsightPolicy(), conditional, sps) == best
    assert (pool_of(conditional).tau * torch.tensor(sps, dtype=torch.float64)).tolist() == pytest.approx(
        theta, abs=1e-9
    )


@pytest.mark.parametrize("vector", [V3, V4], ids=["V3", "V4"])
def test_the_order_is_by_survival_across_rows(vector):
    orders = {2: [(1, 1), (2, 1), (1, 2), (2, 2)], 3: [(1, 1), (1, 2), (2, 1), (3, 1), (1, 3), (2, 2), (3, 2), (2, 3)]}
    pool, num_rows = pool_of(vector[0]), len(vector[0])
    num_slots = pool.survival.shape[1]
    order = [(int(i) // num_slots + 1, int(i) % num_slots + 1) for i in pool.order]
    assert order[:8] == orders[num_rows]


@pytest.mark.parametrize(("make", "expected"), [(SmoothedPolicy, 3), (BlockPolicy, 3), (LaggedPolicy, 3)])
def test_v5_other_policies_leap_over_the_edge(make, expected):
    assert lengths_of(make(), V5[0], V5[1]) == [expected]


def test_v6_block_is_the_causal_rule_of_v7():
    """The first draft is worth a look at what comes behind it."""
    lengths = [lengths_of(BlockPolicy(), *vector[:2])[0] for vector in (V6_HIGH, V6_ZERO)]
    assert lengths == [2, 1]
    assert mean_theta_of_v6(lengths) == pytest.approx(1.017)
    assert lengths_of(BlockPolicy(), V6_HIGH[0], [1.0, 0.5, 0.40]) == [0]


def mean_theta_of_v6(lengths):
    """With c_2 = .9 and c_2 = 0, which are equally likely."""
    return sum(vector[4][n] for vector, n in zip((V6_HIGH, V6_ZERO), lengths, strict=True)) / 2


@pytest.mark.parametrize(("make", "expected"), [(PrefixPolicy, 1.0), (HindsightPolicy, 1.067)])
def test_expected_theta_of_v6(make, expected):
    lengths = [lengths_of(make(), *vector[:2])[0] for vector in (V6_HIGH, V6_ZERO)]
    assert mean_theta_of_v6(lengths) == pytest.approx(expected)


def test_ties_go_to_the_first_row_and_its_first_slot():
    sps = [1.0, 0.9, 0.8, 0.1, 0.1]  # worth two drafts
    assert lengths_of(PrefixPolicy(), [[1.0, 1.0], [1.0, 1.0]], sps) == [2, 0]
    assert lengths_of(PrefixPolicy(), [[0.9, 0.9], [0.9, 1.0]], sps) == [1, 1]


def test_a_product_rounded_up_does_not_overtake_its_predecessor():
    survival = torch.tensor([[0.5, 0.5 + 2**-20, 0.4]], dtype=torch.float64)
    assert Pool.of(survival, torch.tensor([3]), torch.tensor(1)).order.tolist() == [0, 1, 2]


def test_smoothed_fills_the_step_it_stopped_on():
    steps = StepCosts.of([1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0], draft_s=1.0)
    facts = facts_of(1, 7, costs=steps)
    # Worth a leap over the edge at B = 5 only if many more drafts stand.
    for chance, expected in ((0.5, 3), (0.99, 7)):
        assert schedule(SmoothedPolicy(), confidence_of([[chance] * 7]), facts).tolist() == [expected]
    assert schedule(SmoothedPolicy(), confidence_of([[0.9, 0.0, 1, 1, 1, 1, 1]]), facts).tolist() == [1]


def test_smoothed_fills_a_step_that_the_smooth_search_leaves_half_empty():
    steps = [1.0] * 5 + [2.0] * 4 + [3.0] * 4
    facts, confidence = facts_of(1, 11, costs=StepCosts.of(steps, draft_s=3.0)), confidence_of([[0.75] * 11])
    pool = Pool.of(confidence.survival.double(), facts.limits, facts.num_live)
    assert int(early_stop(pool, facts.costs.smooth_round_s)) == 5
    assert schedule(SmoothedPolicy(), confidence, facts).tolist() == [7]


def test_block_foresees_no_drafts_beyond_the_room():
    costs = StepCosts.of([1.0, *(1 / value for value in V5[1])])
    for room, expected in (([3], [3]), ([1], [0])):
        facts = facts_of(1, 3, room=room, costs=costs)
        assert schedule(BlockPolicy(), confidence_of(V5[0]), facts).tolist() == expected


def test_the_envelope_touches_the_far_ends_of_the_steps():
    costs = StepCosts.of([0.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 4.0], draft_s=0.5, overhead_s=0.25)
    assert costs.smooth_round_s.tolist() == pytest.approx([0.75, 2.75, 2.75, 2.75, 37 / 12, 41 / 12, 3.75, 4.75])
    assert costs.step_ends.tolist()[1:] == [3, 3, 3, 6, 6, 6, 7]


def test_step_times_from_the_device_and_from_the_host_are_the_same():
    steps = [1.0, 1.5, 2.25]
    given, read = StepCosts.of(steps, 0.5), StepCosts(torch.tensor(steps).double(), 0.5)
    assert given.seconds == read.seconds == tuple(steps)
    assert read.sps.tolist() == [1.0, 1 / 1.5, 1 / 2.25]
    assert torch.equal(given.round_s, read.round_s)


def test_draft_time_is_part_of_the_round():
    """A draft that was dear makes one more verified token cheap by comparison; other seconds of a round do as well."""
    for draft_s, overhead_s, expected in ((0.0, 0.0, [0]), (1.0, 0.0, [1]), (0.0, 1.0, [1])):
        facts = facts_of(1, 1, costs=StepCosts.of([1.0, 1.0, 2.0], draft_s, overhead_s))
        assert schedule(PrefixPolicy(), confidence_of([[0.8]]), facts).tolist() == expected


def test_limits_of_rows():
    facts = facts_of(4, 3, is_live=[True, False, True, True], room=[1, 3, 5, -1], usable=[2, 3, 2, 3])
    assert facts.known_limits.tolist() == [1, 0, 3, 0]
    assert facts.limits.tolist() == [1, 0, 2, 0]
    assert int(facts.num_live) == 3


def test_rows_that_have_ended_do_not_count_in_b():
    """With B = 1 at the start one draft pays, with B = 2 none does."""
    costs = StepCosts.of([1.0, 1.0, 1.2, 9.0, 9.0])
    for is_live, expected in (([True, False], [1, 0]), ([True, True], [0, 0])):
        facts = facts_of(2, 1, is_live=is_live, costs=costs)
        assert schedule(PrefixPolicy(), confidence_of([[0.9], [0.9]]), facts).tolist() == expected


def test_lagged_uses_the_confidences_of_two_rounds_earlier():
    costs = StepCosts.of([1.0, 1.0, 1.2, 1.4, 1.6])
    policy = LaggedPolicy()
    got = []
    for chance in (0.0, 1.0, 0.0, 0.5, 0.5):
        facts, confidence = facts_of(1, 3, costs=costs), confidence_of([[chance] * 3])
        got.append(int(schedule(policy, confidence_of([[0.9] * 3]), facts)))
        policy.observe(confidence, torch.tensor([0]), torch.tensor([0]), facts)
    assert got == [3, 3, 0, 3, 0]  # two rounds by the prior, then 0.0, 1.0 and 0.0


def test_lagged_keeps_rows_apart_when_others_leave():
    costs = StepCosts.of([1.0] + [1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2])
    policy = LaggedPolicy(lag=1)
    confidence = confidence_of([[0.0, 0.0], [1.0, 1.0]])
    policy.observe(confidence, torch.tensor([0, 0]), torch.tensor([0, 0]), facts_of(2, 2, costs=costs))
    now = confidence_of([[1.0, 1.0]])
    for row_id, expected in ((0, [0]), (1, [2])):
        assert schedule(policy, now, facts_of(1, 2, costs=costs, row_ids=(row_id,))).tolist() == expected
    now = confidence_of([[1.0, 1.0], [1.0, 1.0]])
    for row_ids, expected in (((0, 1), [0, 0]), ((1, 0), [2, 0])):
        facts = facts_of(2, 2, costs=costs, row_ids=row_ids, room=[2, 0])
        assert schedule(policy, now, facts).tolist() == expected


def test_lagged_expects_of_new_rows_what_drafts_came_to():
    costs = StepCosts.of([1.0, 1.0, 1.3, 1.6])
    policy = LaggedPolicy(lag=1)
    now, facts = confidence_of([[0.9, 0.9]]), facts_of(1, 2, costs=costs, row_ids=(7,))
    assert schedule(policy, now, facts).tolist() == [2]
    for _ in range(30):
        policy.observe(now, torch.tensor([2]), torch.tensor([0]), facts_of(1, 2, costs=costs))
    assert schedule(policy, now, facts).tolist() == [0]


def test_the_current_round_cannot_set_the_capacity():
    with pytest.raises(UnsupportedGenerationError, match="lag must be >= 1"):
        LaggedPolicy(lag=0)


@pytest.mark.parametrize("name", VERIFICATION_POLICIES)
def test_nothing_is_read_from_the_device(name):
    """Tensors of the meta device hold no numbers: whoever asks for one fails."""
    num_rows, num_slots = 16, 7
    policy = policy_factory(name, 0.5, min_drafts_every=2)()
    full = torch.empty(num_rows, dtype=torch.long, device="meta")
    facts = RoundFacts(
        num_slots,
        tuple(range(num_rows)),
        torch.empty(num_rows, dtype=torch.bool, device="meta"),
        full,
        full,
        StepCosts.of([1.0 + b for b in range(num_rows * (1 + num_slots) + 1)], device="meta"),
    )
    values = torch.empty(num_rows, num_slots, device="meta")
    for _ in range(4):
        lengths = schedule(policy, Confidence(values, values), facts)
        policy.observe(Confidence(values, values), lengths, full, facts)
    assert (lengths.device.type, lengths.shape, lengths.dtype) == ("meta", (num_rows,), torch.long)
    with pytest.raises(RuntimeError, match="meta"):
        lengths.tolist()


# -- a floor ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [PrefixPolicy, SmoothedPolicy, BlockPolicy], ids=lambda policy: policy.name)
@pytest.mark.parametrize(("every", "expected"), [(None, [0, 0, 0, 0, 0, 0, 0]), (3, [0, 0, 1, 0, 0, 1, 0])])
def test_a_floor_serves_the_row_that_would_starve(make, every, expected):
    policy, served = make(min_drafts_every=every), []
    facts = facts_of(2, 2, costs=StepCosts.of([1.0, 1.0, 1.0, 1.2, 1.4, 1.6, 1.8]), row_ids=(4, 1))
    confidence = confidence_of([[0.95, 0.9], [0.05, 0.05]])
    for _ in expected:
        lengths = schedule(policy, confidence, facts)
        policy.observe(confidence, lengths, torch.tensor([0, 0]), facts)
        served.append(int(lengths[1]))
        assert lengths[0] == 2  # the search goes on behind a row that is due
    assert served == expected


@pytest.mark.parametrize("make", POOLED, ids=lambda policy: policy.name)
def test_a_floor_holds_where_no_draft_pays(make):
    facts = facts_of(2, 2, costs=StepCosts.of([1.0, 1.0, 1.0, 5.0, 9.0, 20.0, 40.0]))
    confidence = confidence_of([[0.5, 0.5], [0.2, 0.2]])
    assert schedule(make(), confidence, facts).tolist() == [0, 0]
    assert schedule(make(min_drafts_every=1), confidence, facts).tolist() == [1, 1]


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_a_floor_is_a_number_of_rounds(every):
    with pytest.raises(UnsupportedGenerationError, match="whole number of rounds"):
        PrefixPolicy(min_drafts_every=every)


# -- properties -------------------------------------------------------------------------------------------------------

CONFIDENCES = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.5, 0.7, 0.9, 1.0])


@st.composite
def rounds(draw):
    """A round of up to four rows and four slots, and costs that need not rise."""
    num_rows, num_slots = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    conditional = [[draw(CONFIDENCES) for _ in range(num_slots)] for _ in range(num_rows)]
    num_costs = num_rows * (1 + num_slots) + 1
    steps = draw(st.lists(st.sampled_from([0.8, 1.0, 1.1, 1.5, 3.0]), min_size=num_costs, max_size=num_costs))
    facts = facts_of(
        num_rows,
        num_slots,
        room=[draw(st.integers(0, num_slots)) for _ in range(num_rows)],
        is_live=[draw(st.booleans()) for _ in range(num_rows)],
        costs=StepCosts.of(list(itertools.accumulate(steps)), draft_s=draw(st.sampled_from([0.0, 0.5]))),
    )
    return conditional, facts


def policies_with_a_past():
    for make in POOLED:
        yield make()
        yield make(min_drafts_every=2)


@settings(deadline=None, max_examples=150)
@given(rounds(), st.data())
def test_a_decision_about_a_slot_ignores_its_row_from_there_on(case, data):
    conditional, facts = case
    row = data.draw(st.integers(0, len(conditional) - 1))
    slot = data.draw(st.integers(0, facts.num_slots - 1))  # 0-based; c of later slots read this slot's draft
    changed = [list(values) for values in conditional]
    for k in range(slot + 1, facts.num_slots):
        changed[row][k] = data.draw(CONFIDENCES)
    for policy in policies_with_a_past():
        before = schedule(policy, confidence_of(conditional), facts)[row]
        after = schedule(policy, confidence_of(changed), facts)[row]
        assert [before > k for k in range(slot + 1)] == [after > k for k in range(slot + 1)], policy.name


@settings(deadline=None, max_examples=150)
@given(rounds())
def test_lengths_stay_within_limits_and_are_the_best_of_their_number(case):
    conditional, facts = case
    survival = torch.tensor(conditional).cumprod(-1)
    slots = torch.arange(facts.num_slots)
    offered = torch.where(slots < facts.limits[:, None], survival, 0.0)
    for make in (*POOLED, HindsightPolicy):
        lengths = make().lengths(confidence_of(conditional), facts)
        assert ((lengths >= 0) & (lengths <= facts.limits)).all()
        taken = offered[slots < lengths[:, None]]
        left = offered[slots >= lengths[:, None]]
        assert (taken > 0).all()
        if len(taken) and len(left):
            assert taken.min() >= left.max()


@settings(deadline=None, max_examples=100)
@given(rounds())
def test_algorithm_1_as_the_paper_writes_it(case):
    conditional, facts = case
    assert PrefixPolicy().lengths(confidence_of(conditional), facts).tolist() == by_the_book(conditional, facts)


def by_the_book(conditional, facts):
    """The slow reference of `prefix`: the pseudo-code, line by line."""
    survival = torch.tensor(conditional).cumprod(-1).double()
    costs, live = facts.costs.round_s, facts.is_live.tolist()
    pool = [
        (-float(survival[r, j]), r, j)
        for r in range(len(conditional))
        for j in range(int(facts.limits[r]))
        if survival[r, j] > 0
    ]
    lengths, b, tau = [0] * len(conditional), sum(live), float(sum(live))
    best = tau / float(costs[b])
    for negative, r, _ in sorted(pool):
        b, tau = b + 1, tau - negative
        if not tau / float(costs[b]) > best:
            break
        best = tau / float(costs[b])
        lengths[r] += 1
    return lengths


def test_block_looks_again_at_a_few_places_when_there_are_many_candidates():
    """With sixty rows it checks only so often, and still finds the step it should fill."""
    num_rows, num_slots = 60, 7
    assert num_rows * num_slots > MAX_CHECKPOINTS
    conditional = torch.rand(num_rows, num_slots, generator=torch.Generator().manual_seed(0)).sqrt().tolist()
    steps = [1 + 64 * -(-b // 64) / 256 for b in range(num_rows * (1 + num_slots) + 1)]
    facts = facts_of(num_rows, num_slots, costs=StepCosts.of(steps))
    block, best = (make().lengths(confidence_of(conditional), facts) for make in (BlockPolicy, HindsightPolicy))
    survival = torch.tensor(conditional).cumprod(-1)

    def theta(lengths):
        verified = survival[torch.arange(num_slots) < lengths[:, None]]
        return float(num_rows + verified.sum()) / steps[num_rows + len(verified)]

    assert theta(block) > 0.99 * theta(best)
    assert (num_rows + int(block.sum())) % 64 == 0
