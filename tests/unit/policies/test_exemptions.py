"""Where any policy is lossless: a draft or a target without randomness leaves nothing to leak, whoever looks ahead."""

import pytest
import torch
from policy_laws import random_world, total_variation_of

from dspark_hf.evaluation.hindsight import HindsightPolicy

EXACT = 1e-12
BIASED = 1e-3
SEEDS = range(12)


def one_hot(laws):
    """The same laws with all of their mass on the best token."""
    return {prefix: torch.nn.functional.one_hot(law.argmax(), len(law)).double() for prefix, law in laws.items()}


def world_of(seed, is_greedy_draft, is_greedy_target):
    world = random_world(2, 2, 1, seed)
    world.rows = [
        (one_hot(draft) if is_greedy_draft else draft, one_hot(target) if is_greedy_target else target)
        for draft, target in world.rows
    ]
    return world


def worst(is_greedy_draft, is_greedy_target):
    return max(total_variation_of(world_of(seed, is_greedy_draft, is_greedy_target), HindsightPolicy) for seed in SEEDS)


@pytest.mark.parametrize(("is_greedy_draft", "is_greedy_target"), [(True, False), (False, True), (True, True)])
def test_a_search_over_whole_drafts_is_lossless_without_randomness(is_greedy_draft, is_greedy_target):
    assert worst(is_greedy_draft, is_greedy_target) < EXACT


def test_control_with_randomness_on_both_sides_it_is_not():
    assert worst(False, False) > BIASED
