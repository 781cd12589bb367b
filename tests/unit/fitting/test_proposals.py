"""Recorded rounds as tensors: labels, masks, splits by prompt."""

import pytest
import torch

from dspark_hf import CalibrationError, Proposals
from dspark_hf.decoding.observers import EndedRounds
from dspark_hf.fitting.proposals import proposals_of


def test_labels_are_accepted_prefixes_and_masks_verified_slots():
    proposals = Proposals.of(torch.zeros(3, 3), [3, 2, 0], [2, 2, 0], [7, 7, 9])
    assert proposals.is_accepted.tolist() == [[True, True, False], [True, True, False], [False] * 3]
    assert proposals.is_verified.tolist() == [[True] * 3, [True, True, False], [False] * 3]
    assert (len(proposals), proposals.num_slots, proposals.num_prompts) == (3, 3, 2)


def test_rounds_of_one_row_of_one_generation_are_one_prompt():
    def ended(generation, rows, slots):
        n = len(rows)
        return EndedRounds(None, generation, rows, torch.ones(n, slots), None, (slots,) * n, (1,) * n, False)

    proposals = proposals_of([ended(0, (0, 1), 3), ended(0, (1,), 2), ended(4, (0,), 3)])
    assert proposals.prompt.tolist() == [0, 1, 1, 2]
    assert proposals.is_verified.sum(1).tolist() == [3, 3, 2, 3]  # the short round drafted two slots
    assert proposals.logits[2].tolist() == [1.0, 1.0, 0.0]


def test_a_drafter_without_confidences_is_said():
    with pytest.raises(CalibrationError, match="1 rounds were recorded, 0 of them with confidences"):
        proposals_of([EndedRounds(None, 0, (0,), None, None, (2,), (1,), False)])


def test_a_split_shares_no_prompt_and_loses_no_round():
    proposals = Proposals.of(torch.zeros(100, 1), [1] * 100, [0] * 100, [i // 10 for i in range(100)])
    parts = proposals.split(0.3, seed=0)
    found = [set(part.prompt.tolist()) for part in parts]
    assert [len(p) for p in found] == [7, 3] and not found[0] & found[1]
    assert sum(map(len, parts)) == 100
    assert set(proposals.split(0.3, seed=1)[1].prompt.tolist()) != found[1]


def test_a_single_prompt_cannot_be_split():
    proposals = Proposals.of(torch.zeros(5, 1), [1] * 5, [0] * 5, [3] * 5)
    with pytest.raises(CalibrationError, match="2 prompts or more, got 1"):
        proposals.split(0.5, seed=0)
    with pytest.raises(CalibrationError, match="held_out_fraction must lie inside 0 to 1, got 1.0"):
        proposals.split(1.0, seed=0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"is_accepted": torch.tensor([[False, True]])}, "never rise"),
        ({"is_accepted": torch.tensor([[1, 0]])}, "bool is_accepted"),
        ({"logits": torch.tensor([[float("nan"), 0.0]])}, "must be finite"),
        ({"logits": torch.zeros(1, 3)}, "same shape"),
        ({"prompt": torch.zeros(2, dtype=torch.long)}, "one number per round"),
    ],
)
def test_malformed_proposals_are_refused(changed, message):
    yes = torch.ones(1, 2, dtype=torch.bool)
    whole = {"logits": torch.zeros(1, 2), "is_accepted": yes, "is_verified": yes, "prompt": torch.zeros(1).long()}
    Proposals(**whole)
    with pytest.raises(CalibrationError, match=message):
        Proposals(**whole | changed)
