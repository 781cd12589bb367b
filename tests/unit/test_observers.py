"""What observers of rounds are told, and who is told of plain rounds."""

import pytest
import torch
from tiny import random_ids, tiny_drafter, tiny_target

from dspark_hf.decoding.observers import observe_rounds


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.mark.parametrize("rows", [1, 3])
def test_drafts_are_told_with_what_became_of_them(target, rows):
    ids = random_ids(6).repeat(rows, 1)
    seen = []
    with observe_rounds(seen.append, with_plain=True):
        out = target.generate(ids, assistant_model=tiny_drafter(target), do_sample=False, max_new_tokens=12)
    texts = {row: ids[row].tolist() + [int(out[row, 6])] for row in range(rows)}
    for ended in seen:
        drafts = ended.draft_tokens
        assert drafts is None or drafts.shape == ended.confidence_logits.shape
        for place, row in enumerate(ended.rows):
            accepted = [] if drafts is None else drafts[place, : ended.num_accepted[place]].tolist()
            end = len(texts[row]) + len(accepted)
            assert out[row, len(texts[row]) : end].tolist() == accepted[: 18 - len(texts[row])]
            texts[row] = out[row, : end + 1].tolist()
    assert all(text == out[row].tolist() for row, text in texts.items())


@pytest.mark.parametrize("rows", [1, 2])
def test_plain_rounds_are_told_to_who_asks_for_them(target, rows):
    # With two new tokens there is no room for a draft: the only round is a plain one.
    all_rounds, drafted = [], []
    with observe_rounds(all_rounds.append, with_plain=True), observe_rounds(drafted.append):
        target.generate(
            random_ids(6).repeat(rows, 1), assistant_model=tiny_drafter(target), do_sample=False, max_new_tokens=2
        )
    assert drafted == [] and len(all_rounds) == 1
    ended = all_rounds[0]
    assert ended.rows == tuple(range(rows)) and ended.num_verified == ended.num_accepted == (0,) * rows
    assert (ended.draft_tokens, ended.survival, ended.confidence_logits) == (None, None, None)


def test_what_an_observer_raises_ends_the_call_and_leaves_the_pair_usable(target):
    drafter = tiny_drafter(target)

    def stop(ended):
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"), observe_rounds(stop):
        target.generate(random_ids(6), assistant_model=drafter, do_sample=False, max_new_tokens=12)
    expected = target.generate(random_ids(6), do_sample=False, max_new_tokens=12)
    assert torch.equal(
        target.generate(random_ids(6), assistant_model=drafter, do_sample=False, max_new_tokens=12), expected
    )
