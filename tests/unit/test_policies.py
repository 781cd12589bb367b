"""Calibration, policies and per-call knobs."""

import pytest
import torch
from policy_laws import facts_of
from tiny import random_ids, tiny_drafter, tiny_target
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList

from dspark_hf import DSparkCandidateGenerator, DSparkConfig, DSparkConfigError, UnsupportedGenerationError
from dspark_hf.config_rules import VERIFICATION_POLICIES
from dspark_hf.decoding.calibrate import calibrate
from dspark_hf.decoding.policies.facts import RoundFacts, StepCosts
from dspark_hf.decoding.policies.floor import NoFloor
from dspark_hf.decoding.policies.goodput import GoodputPolicy
from dspark_hf.decoding.policies.registry import COST_POLICIES
from dspark_hf.decoding.policies.simple import FullPolicy, SurvivalPolicy, ThresholdPolicy
from dspark_hf.decoding.schedule import schedule
from dspark_hf.decoding.settings import _warn_of_cap, _warn_of_missing_costs, resolve_settings
from dspark_hf.decoding.types import Confidence, DraftBlock, Proposal
from dspark_hf.evaluation.hindsight import HindsightPolicy


def block(rows, slots, num_usable=None):
    usable = torch.full((rows,), slots) if num_usable is None else torch.tensor(num_usable)
    return DraftBlock(torch.zeros(rows, slots, dtype=torch.long), None, None, usable)


def scheduled(policy, drafts, confidence):
    return schedule(policy, confidence, RoundFacts.of(drafts)).tolist()


def confidence(values):
    conditional = torch.tensor(values)
    return Confidence(conditional, conditional.cumprod(-1))


def test_calibration_gives_conditional_and_survival():
    got = calibrate(torch.tensor([[0.0, 0.0, 100.0]]))
    assert got.conditional[0].tolist() == pytest.approx([0.5, 0.5, 1.0])
    assert got.survival[0].tolist() == pytest.approx([0.5, 0.25, 0.25])
    assert calibrate(None) == Confidence(None, None)


def test_full_verifies_everything():
    assert scheduled(FullPolicy(), block(2, 5), Confidence(None, None)) == [5, 5]


@pytest.mark.parametrize(("threshold", "expected"), [(0.0, 4), (0.5, 2), (0.6, 1), (0.95, 0), (1.0, 0)])
def test_threshold_cuts_at_the_first_slot_below_it(threshold, expected):
    values = confidence([[0.9, 0.5, 0.4, 0.99]])
    assert scheduled(ThresholdPolicy(threshold), block(1, 4), values) == [expected]


@pytest.mark.parametrize(("threshold", "expected"), [(0.0, 4), (0.3, 2), (0.46, 1), (0.95, 0)])
def test_survival_cuts_where_the_whole_prefix_falls_below_the_threshold(threshold, expected):
    values = confidence([[0.9, 0.5, 0.4, 0.99]])  # products 0.9, 0.45, 0.18, 0.1782
    assert scheduled(SurvivalPolicy(threshold), block(1, 4), values) == [expected]


def test_nothing_is_verified_from_the_first_broken_slot_on():
    assert scheduled(FullPolicy(), block(3, 3, [3, 0, 2]), Confidence(None, None)) == [3, 0, 2]


def test_the_shorter_of_policy_and_usable_slots_counts():
    values = confidence([[0.9, 0.5, 0.4], [0.9, 0.9, 0.9], [0.1, 0.9, 0.9]])
    assert scheduled(ThresholdPolicy(0.5), block(3, 3, [3, 1, 2]), values) == [2, 1, 0]


def test_nothing_is_verified_of_rows_that_have_ended_or_beyond_the_room():
    drafts = block(4, 3)
    facts = RoundFacts.of(drafts, is_live=torch.tensor([True, False, True, True]), room=torch.tensor([2, 3, 0, 9]))
    assert schedule(FullPolicy(), Confidence(None, None), facts).tolist() == [2, 0, 0, 3]


@pytest.mark.parametrize("threshold", [-0.1, 1.1, float("nan"), "0.5"])
@pytest.mark.parametrize("make", [ThresholdPolicy, SurvivalPolicy])
def test_a_threshold_is_a_probability(make, threshold):
    with pytest.raises(UnsupportedGenerationError, match="must be a probability"):
        make(threshold)


# -- goodput ------------------------------------------------------------------------------------------------------


def seen(policy, num_accepted, lengths, *, num_rows, costs, times=1):
    facts = facts_of(num_rows, 4, costs=costs)
    for _ in range(times):
        policy.observe(Confidence(None, None), torch.tensor(lengths), torch.tensor(num_accepted), facts)


def best_length(rate, num_rows, num_slots, costs):
    """By hand: expected tokens a second of the same length for every row."""
    theta = {
        k: num_rows * sum(rate**j for j in range(k + 1)) / costs.round_seconds(num_rows * (1 + k))
        for k in range(1, num_slots + 1)
    }
    return max(theta, key=theta.get)


@pytest.mark.parametrize(
    ("num_accepted", "lengths", "accepted", "judged"),
    [([4, 4], [4, 4], 8, 8), ([0, 0], [4, 4], 0, 2), ([1, 3], [2, 3], 4, 5), ([0, 0], [0, 0], 0, 0)],
)
def test_goodput_counts_drafts_up_to_the_first_rejection(num_accepted, lengths, accepted, judged):
    costs = StepCosts.of([1.0] * 11)
    policy = GoodputPolicy()
    before = policy.rate(costs.step_s)
    assert float(before) == pytest.approx(0.6)
    seen(policy, num_accepted, lengths, num_rows=2, costs=costs)
    kept = 8.0 * (1 - 2 / 256)
    assert float(policy.rate(costs.step_s)) == pytest.approx((0.6 * kept + accepted) / (kept + judged))


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("stands", [[4, 4, 4], [0, 0, 0], [1, 2, 1]])
def test_goodput_takes_one_length_for_all_rows_from_past_rounds(num_rows, stands):
    costs = StepCosts.of([1.0 + 0.15 * b for b in range(3 * 5 + 1)], draft_s=0.2)
    policy = GoodputPolicy()
    seen(policy, stands[:num_rows], [4] * num_rows, num_rows=num_rows, costs=costs, times=40)
    got = policy.lengths(Confidence(None, None), facts_of(num_rows, 4, costs=costs)).tolist()
    assert got == [best_length(float(policy.rate(costs.step_s)), num_rows, 4, costs)] * num_rows
    assert {"444": got[0] == 4, "000": got[0] == 1, "121": 1 <= got[0] <= 3}["".join(map(str, stands))]


def test_goodput_forgets():
    costs = StepCosts.of([1.0] * 41)
    policy = GoodputPolicy()
    seen(policy, [4] * 8, [4] * 8, num_rows=8, costs=costs, times=200)
    assert float(policy.rate(costs.step_s)) > 0.99
    seen(policy, [0] * 8, [4] * 8, num_rows=8, costs=costs, times=200)
    assert float(policy.rate(costs.step_s)) < 0.01


def test_rows_do_not_look_at_each_other():
    values = torch.rand(50, 4, generator=torch.Generator().manual_seed(1))
    together = ThresholdPolicy(0.4).lengths(Confidence(values, values.cumprod(-1)), facts_of(50, 4))
    alone = [ThresholdPolicy(0.4).lengths(Confidence(v, v.cumprod(-1)), facts_of(1, 4)) for v in values.split(1)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("policy", [FullPolicy(), ThresholdPolicy(0.4)], ids=lambda p: p.name)
def test_a_decision_about_a_slot_ignores_later_slots(policy):
    values = torch.rand(200, 6, generator=torch.Generator().manual_seed(0))
    before = policy.lengths(Confidence(values, None), facts_of(200, 6))
    for slot in range(1, 6):
        changed = values.clone()
        changed[:, slot:] = torch.rand(200, 6 - slot, generator=torch.Generator().manual_seed(slot))
        after = policy.lengths(Confidence(changed, None), facts_of(200, 6))
        for k in range(slot):  # {ell >= k + 1} is about slot k, 0-based
            assert torch.equal(before >= k + 1, after >= k + 1)


@pytest.mark.parametrize("length", [0, 2, 3])
@torch.no_grad()
def test_transformers_loop_gets_the_scheduled_drafts_and_the_laws_they_were_drawn_from(monkeypatch, length):
    target, ids = tiny_target(num_layers=2), random_ids(5)
    laws = torch.rand(1, 3, 61, generator=torch.Generator().manual_seed(0)).softmax(-1)
    drafts = DraftBlock(torch.tensor([[4, 5, 6]]), laws, None, torch.tensor([3]))
    config = GenerationConfig(do_sample=True, max_length=50)
    drafter = tiny_drafter(target, target_layer_ids=[0], num_hidden_layers=1)
    generator = DSparkCandidateGenerator(drafter, target, config, LogitsProcessorList(), {})
    monkeypatch.setattr(
        generator, "propose", lambda ids: Proposal(drafts, Confidence(None, None), torch.tensor([length]))
    )
    outputs = target(ids, **generator.model_kwargs_overrides)
    candidates, scores = generator.get_candidates(ids, {}, outputs, is_first_iteration=False)
    assert candidates[0, 5:].tolist() == [4, 5, 6][:length]
    if length == 0:
        assert scores is None
    else:
        torch.testing.assert_close(scores.softmax(-1), laws[:, :length])


# -- knobs --------------------------------------------------------------------------------------------------------


def settings(*, drafter=None, has_costs=False, **call):
    config = DSparkConfig.from_target(tiny_target().config, block_size=6, **(drafter or {}))
    merged = {"num_assistant_tokens": 20, "assistant_confidence_threshold": 0.4} | call
    why_no_costs = None if has_costs else "nothing was measured"
    return resolve_settings(config, GenerationConfig(**merged), why_no_costs=why_no_costs)


def test_without_a_word_the_drafters_defaults_hold():
    got = settings()
    assert (got.num_draft_tokens, got.new_policy().name) == (6, "full")
    policy = settings(drafter={"verification_policy": "threshold", "confidence_threshold": 0.7}).new_policy()
    assert (policy.name, policy.threshold) == ("threshold", 0.7)


def test_the_call_wins():
    got = settings(num_assistant_tokens=2, verification_policy="threshold", assistant_confidence_threshold=0.9)
    assert (got.num_draft_tokens, got.new_policy().threshold) == (2, 0.9)
    got = settings(drafter={"verification_policy": "threshold"}, verification_policy="full")
    assert got.new_policy().name == "full"


def test_more_tokens_than_the_block_are_capped_with_one_warning(caplog):
    _warn_of_cap.cache_clear()
    for _ in range(3):
        assert settings(num_assistant_tokens=9).num_draft_tokens == 6
    assert caplog.text.count("drafting 6 tokens per round") == 1


@pytest.mark.parametrize("name", [name for name in VERIFICATION_POLICIES if name not in ("full", "goodput")])
def test_judging_drafts_without_a_confidence_head_is_refused(name):
    with pytest.raises(UnsupportedGenerationError, match="needs a drafter with a confidence head"):
        settings(drafter={"enable_confidence_head": False}, verification_policy=name, has_costs=True)


def test_every_policy_name_resolves_to_a_new_policy_each_time():
    for name in VERIFICATION_POLICIES:
        new_policy = settings(verification_policy=name, has_costs=True).new_policy
        assert new_policy().name == name
        assert new_policy() is not new_policy()


def test_weighing_drafts_against_time_without_step_times_is_refused_when_the_call_asks_for_it(caplog):
    needy = [name for name in VERIFICATION_POLICIES if name not in ("full", "threshold", "survival")]
    _warn_of_missing_costs.cache_clear()
    for name in needy:
        with pytest.raises(UnsupportedGenerationError, match="`dspark profile`"):
            settings(verification_policy=name)
        for _ in range(2):
            assert settings(drafter={"verification_policy": name}).new_policy().name == "full"
    assert caplog.text.count("every draft is verified instead") == len(needy) == 5


@pytest.mark.parametrize("name", sorted(COST_POLICIES - {"goodput"}))  # of which all rows get the same
def test_the_drafters_floor_reaches_its_policy(name):
    assert isinstance(settings(verification_policy=name, has_costs=True).new_policy()._floor, NoFloor)
    policy = settings(drafter={"min_drafts_every": 3}, verification_policy=name, has_costs=True).new_policy()
    assert policy._floor._every == 3


@pytest.mark.parametrize("every", [0, -1, True, 1.5, "2"])
def test_a_floor_is_a_whole_number_of_rounds(every):
    with pytest.raises(DSparkConfigError, match="min_drafts_every"):
        settings(drafter={"min_drafts_every": every})


@pytest.mark.parametrize("name", ["global", HindsightPolicy.name])
def test_unknown_policies_and_the_one_that_sees_everything_are_refused(name):
    with pytest.raises(UnsupportedGenerationError, match=f"'{name}'"):
        settings(verification_policy=name, has_costs=True)
