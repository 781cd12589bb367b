"""Every policy is lossless: exact joint laws of two and three rows over several rounds; and what breaks them."""

from dataclasses import replace

import pytest
import torch
from laws import random_laws, round_law, sequence_law, total_variation
from policy_laws import World, confidence_of, facts_of, joint_law, random_world, target_law, total_variation_of

from dspark_hf.config_rules import VERIFICATION_POLICIES
from dspark_hf.decoding.accept import accept_sampled
from dspark_hf.decoding.policies.block import BlockPolicy
from dspark_hf.decoding.policies.facts import RoundFacts, StepCosts
from dspark_hf.decoding.policies.gate import DraftGate
from dspark_hf.decoding.policies.goodput import GoodputPolicy
from dspark_hf.decoding.policies.lagged import LaggedPolicy
from dspark_hf.decoding.policies.pool import PooledPolicy
from dspark_hf.decoding.policies.prefix import PrefixPolicy, SmoothedPolicy
from dspark_hf.decoding.policies.registry import policy_factory
from dspark_hf.decoding.policies.simple import ThresholdPolicy
from dspark_hf.decoding.schedule import schedule
from dspark_hf.evaluation.hindsight import HindsightPolicy

EXACT = 1e-12
BIASED = 1e-3
POOLED = (PrefixPolicy, SmoothedPolicy, BlockPolicy, LaggedPolicy)


def named(name):
    return policy_factory(name, 0.5)


@pytest.mark.parametrize("name", VERIFICATION_POLICIES)
@pytest.mark.parametrize("seed", range(6))
def test_two_rows_over_two_rounds(name, seed):
    assert total_variation_of(random_world(2, 2, 2, seed), named(name)) < EXACT


@pytest.mark.parametrize("name", VERIFICATION_POLICIES)
def test_two_rows_with_three_slots(name):
    assert total_variation_of(random_world(2, 3, 1, 3), named(name)) < EXACT


@pytest.mark.parametrize("name", VERIFICATION_POLICIES)
def test_three_tokens_to_choose_from(name):
    assert total_variation_of(random_world(2, 2, 1, 5, vocab=3), named(name)) < EXACT


@pytest.mark.parametrize("name", VERIFICATION_POLICIES)
@pytest.mark.parametrize("seed", range(2))
def test_three_rows(name, seed):
    assert total_variation_of(random_world(3, 2, 1, seed), named(name)) < EXACT


@pytest.mark.parametrize("name", ["prefix", "smoothed", "block"])
def test_three_rows_over_two_rounds(name):
    assert total_variation_of(random_world(3, 2, 2, 1), named(name)) < EXACT


def test_three_rows_with_a_capacity_from_the_round_before():
    assert total_variation_of(random_world(3, 2, 2, 1), lagged_by(1)) < EXACT


def test_a_floor_holds_whatever_rows_weigh():
    """The row that is due comes before all drafts of a row that counts for nearly all."""
    policy = BlockPolicy(min_drafts_every=2)
    costs = StepCosts.of([1.0] * 5 + [1.0 + 0.9 * b for b in range(1, 17)])
    facts = facts_of(4, 3, costs=costs, weights=torch.tensor([3.85, 0.05, 0.05, 0.05], dtype=torch.float64))
    sure = confidence_of([[0.95, 0.95, 0.95]] + [[0.3, 0.3, 0.3]] * 3)
    seen = []
    for _ in range(4):
        lengths = schedule(policy, sure, facts)
        policy.observe(sure, lengths, torch.zeros_like(lengths), facts)
        seen.append(lengths.tolist())
    assert all(sum(lengths[row] for lengths in seen[i : i + 2]) >= 1 for row in (1, 2, 3) for i in range(3))


@pytest.mark.parametrize("make", POOLED, ids=lambda policy: policy.name)
@pytest.mark.parametrize("seed", range(2))
def test_a_floor_from_past_rounds(make, seed):
    assert total_variation_of(random_world(2, 2, 2, seed), lambda: make(min_drafts_every=2)) < EXACT


@pytest.mark.parametrize("seed", range(4))
def test_rows_weighed_by_what_they_have_got(seed, monkeypatch):
    monkeypatch.setattr("dspark_hf.decoding.policies.urgency.ROUNDS_SPREAD", 0.3)  # weights that differ from round 2 on
    weights = []
    right = RoundFacts.__init__

    def watched(self, *args, **more):
        right(self, *args, **more)
        weights.append(tuple(self.weights.tolist()))

    monkeypatch.setattr(RoundFacts, "__init__", watched)
    world = random_world(2, 2, 2, seed, num_to_go=[6, 5])
    assert total_variation_of(world, BlockPolicy) < EXACT
    assert len(set(weights)) > 2
    assert max(max(pair) for pair in weights) > 1.2


@pytest.mark.parametrize("name", VERIFICATION_POLICIES)
def test_broken_slots_and_little_room(name):
    world = random_world(2, 2, 2, 1, usable=usable_before_a_one, room=[2, 1])
    assert total_variation_of(world, named(name)) < EXACT


def test_a_capacity_does_not_follow_from_what_came_out_broken():
    """A leap that pays with four drafts and not with three: were broken slots known, one draft would tell of itself."""
    costs = StepCosts.of([1.0, 1.0, 1.0, 2.3, 2.3, 2.3, 2.3])
    world = random_world(2, 2, 1, 1, costs=costs, usable=usable_before_a_one, confidence=lambda *where: 0.9)
    assert total_variation_of(world, LaggedPolicy) < EXACT


def usable_before_a_one(row, drafts):
    """A row's slots are broken behind a drafted 1."""
    return next((k + 1 for k, token in enumerate(drafts[:-1]) if token == 1), len(drafts))


def lagged_by(lag):
    return lambda: LaggedPolicy(lag=lag)


@pytest.mark.parametrize("lag", [1, 2])
def test_a_capacity_from_earlier_rounds(lag):
    """Long enough that confidences of the first round are used."""
    assert total_variation_of(random_world(2, 2, 1 + lag, 1, costs=JAGGED), lagged_by(lag)) < EXACT


JAGGED = StepCosts.of([1.0, 1.0, 1.0, 1.6, 1.65, 1.7, 1.7])  # of two rows with two slots


# -- with the gate in front -------------------------------------------------------------------------------------------


def undecided_gate(monkeypatch):
    """One that opens and closes within a few rounds, at costs near break-even."""
    for name, value in (("PRIOR_ROW_ROUNDS", 1.0), ("FIRST_WAIT_ROUNDS", 1), ("MAX_TRIAL_SHARE", 1.0)):
        monkeypatch.setattr(f"dspark_hf.decoding.policies.gate.{name}", value)
    return DraftGate(2, prior_acceptance=(0.6,))


def decisions_of(gate, monkeypatch):
    decisions = []
    right = DraftGate.wants_draft

    def watched(self, *args):
        decisions.append(right(self, *args))
        return decisions[-1]

    monkeypatch.setattr(DraftGate, "wants_draft", watched)
    return decisions


@pytest.mark.parametrize("name", VERIFICATION_POLICIES)
def test_a_gate_in_front(name, monkeypatch):
    gate = undecided_gate(monkeypatch)
    decisions = decisions_of(gate, monkeypatch)
    costs = StepCosts.of([1.0, 1.0, 1.0, 1.2, 1.4, 1.5, 1.6], draft_s=0.1)
    world = random_world(2, 2, 3 if name in ("full", "block") else 2, 4, costs=costs)
    assert total_variation_of(world, named(name), gate) < EXACT
    assert set(decisions) == {True, False}


def test_lengths_from_past_rounds_that_change_with_what_was_accepted(monkeypatch):
    """An estimate that moves within a round or two, and step times near break-even between lengths."""
    monkeypatch.setattr("dspark_hf.decoding.policies.goodput._PRIOR", (0.5, 1.0))
    costs = StepCosts.of([1.0, 1.0, 1.0, 1.1, 1.2, 1.3, 1.5])
    lengths = []
    right = GoodputPolicy.lengths
    monkeypatch.setattr(GoodputPolicy, "lengths", lambda self, *args: lengths.append(right(self, *args)) or lengths[-1])
    assert total_variation_of(random_world(2, 2, 3, 1, costs=costs), GoodputPolicy) < EXACT
    assert {int(found[0]) for found in lengths} == {1, 2}


class GoodputOfThisRound(GoodputPolicy):
    """The length follows from how the round's own drafts look."""

    def rate(self, like):
        return like.new_tensor(float(self.seen.mean()))

    def lengths(self, confidence, facts):
        self.seen = confidence.conditional
        return super().lengths(confidence, facts)


def test_control_one_length_from_this_rounds_confidences_is_biased():
    costs = StepCosts.of([1.0, 1.0, 1.0, 1.3, 1.5])  # one draft where few are accepted, else three
    worlds = [random_world(1, 3, 1, seed, costs=costs, horizon=3) for seed in range(4)]
    assert max(total_variation_of(world, GoodputOfThisRound) for world in worlds) > BIASED
    assert max(total_variation_of(world, GoodputPolicy) for world in worlds) < EXACT


# -- controls: what must not be done ----------------------------------------------------------------------------------


class NoLag(LaggedPolicy):
    """The capacity follows from the confidences of the round itself."""

    def _stale(self, like, facts):
        return like


class CapacityFromBrokenSlots(LaggedPolicy):
    """The capacity follows from how many slots of this round are broken."""

    def _num_drafts(self, pool, facts, costs):
        return facts.limits.sum() - 2


class OnePatience(PooledPolicy):
    """Early stop that goes on over one candidate that does not pay, and comes back to the best."""

    name = "patience"

    def _num_drafts(self, pool, facts, costs):
        theta = (pool.tau / pool.at_counts(costs.round_s)).tolist()
        best = 0
        for n in range(1, len(theta)):
            if theta[n] > theta[best]:
                best = n
            elif n - best > 1:
                break
        return torch.tensor(best)


class WeightsFromTheDraft(BlockPolicy):
    """The row whose second draft is surer counts for more."""

    def lengths(self, confidence, facts):
        ahead = confidence.survival[:, 1]
        return super().lengths(confidence, replace(facts, weights=2 * ahead / ahead.sum().clamp(min=0.1)))


def test_control_weights_that_look_ahead_are_biased():
    assert worst(WeightsFromTheDraft) > BIASED


def worst(new_policy, **more):
    return max(total_variation_of(random_world(2, 2, 1, seed, **more), new_policy) for seed in range(12))


@pytest.mark.parametrize("make", [HindsightPolicy, NoLag], ids=lambda policy: policy.__name__)
def test_control_searching_current_confidences_is_biased(make):
    assert worst(make) > BIASED


def test_control_a_capacity_from_this_rounds_broken_slots_is_biased():
    assert worst(CapacityFromBrokenSlots, usable=usable_before_a_one) > BIASED


@pytest.mark.parametrize("name", [name for name in VERIFICATION_POLICIES if name not in ("full", "goodput", "lagged")])
def test_control_confidence_that_reads_its_own_token_is_biased(name):
    assert worst(named(name), reads_own_token=True) > BIASED


def test_control_a_lagged_ranking_by_own_tokens_is_biased():
    costs = StepCosts.of([1.0, 1.0, 1.0, 1.1, 1.5, 2.0, 2.5])
    assert worst(LaggedPolicy, reads_own_token=True, costs=costs) > BIASED


@pytest.mark.parametrize("name", ["prefix", "smoothed", "block", "lagged"])
def test_control_rows_that_share_draws_are_biased(name):
    def tv(seed):
        world = random_world(2, 2, 1, seed, shares_draws=True)
        world.rows[1] = world.rows[0]  # the same draft law, so that the same uniforms draw the same tokens
        got = joint_law(world, named(name))
        want = target_law(world)
        rows = [{}, {}]
        for texts, prob in got.items():
            for row, text in zip(rows, texts, strict=True):
                row[text] = row.get(text, 0.0) + prob
        alone = {}
        for (text, _), prob in want.items():
            alone[text] = alone.get(text, 0.0) + prob
        # Each row's own law, leaving aside that the rows are not independent.
        return max(0.5 * sum(abs(row[text] - alone[text]) for text in alone) for row in rows)

    assert max(tv(seed) for seed in range(12)) > BIASED


# -- the paper's and the derived vectors ------------------------------------------------------------------------------

V6_TARGET = {(): torch.tensor([0.7, 0.3]).double(), (0,): torch.full((2,), 0.5).double()}
V6_TARGET[1,] = V6_TARGET[0,]
V6_DRAFT = {prefix: torch.full((2,), 0.5).double() for prefix in V6_TARGET}
A, B = 0, 1


def vector_world(sps, confidence, num_rows):
    costs = StepCosts.of([1.0] * num_rows + [1 / value for value in sps])
    return World([(V6_DRAFT, V6_TARGET)] * num_rows, 2, 2, 1, confidence, costs)


def prob_of_a(world, new_policy):
    """Probability that each row commits token A first."""
    law = joint_law(world, new_policy)
    return [sum(prob for texts, prob in law.items() if texts[r][0] == A) for r in range(len(world.rows))]


def counterexample(row, number, drafts):
    """V6 and V8: certain of the second draft after A, hopeless after B."""
    return {(): 0.8, (A,): 0.9, (B,): 0.0}[drafts]


class V7Causal(PooledPolicy):
    """Always the first draft; the second if it raises Theta."""

    def _num_drafts(self, pool, facts, costs):
        theta = pool.tau / pool.at_counts(costs.round_s)
        return torch.where(theta[2] > theta[1], 2, 1)


def test_v6_and_v7_one_row():
    world = vector_world([1.0, 0.5, 0.45], counterexample, 1)
    assert prob_of_a(world, PrefixPolicy) == pytest.approx([0.7], abs=1e-7)
    for biased in (HindsightPolicy, OnePatience):
        assert prob_of_a(world, biased) == pytest.approx([0.85], abs=1e-7)
    for causal in (V7Causal, BlockPolicy):
        assert prob_of_a(world, causal) == pytest.approx([0.7], abs=1e-7)


def test_v8_two_rows_leak_under_global_search_only():
    world = vector_world([1.0, 0.6, 0.55, 0.54, 0.53], counterexample, 2)
    for make in POOLED:
        assert total_variation_of(world, make) < EXACT
    assert prob_of_a(world, HindsightPolicy) == pytest.approx([0.775, 0.775], abs=1e-7)
    assert total_variation_of(world, HindsightPolicy) == pytest.approx(0.0825, abs=1e-7)


class TopK(PooledPolicy):
    """A capacity that is given."""

    def __init__(self, num_drafts):
        super().__init__()
        self.num_drafts = num_drafts

    def _num_drafts(self, pool, facts, costs):
        return torch.tensor(self.num_drafts)


@pytest.mark.parametrize("num_drafts", [0, 1, 2, 3, 4])
def test_v8_a_fixed_capacity_is_lossless(num_drafts):
    world = vector_world([1.0, 0.6, 0.55, 0.54, 0.53], counterexample, 2)
    assert total_variation_of(world, lambda: TopK(num_drafts)) < EXACT


class PeekingTies(PrefixPolicy):
    """Of equal candidates the one whose row promises more behind it comes first."""

    def lengths(self, confidence, facts):
        ahead = confidence.survival[:, 1]
        order = [1, 0] if ahead[1] > ahead[0] else [0, 1]
        swapped = type(confidence)(confidence.conditional[order], confidence.survival[order])
        return super().lengths(swapped, facts)[order]


def test_v9_ties_look_at_nothing():
    world = vector_world(
        [1.0, 0.9, 0.5, 0.3, 0.2], lambda row, number, drafts: {(): 0.5, (A,): 1.0, (B,): 0.2}[drafts], 2
    )
    assert prob_of_a(world, PrefixPolicy) == pytest.approx([0.7, 0.7], abs=1e-7)
    assert total_variation_of(world, PrefixPolicy) < EXACT
    assert prob_of_a(world, PeekingTies) == pytest.approx([0.775, 0.775], abs=1e-7)
    assert total_variation_of(world, PeekingTies) == pytest.approx(0.105, abs=1e-7)


def test_v10_rows_draft_independently():
    def confidence(row, number, drafts):
        return 0.5 if row == 0 else {(): 0.9, (A,): 0.9, (B,): 0.1}[drafts]

    world = vector_world([1.0] * 5, confidence, 2)
    assert prob_of_a(world, lambda: TopK(2)) == pytest.approx([0.7, 0.7], abs=1e-7)
    world.shares_draws = True
    assert prob_of_a(world, lambda: TopK(2)) == pytest.approx([0.55, 0.7], abs=1e-7)


# -- the machinery ----------------------------------------------------------------------------------------------------


def test_the_enumeration_agrees_with_the_one_of_a_single_round_also_where_both_are_biased():
    world = random_world(1, 2, 1, 7, reads_own_token=True, horizon=3)
    world.rows = [(random_laws(2, 3, 1), random_laws(2, 3, 2))]

    def length_of(tokens):
        return next((k for k in range(2) if world.confidence(0, 0, tokens[: k + 1]) < 0.5), 2)

    def accept(*args):
        acceptance = accept_sampled(*args)
        return acceptance.num_accepted, acceptance.next_token

    want = round_law(accept, *world.rows[0], 2, 2, length_of)
    got = {texts[0]: prob for texts, prob in joint_law(world, lambda: ThresholdPolicy(0.5)).items()}
    assert total_variation(got, want) < EXACT
    assert total_variation(got, sequence_law(world.rows[0][1], 2, 3)) > BIASED
