"""The best causal policy, against vectors, by brute force, and as a bound for the others."""

import itertools

import pytest
import torch
from policy_laws import confidence_of, facts_of

from dspark_hf.decoding.policies.block import BlockPolicy
from dspark_hf.decoding.policies.facts import StepCosts
from dspark_hf.decoding.policies.prefix import PrefixPolicy, SmoothedPolicy
from dspark_hf.evaluation.causal import CausalOptimum
from dspark_hf.evaluation.hindsight import HindsightPolicy


def costs_of(sps, num_rows=1):
    return StepCosts.of([1.0] * num_rows + [1 / value for value in sps])


def theta_of(levels, chosen, lengths, costs):
    tau = b = len(levels)
    for row, places, length in zip(levels, chosen, lengths, strict=True):
        survival = 1.0
        for k in range(length):
            survival *= row[k][places[k]]
            tau, b = tau + survival, b + 1
    return tau / float(costs.round_s[b])


def mean_theta(levels, costs, lengths_of):
    """Expected Theta of a rule, over all confidences."""
    num_levels = len(levels[0][0])
    rounds = list(itertools.product(*(itertools.product(range(num_levels), repeat=len(row)) for row in levels)))
    return sum(theta_of(levels, chosen, lengths_of(chosen), costs) for chosen in rounds) / len(rounds)


def by_policy(policy, levels, costs):
    def lengths_of(chosen):
        conditional = [[row[k][place] for k, place in enumerate(c)] for row, c in zip(levels, chosen, strict=True)]
        facts = facts_of(len(levels), len(levels[0]), costs=costs)
        return policy.lengths(confidence_of(conditional), facts).tolist()

    return lengths_of


def test_v7_the_best_causal_policy_of_the_counterexample():
    best = CausalOptimum([[[0.8, 0.8], [0.9, 0.0]]], costs_of([1.0, 0.5, 0.45]))
    assert best.theta == pytest.approx(1.017)
    assert best.lengths([[0, 0]]) == [2]
    assert best.lengths([[0, 1]]) == [1]


SMALL = [[[0.9, 0.3], [0.8, 0.1]], [[0.6, 0.5], [1.0, 0.2]]]
JAGGED = costs_of([1.0, 0.6, 0.55, 0.35, 0.34], 2)


def test_its_rule_gives_the_value_it_claims():
    best = CausalOptimum(SMALL, JAGGED)
    assert mean_theta(SMALL, JAGGED, best.lengths) == pytest.approx(best.theta, abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_no_causal_policy_is_better_and_hindsight_is_no_worse(seed):
    generator = torch.Generator().manual_seed(seed)
    levels = torch.rand(2, 2, 2, generator=generator).tolist()
    steps = 1 + (torch.rand(7, generator=generator, dtype=torch.float64) * 0.6).cumsum(0)
    costs = StepCosts.of(steps.tolist())
    best = CausalOptimum(levels, costs).theta
    for make in (PrefixPolicy, SmoothedPolicy, BlockPolicy):
        assert mean_theta(levels, costs, by_policy(make(), levels, costs)) <= best + 1e-6
    assert mean_theta(levels, costs, by_policy(HindsightPolicy(), levels, costs)) >= best - 1e-6


def test_certain_confidences_leave_nothing_to_hindsight():
    levels = [[[0.9], [0.5], [0.9]]]
    costs = costs_of([1.0, 0.52, 0.50, 0.45])
    best = CausalOptimum(levels, costs)
    assert best.lengths([[0, 0, 0]]) == by_policy(HindsightPolicy(), levels, costs)([[0, 0, 0]]) == [3]
