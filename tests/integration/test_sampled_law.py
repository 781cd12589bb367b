"""Sampling end to end: what generate() with a drafter draws follows the target's law, in our loop and transformers'.

Each file of law tests shares one level among its tests, and its planted mistakes are caught at the same sample size.
"""

import itertools
from collections import Counter

import pytest
import torch
from sampled_law import (
    CAUGHT,
    LEVEL,
    NUM_NEW,
    PROMPT,
    VOCAB,
    arguments,
    drafted_part,
    exact_law,
    generated_p_value,
    p_value,
    small_drafter,
    small_target,
    staged_rounds,
)
from transformers.generation import GenerationMixin

from dspark_hf import record_speculation
from dspark_hf.decoding import draft as draft_stage
from dspark_hf.decoding import loop
from dspark_hf.decoding.route import _ROUTE_MARK
from dspark_hf.decoding.sampling import law

NUM_DRAWS = 300
CASES = {
    "temperature_1": {},
    "top_k": {"top_k": 2},
    "typical_p": {"typical_p": 0.4},
    "eos": {"eos_token_id": 4, "repetition_penalty": 1.5},
}
REDUCED = (0, 1, 4)
EACH = LEVEL / 20


@pytest.fixture(scope="module")
def target():
    return small_target()


@pytest.fixture(scope="module")
def drafter(target):
    return small_drafter(target, "gated", seed=3)


@pytest.mark.parametrize("case", CASES)
def test_generate_follows_the_target_law(target, drafter, case):
    with record_speculation() as report:
        assert generated_p_value(target, drafter, CASES[case], NUM_DRAWS, seed=1) > EACH
    assert 0 < report.num_accepted < report.num_verified


def test_generate_follows_the_target_law_with_a_reduced_draft_vocabulary_and_a_threshold(target):
    drafter = small_drafter(target, seed=3, ids=REDUCED)
    knobs = {"verification_policy": "threshold", "assistant_confidence_threshold": 0.3}
    with record_speculation() as report:
        assert generated_p_value(target, drafter, CASES["top_k"], NUM_DRAWS, seed=2, **knobs) > EACH
    assert 0 < report.num_accepted < report.num_verified < report.num_drafted


# -- planted mistakes, at the same sample size ----------------------------------------------------------------------


def dropping(unwanted):
    """Verification that stops before a draft because of its value."""
    scheduled = loop._Run._scheduled

    def biased(self, proposal):
        drafts = scheduled(self, proposal)
        kept = itertools.takewhile(lambda token: token not in unwanted, drafts[0].tolist())
        return drafts[:, : len(list(kept))]

    return biased


def test_control_dropping_drafts_by_their_value_is_caught(target, drafter, monkeypatch):
    monkeypatch.setattr(loop._Run, "_scheduled", dropping({0, 2}))
    assert generated_p_value(target, drafter, {}, NUM_DRAWS, seed=1) < CAUGHT


@pytest.mark.parametrize("case", ["top_k", "typical_p"])
def test_control_acceptance_with_the_unprocessed_draft_law_is_caught(target, drafter, monkeypatch, case):
    draw = draft_stage._draw

    def biased(logits, *args):
        unprocessed = law(logits.clone())
        return draw(logits, *args)._replace(probs=unprocessed)

    monkeypatch.setattr(draft_stage, "_draw", biased)
    assert generated_p_value(target, drafter, CASES[case], NUM_DRAWS, seed=1) < CAUGHT


def test_control_plain_sampling_passes_and_another_temperature_fails(target):
    torch.manual_seed(4)
    rows = target.generate(PROMPT.expand(3000, -1), **arguments({}))[:, PROMPT.shape[1] :]
    counts = drafted_part(Counter(map(tuple, rows.tolist())))
    assert p_value(counts, drafted_part(exact_law(target, {}))) > EACH
    assert p_value(counts, drafted_part(exact_law(target, {"temperature": 0.5}))) < CAUGHT


# -- transformers' own loop on our generator ------------------------------------------------------------------------


@pytest.fixture
def stock_loop(monkeypatch):
    ours = GenerationMixin._assisted_decoding
    assert getattr(ours, _ROUTE_MARK) is ours
    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", ours.__wrapped__)


@pytest.mark.parametrize("ids", [None, REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("case", ["temperature_1", "top_k"])
def test_the_stock_loop_follows_the_target_law(stock_loop, target, case, ids):
    drafter = small_drafter(target, "gated", seed=3, ids=ids)
    with record_speculation() as report:
        assert generated_p_value(target, drafter, CASES[case], NUM_DRAWS, seed=5) > EACH
    assert report.num_rounds == 0, "this was to be transformers' loop"


def test_control_a_flattened_draft_law_is_caught_in_the_stock_loop(stock_loop, target, monkeypatch):
    candidates = loop.DSparkCandidateGenerator.get_candidates

    def biased(*args, **kwargs):
        ids, logits = candidates(*args, **kwargs)
        return ids, None if logits is None else logits / 10

    monkeypatch.setattr(loop.DSparkCandidateGenerator, "get_candidates", biased)
    assert generated_p_value(target, small_drafter(target, "rnn", seed=3), {}, NUM_DRAWS, seed=5) < CAUGHT


# -- around it ------------------------------------------------------------------------------------------------------


def test_a_token_that_breaks_the_drafter_does_not_bias_the_law(target):
    drafter = small_drafter(target)
    with torch.no_grad():
        drafter.markov_head.markov_w1.weight[2] = float("nan")
    counts, joint, proposal, acceptance = staged_rounds(target, drafter, {}, 20_000, seed=5)
    assert acceptance.num_accepted[proposal.block.tokens[:, 0] == 2].max() == 1
    assert p_value(counts, joint) > EACH


def test_seeded_sampling_repeats_itself(target, drafter):
    runs = []
    for _ in range(2):
        torch.manual_seed(7)
        runs.append(target.generate(PROMPT, do_sample=True, max_new_tokens=20, assistant_model=drafter))
    assert torch.equal(*runs)


def test_the_exact_law_is_one_and_ends_at_eos(target):
    joint = exact_law(target, {"eos_token_id": 4})
    assert sum(joint.values()) == pytest.approx(1.0)
    assert all(tokens[-1] == 4 or len(tokens) == NUM_NEW for tokens in joint)
    assert sum(drafted_part(joint).values()) == pytest.approx(1.0)
    assert len(exact_law(target, {})) == VOCAB**NUM_NEW
