"""Every policy is lossless: exact joint laws of two and three rows over several rounds; and what breaks them."""

import pytest
import torch
from policy_laws import World, arbitrary_confidence, joint_law, random_world, target_law, total_variation_of

from dspark_hf.config_rules import VERIFICATION_POLICIES
from dspark_hf.decoding.policies.block import BlockPolicy
from dspark_hf.decoding.policies.facts import StepCosts
from dspark_hf.decoding.policies.gate import DraftGate
from dspark_hf.decoding.policies.lagged import LaggedPolicy
from dspark_hf.decoding.policies.pool import Pool, PooledPolicy
from dspark_hf.decoding.policies.prefix import PrefixPolicy, SmoothedPolicy
from dspark_hf.decoding.policies.registry import policy_factory
from dspark_hf.decoding.policies.simple import ThresholdPolicy
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
