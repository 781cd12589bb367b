"""Sampled batches: each row follows the target's law, and rows are independent of each other.

One call of generate() with `num_return_sequences` draws thousands of texts of one prompt.
"""

import numpy as np
import pytest
import torch
from sampled_law import (
    CAUGHT,
    HEADS,
    LEVEL,
    NUM_DRAWS,
    OPTIONS,
    VOCAB,
    draws,
    law_p_value,
    small_drafter,
    small_target,
)
from scipy.stats import chi2_contingency

from dspark_hf import record_speculation
from dspark_hf.decoding import accept as accept_module
from dspark_hf.decoding import batch as batch_module
from dspark_hf.decoding import draft as draft_module
from dspark_hf.decoding import target_refusals

QUICK = ["temperature_1", "top_k", "repetition_penalty", "min_new_tokens", "temperature+top_k+top_p"]
NUM_TESTS = len(OPTIONS) * len(HEADS) + 20  # that share one level


@pytest.fixture(scope="module")
def target():
    return small_target()


def drafter_of(target, head, reduced):
    return small_drafter(target, head, ids=[0, 2, 3] if reduced else None)


@pytest.mark.parametrize("policy", ["full", "threshold"])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("name", QUICK)
def test_rows_follow_the_target_law(target, name, reduced, policy):
    head = "vanilla" if policy == "threshold" else list(HEADS)[QUICK.index(name) % len(HEADS)]
    knobs = {"verification_policy": policy, "assistant_confidence_threshold": 0.35}
    value = law_p_value(target, drafter_of(target, head, reduced), OPTIONS[name], 1, **knobs)
    assert value > LEVEL / NUM_TESTS


@pytest.mark.full
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", OPTIONS)
def test_rows_follow_the_target_law_under_every_processor(target, name, head, reduced):
    assert law_p_value(target, drafter_of(target, head, reduced), OPTIONS[name], 2) > LEVEL / NUM_TESTS


@pytest.mark.parametrize("policy", ["full", "threshold"])
def test_rows_of_a_stream_follow_the_target_law_and_are_independent(target, policy):
    knobs = {"verification_layout": "flat", "verification_policy": policy, "assistant_confidence_threshold": 0.35}
    drafter = drafter_of(target, "vanilla", False)
    assert law_p_value(target, drafter, OPTIONS["top_k"], 7, **knobs) > LEVEL / NUM_TESTS
    assert independence_p_value(draws(target, drafter, {}, 8, **knobs)) > LEVEL / NUM_TESTS


def test_rows_that_leave_early_do_not_bias_the_others(target, monkeypatch):
    monkeypatch.setattr(batch_module, "COMPACT_SHARE", 0.01)
    options = {"eos_token_id": 2}
    assert law_p_value(target, drafter_of(target, "vanilla", False), options, 3) > LEVEL / NUM_TESTS


def independence_p_value(tokens):
    """Chi-square of the table of neighbouring rows' first drafted tokens, in slot 1."""
    first = tokens[:, 1]
    table = np.zeros((VOCAB, VOCAB))
    np.add.at(table, (first[0::2].numpy(), first[1::2].numpy()), 1)
    return float(chi2_contingency(table).pvalue)


def test_rows_are_independent(target):
    drawn = draws(target, drafter_of(target, "vanilla", False), {}, 4)
    assert independence_p_value(drawn) > LEVEL / NUM_TESTS


@pytest.mark.parametrize("where", ["draft", "accept"])
def test_control_shared_draws_are_caught(target, monkeypatch, where):
    """The same uniforms for neighbouring rows: each row's law is right, and together they are not."""
    monkeypatch.setattr(batch_module, "COMPACT_SHARE", 2.0)  # so that neighbours stay neighbours
    module = draft_module if where == "draft" else accept_module
    right = module.draw_uniforms

    def shared(*shape, device):
        drawn = right(*shape, device=device)
        dim = shape.index(NUM_DRAWS)
        pairs = torch.arange(NUM_DRAWS) // 2 * 2
        return drawn.index_select(dim, pairs)

    monkeypatch.setattr(module, "draw_uniforms", shared)
    drawn = draws(target, drafter_of(target, "vanilla", False), {}, 5)
    assert independence_p_value(drawn) < CAUGHT


def test_control_dropping_drafts_by_their_value_is_caught(target, monkeypatch):
    right = batch_module.BatchRun._scheduled

    def biased(self, proposal, *room):
        lengths, *shown = right(self, proposal, *room)
        if proposal is not None:
            lengths = torch.where(proposal.block.tokens[:, 0] == 1, 0, lengths)
        return lengths, *shown

    monkeypatch.setattr(batch_module.BatchRun, "_scheduled", biased)
    assert law_p_value(target, drafter_of(target, "vanilla", False), {}, 6) < CAUGHT


@pytest.mark.parametrize("policy", ["full", "threshold"])
@pytest.mark.parametrize("ids", [None, [0, 2, 3]], ids=["whole", "reduced"])
@pytest.mark.parametrize("head", ["vanilla", "rnn"])
@pytest.mark.parametrize("vocab_size", [VOCAB - 1, VOCAB + 1])
def test_a_vocabulary_resized_since_the_drafter_was_made(target, monkeypatch, vocab_size, head, ids, policy):
    """Anchors that the drafter does not know, and drafts that the target does not have."""
    monkeypatch.setattr(target_refusals, "MAX_VOCABULARY_CHANGE", 1)  # five tokens, of which one comes or goes
    ids = None if ids is None else [*ids, *range(VOCAB, vocab_size)]
    drafter = small_drafter(target, head, ids=ids, vocab_size=vocab_size, mask_token_id=0)
    knobs = {"verification_policy": policy, "assistant_confidence_threshold": 0.3}
    with record_speculation() as report:
        value = law_p_value(target, drafter, OPTIONS["repetition_penalty"], 7, **knobs)
    assert value > LEVEL / NUM_TESTS
    assert report.num_accepted > 0
