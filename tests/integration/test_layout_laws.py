"""Sampled output keeps the target's law where blocks are filled in behind the anchor and draft layers slide."""

import pytest
from sampled_law import CAUGHT, law_p_value, p_value, small_drafter, small_target, staged_p_value, staged_rounds

from dspark_hf.decoding import candidate_generator

SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": 2, "num_hidden_layers": 1}
LAYOUTS = {
    "fill_in": {"draft_layout": "fill_in"},
    "fill_in_rnn": {"draft_layout": "fill_in", "markov_head_type": "rnn"},
    "sliding": SLIDING | {"causal_layers": "sliding", "window_start": "anchor"},
    "fill_in_sliding": SLIDING | {"draft_layout": "fill_in"},
}
OPTIONS = [{}, {"temperature": 1.7, "top_k": 4}]
NUM_ROWS = 3000
EACH = 0.001 / (2 * len(LAYOUTS) * len(OPTIONS))


@pytest.fixture(scope="module")
def target():
    return small_target()


@pytest.mark.parametrize("name", LAYOUTS)
def test_rounds_and_batches_follow_the_target_law(target, name):
    drafter = small_drafter(target, "vanilla", seed=3, **LAYOUTS[name])
    for options in OPTIONS:
        counts, joint, proposal, acceptance = staged_rounds(target, drafter, options, NUM_ROWS, seed=1)
        assert 0 < int(acceptance.num_accepted.sum()) < int(proposal.lengths.sum())
        assert p_value(counts, joint) > EACH
        assert law_p_value(target, drafter, options, seed=1) > EACH


@pytest.mark.parametrize("name", ["fill_in", "fill_in_sliding"])
def test_control_the_law_of_another_slot_is_caught(target, monkeypatch, name):
    drafter = small_drafter(target, "vanilla", seed=3, **LAYOUTS[name])
    original = candidate_generator.draft_block

    def shifted(*args, **kwargs):
        block = original(*args, **kwargs)
        return type(block)(**vars(block) | {"draft_probs": block.draft_probs.roll(1, dims=1)})

    monkeypatch.setattr(candidate_generator, "draft_block", shifted)
    assert staged_p_value(target, drafter, {}, 10 * NUM_ROWS, seed=1) < CAUGHT
