"""Shorter drafts against slow references: rounds walked one by one."""

import itertools

import pytest
import torch

from dspark_hf.decoding.calibrate import SlotCalibration
from dspark_hf.evaluation.cuts import Cut, CutPlan, TextDrafts, recorded, rewalked, walk

SIZE = 3


def expected_rounds(acceptance, ell, at=0):
    """Expected rounds, verified and accepted drafts from token `at` on: every outcome of every round."""
    num_blocks = len(acceptance)
    if at >= num_blocks:
        return torch.zeros(3, dtype=torch.float64)
    inside = min(ell, num_blocks - at)  # drafts behind the end do not count
    total = torch.tensor([1.0, inside, 0.0], dtype=torch.float64)
    for outcome in itertools.product([False, True], repeat=ell):
        probability = 1.0
        for k, is_hit in enumerate(outcome):
            probability *= acceptance[at, k] if is_hit else 1 - acceptance[at, k]
        num_accepted = next((k for k, is_hit in enumerate(outcome) if not is_hit), ell)
        if probability:
            total += probability * expected_rounds(acceptance, ell, at + num_accepted + 1)
            total[2] += probability * min(num_accepted, inside)
    return total


def text(num_blocks=5, seed=0):
    """Acceptance of random drafts, none of them behind the text's end."""
    acceptance = torch.rand(num_blocks, SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return acceptance * (torch.arange(num_blocks, 0, -1)[:, None] > torch.arange(SIZE))


def test_lengths_are_walked_like_every_outcome():
    acceptance = text()
    sums = rewalked(CutPlan(SIZE), TextDrafts(acceptance, None, None, None))
    for i, cut in enumerate(CutPlan(SIZE).cuts):
        expected = expected_rounds(acceptance, int(cut.value))
        found = torch.stack([sums.num_rounds[i], sums.num_verified[i], sums.num_accepted[i]])
        assert found.tolist() == pytest.approx(expected.tolist())
    assert (sums.num_tokens == 5).all()
    # Every token of a round but its bonus token is an accepted draft, and the last round may have no bonus token.
    assert (sums.num_tokens - sums.num_accepted - sums.num_rounds <= 1e-9).all()


def test_walking_starts_rounds_where_rounds_end():
    always, never = torch.ones(7, SIZE), torch.zeros(7, SIZE)
    assert walk(always.cumprod(1)).tolist() == [1, 0, 0, 0, 1, 0, 0]
    assert walk(never.cumprod(1)).tolist() == [1] * 7
    both = walk(torch.stack([always, never]).cumprod(-1))
    assert both.sum(dim=1).tolist() == [2, 7]


def greedy_case(seed, num_blocks=30):
    """Drafts that are right or wrong, with confidences that differ behind the first wrong one."""
    g = torch.Generator().manual_seed(seed)
    acceptance = (torch.rand(num_blocks, SIZE, generator=g) < 0.7).double()
    acceptance *= torch.arange(num_blocks, 0, -1)[:, None] > torch.arange(SIZE)
    logits, off_text = torch.randn(2, num_blocks, SIZE, generator=g)
    first = acceptance.cumprod(1).sum(1).long().clamp(max=SIZE - 1)
    merged = torch.where(torch.arange(SIZE) <= first[:, None], logits, off_text)
    return acceptance, logits, merged, first


def walked_greedily(acceptance, merged, threshold, scale):
    at = rounds = verified = accepted = 0
    while at < len(acceptance):
        ell = 0
        while ell < SIZE and torch.sigmoid(scale * merged[at, ell]) >= threshold:
            ell += 1
        hits = 0
        while hits < ell and acceptance[at, hits] == 1:
            hits += 1
        inside = len(acceptance) - at
        rounds, verified, accepted = rounds + 1, verified + min(ell, inside), accepted + min(hits, inside)
        at += hits + 1
    return [rounds, verified, accepted]


@pytest.mark.parametrize("seed", range(4))
def test_thresholds_see_what_was_drafted_behind_a_rejected_draft(seed):
    acceptance, logits, merged, first = greedy_case(seed)
    plan = CutPlan(SIZE, (0.0, 0.3, 0.6), SlotCalibration(torch.full((SIZE,), 2.0), torch.zeros(SIZE)))
    sums = rewalked(plan, TextDrafts(acceptance, logits, merged, first))
    for i, cut in enumerate(plan.cuts):
        if cut.kind != "length":
            expected = walked_greedily(acceptance, merged, cut.value, 2.0 if cut.kind == "calibrated" else 1.0)
            found = [sums.num_rounds[i], sums.num_verified[i], sums.num_accepted[i]]
            assert [float(value) for value in found] == pytest.approx(expected), cut
    # The text's own confidences alone would count other drafts.
    wrong = rewalked(plan, TextDrafts(acceptance, logits, logits, first))
    assert not torch.allclose(wrong.num_verified, sums.num_verified)


def test_a_threshold_of_zero_cuts_nothing():
    acceptance, logits, merged, first = greedy_case(9)
    plan = CutPlan(SIZE, (0.0,))
    sums = rewalked(plan, TextDrafts(acceptance, logits, merged, first))
    whole, zero = plan.cuts.index(Cut("length", SIZE)), plan.cuts.index(Cut("threshold", 0.0))
    for name in ("num_rounds", "num_verified", "num_accepted", "reached", "accepted"):
        assert torch.allclose(getattr(sums, name)[whole], getattr(sums, name)[zero])


def test_recorded_rounds_are_cut_one_by_one():
    logits = torch.tensor([[2.0, -1.0, 3.0], [1.0, 1.0, 1.0], [-2.0, 5.0, 5.0], [1.0, 1.0, 0.0]])
    verified, accepted = torch.tensor([3, 3, 3, 2]), torch.tensor([2, 3, 0, 1])
    tokens = torch.tensor([3, 4, 1, 1])  # a stop cut the last round's draft off
    plan = CutPlan(SIZE, (0.5,))
    sums = recorded(plan, logits, verified, accepted, tokens, 1)
    names = ("num_tokens", "num_rounds", "num_verified", "num_accepted")
    found = {(c.kind, c.value): [float(getattr(sums, n)[i]) for n in names] for i, c in enumerate(plan.cuts)}
    assert found == {
        ("length", 1): [2 + 2 + 1 + 1 + 1, 5, 4, 3],
        ("length", 2): [3 + 3 + 1 + 1 + 1, 5, 8, 5],
        ("length", 3): [3 + 4 + 1 + 1 + 1, 5, 11, 6],
        ("threshold", 0.5): [2 + 4 + 1 + 1 + 1, 5, 1 + 3 + 0 + 2, 1 + 3 + 0 + 1],
    }
    assert sums.reached[2].tolist() == [4, 3, 2] and sums.accepted[2].tolist() == [3, 2, 1]
    assert sums.reached[3].tolist() == [3, 2, 1]


def test_plans_without_confidences_have_lengths_only():
    assert [cut.kind for cut in CutPlan(2).cuts] == ["length", "length"]
    with pytest.raises(AssertionError, match="thresholds need confidences"):
        CutPlan(2, (0.5,)).kept(None, 3)
