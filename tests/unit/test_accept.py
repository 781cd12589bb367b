"""Acceptance: exact joint laws, negative controls that must fail, and the paper's vectors."""

import random

import pytest
import torch
from laws import random_laws, round_law, sequence_law, total_variation
from policy_laws import facts_of

from dspark_hf.decoding.accept import (
    accept_greedy,
    accept_sampled,
    acceptance_probability,
    accepted_lengths,
    expected_tau,
)
from dspark_hf.decoding.policies.simple import FullPolicy, ThresholdPolicy
from dspark_hf.decoding.types import Confidence

SIZES = [(2, 3), (3, 3), (4, 2), (5, 2)]


def table(values):
    return torch.tensor(values, dtype=torch.float64)


def accept(*args):
    acceptance = accept_sampled(*args)
    return acceptance.num_accepted, acceptance.next_token


def tv_of_round(vocab, num_slots, seed, *, accept=accept, length_of=None, zeros=0.0, sharpness=1.5):
    draft = random_laws(vocab, num_slots, seed, sharpness=sharpness, zeros=zeros)
    target = random_laws(vocab, num_slots, seed + 1000, sharpness=sharpness, zeros=zeros)
    got = round_law(accept, draft, target, vocab, num_slots, length_of or (lambda tokens: num_slots))
    assert sum(got.values()) == pytest.approx(1.0, abs=1e-12)
    return total_variation(got, sequence_law(target, vocab, num_slots + 1))


@pytest.mark.parametrize(("vocab", "num_slots"), SIZES)
@pytest.mark.parametrize("seed", range(2))
def test_a_round_commits_the_target_law(vocab, num_slots, seed):
    assert tv_of_round(vocab, num_slots, seed) < 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_impossible_tokens_on_either_side(seed):
    assert tv_of_round(4, 2, seed, zeros=0.4) < 1e-12


@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_any_fixed_length(length):
    assert tv_of_round(3, 3, 5, length_of=lambda tokens: length) < 1e-12


def test_one_hot_draft_law_given_or_implied():
    vocab, num_slots = 3, 2
    target = random_laws(vocab, num_slots, 7)
    choice = random_laws(vocab, num_slots, 8)
    draft = {prefix: torch.nn.functional.one_hot(law.argmax(), vocab).double() for prefix, law in choice.items()}
    expected = sequence_law(target, vocab, num_slots + 1)

    def without_table(tokens, draft_probs, *rest):
        return accept(tokens, None, *rest)

    for function in (accept, without_table):
        got = round_law(function, draft, target, vocab, num_slots, lambda tokens: num_slots)
        assert total_variation(got, expected) < 1e-12


def test_the_rejected_one_hot_draft_is_not_drawn_again():
    """Three slots that draft 0, 1 and 2; the target is undecided, so that only the rejected token is ruled out."""
    target_probs = torch.full((3, 4, 3), 1 / 3, dtype=torch.float64)
    uniforms = table([[0.9, 0, 0], [0, 0.9, 0], [0, 0, 0.9]])
    for point in (0.01, 0.3, 0.6, 0.99):
        num_accepted, next_token = accept(
            torch.tensor([[0, 1, 2]] * 3), None, target_probs, torch.full((3,), 3), uniforms, table([point] * 3)
        )
        assert num_accepted.tolist() == [0, 1, 2]
        assert next_token.tolist() == ([1, 0, 0] if point < 0.5 else [2, 2, 1])


def test_identical_laws_accept_everything():
    laws = random_laws(3, 2, 3)
    accepted = []

    def spy(*args):
        num_accepted, next_token = accept(*args)
        accepted.append(num_accepted)
        return num_accepted, next_token

    got = round_law(spy, laws, laws, 3, 2, lambda tokens: 2)
    assert total_variation(got, sequence_law(laws, 3, 3)) < 1e-12
    assert (accepted[0] == 2).all()


# -- policies -----------------------------------------------------------------------------------------------------


def lengths_by(policy, conditional_of, num_slots):
    """`ell` as a function of the drafted tokens, through the real policy."""

    def length_of(tokens):
        conditional = torch.tensor([[conditional_of(tokens, k) for k in range(num_slots)]])
        confidence = Confidence(conditional=conditional, survival=conditional.cumprod(-1))
        return int(policy.lengths(confidence, facts_of(1, num_slots))[0])

    return length_of


def value(prefix):
    """An arbitrary number in [0, 1) that depends on the tokens of `prefix`."""
    return random.Random(repr(prefix)).random()


@pytest.mark.parametrize("policy", [FullPolicy(), ThresholdPolicy(0.3), ThresholdPolicy(0.6)], ids=lambda p: p.name)
@pytest.mark.parametrize("seed", range(2))
def test_policies_that_read_only_earlier_tokens_are_lossless(policy, seed):
    length_of = lengths_by(policy, lambda tokens, k: value((seed, *tokens[:k])), 3)
    assert tv_of_round(3, 3, seed, length_of=length_of) < 1e-12


BROKEN = 1  # a token after which the drafter's numbers are NaN


def test_cutting_at_a_slot_that_is_broken_by_an_earlier_token_is_lossless():
    def length_of(tokens):
        return next((k for k in range(3) if k > 0 and tokens[k - 1] == BROKEN), 3)

    assert tv_of_round(3, 3, 1, length_of=length_of) < 1e-12


def test_control_giving_up_a_block_because_a_later_slot_is_broken_is_biased():
    assert tv_of_round(3, 3, 1, length_of=lambda tokens: 0 if BROKEN in tokens[:2] else 3) > 1e-2


def test_control_confidence_that_reads_its_own_token_is_biased():
    length_of = lengths_by(ThresholdPolicy(0.5), lambda tokens, k: 0.9 if tokens[k] == 0 else 0.1, 3)
    assert tv_of_round(3, 3, 1, length_of=length_of) > 1e-2


def test_control_dropping_a_draft_for_what_it_is_is_biased():
    assert tv_of_round(3, 2, 1, length_of=lambda tokens: 0 if tokens[0] == 2 else 2) > 1e-2


def test_control_residual_replaced_by_the_target_law_is_biased():
    def without_residual(tokens, draft_probs, target_probs, lengths, accept_uniforms, next_uniforms):
        num_accepted, _ = accept(tokens, draft_probs, target_probs, lengths, accept_uniforms, next_uniforms)
        cumulative = target_probs[range(len(lengths)), num_accepted].cumsum(-1)
        return num_accepted, torch.searchsorted(cumulative, next_uniforms[:, None], right=True).squeeze(1).clamp(max=2)

    assert tv_of_round(3, 2, 1, accept=without_residual) > 1e-2


def test_control_acceptance_with_another_law_than_sampled_from_is_biased():
    def flat_law(tokens, draft_probs, *rest):
        return accept(tokens, torch.full_like(draft_probs, 1 / 3), *rest)

    assert tv_of_round(3, 2, 1, accept=flat_law) > 1e-2


# -- greedy and helpers -------------------------------------------------------------------------------------------


def test_greedy_keeps_the_run_of_matches_up_to_each_length():
    drafts = torch.tensor([[4, 5, 6], [4, 5, 6], [4, 0, 6], [4, 5, 6]])
    choices = torch.tensor([[4, 5, 6, 7]] * 4)
    acceptance = accept_greedy(drafts, choices, torch.tensor([3, 1, 3, 0]))
    assert acceptance.num_accepted.tolist() == [3, 1, 1, 0]
    assert acceptance.next_token.tolist() == [7, 5, 5, 4]
    assert acceptance.is_valid.all()


def test_greedy_without_drafts():
    acceptance = accept_greedy(torch.empty(2, 0, dtype=torch.long), torch.tensor([[3], [8]]), torch.tensor([0, 0]))
    assert acceptance.num_accepted.tolist() == [0, 0]
    assert acceptance.next_token.tolist() == [3, 8]


def test_rows_equal_their_solo_runs():
    generator = torch.Generator().manual_seed(0)
    rows, slots, vocab = 64, 4, 6
    draft_probs = torch.rand(rows, slots, vocab, generator=generator).softmax(-1)
    target_probs = (torch.rand(rows, slots + 1, vocab, generator=generator) * 3).softmax(-1)
    tokens = torch.randint(0, vocab, (rows, slots), generator=generator)
    lengths = torch.randint(0, slots + 1, (rows,), generator=generator)
    uniforms = torch.rand(rows, slots, generator=generator, dtype=torch.float64)
    last = torch.rand(rows, generator=generator, dtype=torch.float64)
    together = accept(tokens, draft_probs, target_probs, lengths, uniforms, last)
    for row in range(rows):
        one, width = slice(row, row + 1), int(lengths[row])
        alone = accept(
            tokens[one, :width], draft_probs[one, :width], target_probs[one, : width + 1], lengths[one],
            uniforms[one, :width], last[one],
        )  # fmt: skip
        assert [int(x) for x in alone] == [int(x[row]) for x in together]


def test_accepted_lengths_ignores_slots_behind_the_length():
    stands = torch.tensor([[True, True, False], [True, True, True]])
    assert accepted_lengths(stands, torch.tensor([3, 2])).tolist() == [2, 2]


def accept_one(draft_law, target_law, uniform, *, token, point=0.5):
    """One draft of one row; the law after it is the target's again."""
    return accept_sampled(
        torch.tensor([[token]]), None if draft_law is None else table(draft_law)[None, None],
        table(target_law).expand(1, 2, -1), torch.tensor([1]), table([[uniform]]), table([point]),
    )  # fmt: skip


@pytest.mark.parametrize("draft_law", [[0.5, 0.5], None])
def test_an_impossible_draft_is_rejected_whatever_the_uniform(draft_law):
    for uniform in (0.0, 0.5):
        acceptance = accept_one(draft_law, [1.0, 0.0], uniform, token=1)
        assert (int(acceptance.num_accepted), int(acceptance.next_token)) == (0, 0)


def test_a_rejection_by_rounding_falls_back_to_the_target_law():
    above = 0.5 + 2**-40  # the draft's law sums to a little more, and nothing is left of the target's
    for point, token in ((0.2, 0), (0.7, 1)):
        acceptance = accept_one([0.5, above], [0.5, 0.5], 1 - 2**-53, token=1, point=point)
        assert (int(acceptance.num_accepted), int(acceptance.next_token)) == (0, token)
        assert acceptance.is_valid.all()


def test_a_target_law_without_mass_or_with_nan_is_not_valid():
    for target_law in ([0.0, 0.0], [float("nan"), 1.0]):
        assert not accept_one([0.5, 0.5], target_law, 0.5, token=1).is_valid
    assert accept_one([0.5, 0.5], [0.5, 0.5], 0.5, token=1).is_valid


def test_sampling_without_drafts_inverts_the_target_law():
    empty = torch.empty(2, 0, dtype=torch.long)
    target_probs = table([[[0.25, 0.75]], [[0.75, 0.25]]])
    for draft_probs in (None, torch.empty(2, 0, 2, dtype=torch.float64)):
        num_accepted, next_token = accept(
            empty, draft_probs, target_probs, torch.tensor([0, 0]), torch.empty(2, 0), table([0.5, 0.5])
        )
        assert (num_accepted.tolist(), next_token.tolist()) == ([0, 0], [1, 0])


def test_v2_acceptance_and_residual():
    target, draft = table([0.7, 0.3]), table([0.5, 0.5])
    assert float(acceptance_probability(draft, target)) == pytest.approx(0.8, abs=1e-12)
    for point in (0.0, 0.5, 0.999999):  # the residual law is (1, 0)
        num_accepted, next_token = accept(
            torch.tensor([[1]]), draft[None, None], target[None, None].expand(1, 2, 2), torch.tensor([1]),
            torch.tensor([[0.61]]), torch.tensor([point]),
        )  # fmt: skip
        assert (int(num_accepted[0]), int(next_token[0])) == (0, 0)


def test_v12_label():
    draft = table([[0.5, 0.3, 0.2], [0.2, 0.7, 0.1]])
    target = table([[0.6, 0.3, 0.1], [0.1, 0.6, 0.3]])
    assert acceptance_probability(draft, target).tolist() == pytest.approx([0.9, 0.8], abs=1e-12)


def test_v17_expected_tau():
    for gamma, tau in ((5, 3.68928), (7, 4.1611392)):
        assert float(expected_tau(torch.full((gamma,), 0.8, dtype=torch.float64))) == pytest.approx(tau, abs=1e-9)
