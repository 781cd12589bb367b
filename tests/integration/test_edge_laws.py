"""Laws with zeros, with one token left, identical or without a common token, and NaN from processors or the target:
output stays that of plain generate(), and what plain generate() cannot do fails in the same way."""

import math

import pytest
import torch
from sampled_law import (
    LEVEL,
    PROMPT,
    VOCAB,
    generated,
    generated_p_value,
    p_value,
    small_drafter,
    small_target,
    staged_p_value,
    staged_rounds,
)
from tiny import OracleDrafter, greedy, random_ids, tiny_drafter, tiny_target
from torch import nn
from transformers.generation.logits_process import LogitsProcessorList

from dspark_hf import record_speculation

NUM_ROWS = 4000
EACH = LEVEL / 20
IDS = random_ids(7)


@pytest.fixture(scope="module")
def small():
    return small_target()


@pytest.fixture(scope="module")
def shared_target():
    return tiny_target()


@pytest.fixture(scope="module")
def expected(shared_target):
    return greedy(shared_target, IDS, max_new_tokens=24)


def law_of_last_token(seed, *, vocab=VOCAB, zeros=0.0):
    """A processor that puts one law, chosen by the last token, in the place of draft and target law alike."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(vocab, vocab, generator=generator) * 2
    table[torch.rand(vocab, vocab, generator=generator) < zeros] = -math.inf
    table[:, 0] = 0.0
    return lambda ids, scores: table[ids[:, -1]]


@pytest.mark.parametrize("zeros", [0.0, 0.5])
def test_identical_laws_accept_every_draft(small, zeros):
    same = law_of_last_token(3, zeros=zeros)
    counts, joint, proposal, acceptance = staged_rounds(
        small, small_drafter(small), {}, NUM_ROWS, seed=1, processors=LogitsProcessorList([same])
    )
    assert torch.equal(acceptance.num_accepted, proposal.lengths)
    assert proposal.lengths.min() == 2
    assert p_value(counts, joint) > EACH
    with record_speculation() as report:
        generated(small, small_drafter(small), 20, seed=1, logits_processor=[same])
    assert report.num_accepted == report.num_verified > 0


def never(target, tokens):
    """The target's head with a law of zero at `tokens`."""
    head = nn.Linear(target.config.hidden_size, target.config.vocab_size)
    with torch.no_grad():
        head.weight.copy_(target.lm_head.weight)
        head.bias.zero_()[list(tokens)] = -math.inf
    target.lm_head = head
    return target


def only(drafter, tokens):
    """The drafter with a law of zero outside `tokens`, whatever head it borrows."""
    logits = torch.full((VOCAB,), -math.inf)
    logits[list(tokens)] = torch.tensor([0.3 * i for i in range(len(tokens))])
    drafter.base_logits = lambda hidden, head: logits.expand(*hidden.shape[:2], -1).clone()
    return drafter


def test_laws_without_a_common_token_reject_everything():
    target = never(small_target(), {0, 1})
    drafter = only(small_drafter(target), {0, 1})
    counts, joint, proposal, acceptance = staged_rounds(target, drafter, {}, NUM_ROWS, seed=1, first=2)
    assert acceptance.num_accepted.max() == 0 < proposal.lengths.min()
    assert p_value(counts, joint) > EACH
    with record_speculation() as report:
        generated(target, drafter, 20, seed=1)
    assert report.num_accepted == 0 < report.num_verified


def test_impossible_tokens_on_both_sides():
    target = never(small_target(), {1, 2})
    drafter = only(small_drafter(target), {1, 3, 4})
    counts, joint, _, acceptance = staged_rounds(target, drafter, {}, NUM_ROWS, seed=1, first=3)
    assert set(acceptance.num_accepted.tolist()) == {0, 1, 2}
    assert p_value(counts, joint) > EACH


ONE_LEFT = [
    {"top_k": 1}, {"top_p": 1e-3}, {"min_p": 1.0}, {"epsilon_cutoff": 0.999}, {"top_h": 1e-4},
    {"temperature": 1e-4}, {"temperature": 1e-6}, {"temperature": 1e-4, "top_k": 3, "top_p": 0.9},
]  # fmt: skip


@pytest.mark.parametrize("options", ONE_LEFT, ids=str)
def test_sampling_that_leaves_one_token_is_greedy(shared_target, expected, options):
    sampling = {"do_sample": True, "max_length": 31} | {"top_k": 0} | options
    for drafter in (
        tiny_drafter(shared_target),
        OracleDrafter.for_target(shared_target, expected[0], hit_rate=0.7, block_size=4),
    ):
        assert torch.equal(shared_target.generate(IDS, assistant_model=drafter, **sampling), expected)


def test_a_tiny_typical_p_leaves_one_token_which_is_not_the_best(shared_target, expected):
    sampling = {"do_sample": True, "max_length": 31, "top_k": 0, "typical_p": 1e-4}
    plain = shared_target.generate(IDS, **sampling)
    assert not torch.equal(plain, expected)
    for drafter in (tiny_drafter(shared_target), OracleDrafter.for_target(shared_target, plain[0], hit_rate=0.7)):
        assert torch.equal(shared_target.generate(IDS, assistant_model=drafter, **sampling), plain)


@pytest.mark.parametrize("temperature", [1e4, 0.05])
def test_extreme_temperatures_leave_the_law(small, temperature):
    assert staged_p_value(small, small_drafter(small), {"temperature": temperature}, NUM_ROWS, seed=1) > EACH


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_processor_that_leaves_one_token_by_prefix(shared_target, do_sample):
    def next_only(ids, scores):
        allowed = (ids[:, -1:] * 3 + ids[:, -2:-1] + 1) % scores.shape[-1]
        return torch.full_like(scores, -math.inf).scatter(1, allowed, scores.gather(1, allowed))

    common = {"do_sample": do_sample, "max_new_tokens": 12, "logits_processor": [next_only]}
    output = shared_target.generate(
        IDS, assistant_model=tiny_drafter(shared_target), return_dict_in_generate=True, **common
    )
    assert torch.equal(output.sequences, shared_target.generate(IDS, **common))
    assert output.speculation.num_accepted == output.speculation.num_verified > 0


def test_a_vocabulary_of_two():
    target = tiny_target(vocab_size=2, num_layers=2)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.25)
    drafter = tiny_drafter(target, block_size=3, num_hidden_layers=1)
    ids = torch.tensor([[1, 0, 1]])
    assert torch.equal(
        greedy(target, ids, max_new_tokens=16, assistant_model=drafter), greedy(target, ids, max_new_tokens=16)
    )
    output = target.generate(
        ids, do_sample=True, max_new_tokens=200, assistant_model=drafter, return_dict_in_generate=True
    )
    assert set(output.sequences[0].tolist()) == {0, 1}
    assert 0 < output.speculation.num_accepted < output.speculation.num_verified


# -- what plain generate() cannot do either -------------------------------------------------------------------------


def outcome(target, **options):
    """The tokens, or the class of the error."""
    try:
        return target.generate(IDS, max_new_tokens=12, **options)[0].tolist()
    except (RuntimeError, ValueError) as error:
        return type(error)


def nan_after_token(ids, scores):
    return torch.where((ids[:, -4:] % 7 == 3).any(1, keepdim=True), math.nan, scores)


def nan_after_length(ids, scores):
    return torch.full_like(scores, math.nan) if ids.shape[1] > 11 else scores


def nan_in_one_score(ids, scores):
    scores = scores.clone()
    scores[:, 5] = math.nan
    return scores


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("processor", [nan_after_token, nan_after_length, nan_in_one_score])
def test_processors_that_make_nan_do_what_they_do_in_plain_generation(shared_target, expected, processor, do_sample):
    options = {"do_sample": do_sample, "top_k": 0, "logits_processor": [processor]}
    plain = outcome(shared_target, **options)
    for drafter in (tiny_drafter(shared_target), OracleDrafter.for_target(shared_target, expected[0], hit_rate=1.0)):
        assert outcome(shared_target, assistant_model=drafter, **options) == plain


def test_a_temperature_that_overflows_float32(shared_target):
    options = {"do_sample": True, "temperature": 1e-40}
    assert outcome(shared_target, **options) is RuntimeError
    assert outcome(shared_target, assistant_model=tiny_drafter(shared_target), **options) is RuntimeError


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("kind", ["one_weight", "some_positions"])
def test_nan_in_the_targets_logits(kind, do_sample):
    target = tiny_target()
    if kind == "one_weight":
        with torch.no_grad():
            target.lm_head.weight[9] = math.nan
    else:
        target.lm_head.register_forward_hook(
            lambda module, inputs, logits: torch.where(inputs[0][..., :1] > 1.0, math.nan, logits)
        )
    drafters = tiny_drafter(target), OracleDrafter.for_target(target, greedy(target, IDS, max_new_tokens=12)[0])
    plain = outcome(target, do_sample=do_sample, top_k=1)
    if not do_sample:
        assert len(set(plain[7:])) > 1 or kind == "one_weight"
    for drafter in drafters:
        assert outcome(target, assistant_model=drafter, do_sample=do_sample, top_k=1) == plain


def test_a_rejected_draft_after_which_processors_make_nan_raises_nothing():
    target = never(small_target(), {0, 1})
    drafter = only(small_drafter(target), {0, 1})

    def nan_after_impossible(ids, scores):
        return torch.where(ids[:, -1:] < 2, math.nan, scores)

    assert int(PROMPT[0, -1]) >= 2
    p = generated_p_value(target, drafter, {}, 60, seed=1, logits_processor=[nan_after_impossible])
    assert p > EACH
