"""Sequential heads in two ways: slot by slot, as when drafting, and all slots at once, as when training."""

import pytest
import torch
from tiny import tiny_drafter, tiny_target

ROWS, SLOTS, RANK = 3, 5, 8


def head_and_inputs(kind, **overrides):
    drafter = tiny_drafter(tiny_target(), markov_head_type=kind, **overrides)
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 61, (ROWS, SLOTS), generator=g)
    return drafter.markov_head, tokens, torch.randn(ROWS, SLOTS, 32, generator=g)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("draft_vocab_size", [None, 20])
def test_all_slots_at_once_equal_one_after_the_other(kind, draft_vocab_size):
    head, tokens, hidden = head_and_inputs(kind, draft_vocab_size=draft_vocab_size)
    embeddings = head.embed(tokens)
    codes = head.codes(embeddings, hidden)
    assert codes.shape == (ROWS, SLOTS, RANK)
    state = step_state = head.start(ROWS)
    for k in range(SLOTS):
        code, state = head.code(embeddings[:, k], hidden[:, k], state)
        bias, step_state = head.step(embeddings[:, k], hidden[:, k], step_state)
        assert torch.equal(codes[:, k], code)
        assert torch.equal(bias, code @ head.markov_w2.weight.T) and torch.equal(bias, head.markov_w2(code))
        assert bias.shape == (ROWS, draft_vocab_size or 61)
    assert (state is None) == (kind != "rnn")
    assert state is None or torch.equal(state, step_state)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_rows_and_later_slots_do_not_reach_a_code(kind):
    head, tokens, hidden = head_and_inputs(kind)
    before = head.codes(head.embed(tokens), hidden)
    tokens[0, 3], hidden[0, 3] = (tokens[0, 3] + 1) % 61, 5.0
    after = head.codes(head.embed(tokens), hidden)
    assert torch.equal(before[1:], after[1:]) and torch.equal(before[0, :3], after[0, :3])
    assert not torch.allclose(before[0, 3], after[0, 3])
    # Only the recurrent head carries a slot's past on.
    assert torch.allclose(before[0, 4], after[0, 4]) == (kind != "rnn")
