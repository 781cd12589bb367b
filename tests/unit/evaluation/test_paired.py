"""Paired differences: the swap test's level and power, and the interval beside it."""

import itertools

import numpy as np
import pytest
import torch
from synthetic_drafters import SyntheticDrafter

from dspark_hf.evaluation import intervals, paired
from dspark_hf.evaluation.paired import compare_pairs, swap_test
from dspark_hf.evaluation.replay import ReplayedText
from dspark_hf.evaluation.tau_tables import MEAN, mean_tau_of, paired_differences

# Prompts differ much more than drafters do.
BASE = SyntheticDrafter(((0.3, 0.2, 0.2), (0.6, 0.5, 0.5), (0.9, 0.9, 0.8)))
BETTER = SyntheticDrafter(tuple(tuple(rate + 0.06 for rate in one) for one in BASE.rates))
NUM_PROMPTS = 40
EMPTY = torch.zeros(0)


@pytest.fixture(autouse=True)
def fewer_draws(monkeypatch):
    monkeypatch.setattr(intervals, "NUM_RESAMPLES", 200)
    monkeypatch.setattr(paired, "NUM_SWAPS", 300)


def ratio(sums):
    return sums["tokens"] / sums["rounds"]


def columns(tokens, rounds):
    return {"tokens": list(map(float, tokens)), "rounds": list(map(float, rounds))}


def texts(num_accepted):
    """What tau is made of, of one drafter's prompts."""
    return [
        ReplayedText(f"own/{i}", int(row.sum()) + len(row), float(len(row)), EMPTY, EMPTY, None, EMPTY, EMPTY, EMPTY)
        for i, row in enumerate(num_accepted)
    ]


def two_drafters(rng, first, second):
    """Both on the same prompts: the kind of a prompt is shared, its rounds are not."""
    kinds = rng.integers(0, len(first.rates), NUM_PROMPTS)
    results = []
    for drafter in (first, second):
        rates = np.array(drafter.rates)[kinds]
        is_hit = rng.random((NUM_PROMPTS, drafter.num_rounds, drafter.num_slots)) < rates[:, None, :]
        results.append(texts(np.cumprod(is_hit, axis=-1).sum(axis=-1)))
    return results


def p_values(first, second, num_trials, seed):
    rng = np.random.default_rng(seed)
    found = []
    for trial in range(num_trials):
        pair = two_drafters(rng, first, second)
        (difference,) = paired_differences(("a", "b"), 0.0, tuple(pair), seed=trial)
        found.append(difference)
    return found


def test_equal_drafters_raise_few_alarms():
    """200 trials at level 0.05: more than 18 alarms have a probability below 0.5 %."""
    found = p_values(BASE, BASE, 200, seed=0)
    assert sum(one.p_value <= 0.05 for one in found) <= 18
    assert np.mean([one.p_value for one in found]) == pytest.approx(0.5, abs=0.08)
    # The interval, too, rarely excludes 0.
    assert sum(not one.tau.low <= 0 <= one.tau.high for one in found) <= 22


def test_a_true_difference_is_found():
    found = p_values(BETTER, BASE, 40, seed=1)
    assert sum(one.p_value <= 0.05 and one.tau.value > 0 for one in found) >= 36
    true = BETTER.tau - BASE.tau
    assert sum(one.tau.low <= true <= one.tau.high for one in found) >= 34
    gain = 100 * (BETTER.tau / BASE.tau - 1)
    assert np.mean([one.gain_percent.value for one in found]) == pytest.approx(gain, abs=1.0)
    # Without pairing, prompts that differ so much would hide it.
    rng = np.random.default_rng(1)
    first, second = two_drafters(rng, BETTER, BASE)
    shuffled = rng.permutation(NUM_PROMPTS)
    other = [ReplayedText(one.id, second[i].num_tokens, second[i].num_rounds, *[EMPTY] * 2, None, *[EMPTY] * 3)
             for one, i in zip(second, shuffled, strict=True)]  # fmt: skip
    (as_pairs,) = paired_differences(("a", "b"), 0.0, (first, second), seed=0)
    (mixed,) = paired_differences(("a", "b"), 0.0, (first, other), seed=0)
    assert mixed.tau.high - mixed.tau.low > 2 * (as_pairs.tau.high - as_pairs.tau.low)
    assert mixed.p_value > as_pairs.p_value


def test_few_prompts_are_swapped_in_every_way():
    first, second = columns([9, 8, 5], [3, 4, 2]), columns([7, 6, 6], [3, 4, 3])
    sizes = []
    for swaps in itertools.product([False, True], repeat=3):
        ours, theirs = np.zeros(2), np.zeros(2)
        for i, is_swapped in enumerate(swaps):
            one, other = (np.array([part["tokens"][i], part["rounds"][i]]) for part in (first, second))
            ours, theirs = (ours + other, theirs + one) if is_swapped else (ours + one, theirs + other)
        sizes.append(abs(ours[0] / ours[1] - theirs[0] / theirs[1]))
    expected = np.mean([size >= sizes[0] - 1e-12 for size in sizes])
    assert swap_test(first, second, ratio, seed=0) == pytest.approx(expected)


def test_drawn_swaps_come_close_to_all_of_them():
    rng = np.random.default_rng(3)
    first, second = (columns(rng.integers(20, 40, 10), rng.integers(9, 16, 10)) for _ in range(2))
    every = swap_test(first, second, ratio, seed=0, num_swaps=1024)
    assert 0.05 < every < 0.95
    assert swap_test(first, second, ratio, seed=0, num_swaps=1023) == pytest.approx(every, abs=0.06)


def test_one_prompt_or_none_different_is_no_evidence():
    one = columns([9], [3])
    assert swap_test(one, one, ratio, seed=0) is None
    same = columns([9, 8], [3, 3])
    found = compare_pairs(same, same, ratio, seed=0)
    assert (found.difference.value, found.p_value, found.gain_percent.value) == (0.0, 1.0, 0.0)
    nothing = columns([0, 0], [0, 0])
    assert swap_test(nothing, nothing, ratio, seed=0) is None


def test_data_sets_are_pooled_by_group_and_weighed_alike():
    def made(counts):
        return [
            ReplayedText(name, tokens, rounds, EMPTY, EMPTY, None, EMPTY, EMPTY, EMPTY)
            for name, (tokens, rounds) in zip(
                ("gsm8k/1", "gsm8k/2", "mbpp/1", "mbpp/2", "own/1", "own/2"), counts, strict=True
            )
        ]

    first = made([(6, 2.0), (6, 2.0), (4, 2.0), (4, 2.0), (90, 90.0), (10, 10.0)])
    second = made([(6, 3.0), (6, 3.0), (4, 2.0), (4, 2.0), (90, 90.0), (10, 10.0)])
    found = {one.group: one for one in paired_differences(("a", "b"), 1.0, (first, second), seed=0)}
    assert set(found) == {"all", "math", "code", MEAN}
    assert found["math"].tau.value == pytest.approx(1.0) and found["math"].gain_percent.value == pytest.approx(50)
    assert found["code"].tau.value == 0
    assert found["all"].tau.value == pytest.approx(120 / 108 - 120 / 110)
    assert found[MEAN].tau.value == pytest.approx((3 + 2 + 1) / 3 - (2 + 2 + 1) / 3)
    assert found["all"].tau.n == 6 and found["math"].tau.n == 2 and found[MEAN].tau.low is not None
    # Resamples that draw the only prompt of a data set once each are all alike.
    alone = {one.group: one for one in paired_differences(("a", "b"), 1.0, (first[1:], second[1:]), seed=0)}
    assert alone[MEAN].tau.low is None and alone["all"].tau.low is not None and alone[MEAN].p_value is not None
    assert mean_tau_of(first[1:], seed=0).low is None and mean_tau_of(first, seed=0).low is not None
