"""Drafters belong to no target and to no generation: copies, several targets, several drafters, saved and loaded."""

import copy
import pickle

import pytest
import torch
from tiny import OracleDrafter, greedy, random_ids, tiny_drafter, tiny_target

from dspark_hf import DSparkDraftModel

IDS = random_ids(9)


def run(target, drafter, ids=IDS):
    return greedy(target, ids, max_new_tokens=16, assistant_model=drafter, return_dict_in_generate=True)


def copied(drafter, folder):
    return copy.deepcopy(drafter)


def pickled(drafter, folder):
    return pickle.loads(pickle.dumps(drafter))


def saved(drafter, folder):
    drafter.save_pretrained(folder)
    return DSparkDraftModel.from_pretrained(folder)


@pytest.mark.parametrize("again", [copied, pickled, saved])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_another_of_the_same_drafter_drafts_the_same(again, head, tmp_path):
    target = tiny_target()
    drafter = tiny_drafter(target, markov_head_type=head)
    first = run(target, drafter)
    other = again(drafter, tmp_path)
    second = run(target, other)
    assert torch.equal(first.sequences, greedy(target, IDS, max_new_tokens=16))
    assert torch.equal(second.sequences, first.sequences)
    counts = [(r.num_rounds, r.accepted_per_slot) for r in (first.speculation, second.speculation)]
    assert counts[0] == counts[1]
    # not one tensor is shared with the target or between the two
    owned = [{p.data_ptr() for p in module.parameters()} for module in (target, drafter, other)]
    assert not owned[0] & owned[1]
    assert not owned[1] & owned[2]


def test_one_drafter_with_two_targets_in_turn():
    targets = [tiny_target(), tiny_target(seed=5), tiny_target("llama", seed=6), tiny_target().to(torch.float64)]
    drafter = tiny_drafter(targets[0])
    plain = [greedy(target, IDS, max_new_tokens=16) for target in targets]
    assert len({tuple(ids[0].tolist()) for ids in plain}) == 3
    for _ in range(2):
        for target, expected in zip(targets, plain, strict=True):
            output = run(target, drafter)
            assert torch.equal(output.sequences, expected)
            assert output.speculation.num_verified > 0


def test_one_drafter_with_two_targets_at_once():
    """One generation starts inside another, from its stopping criterion."""
    outer, inner = tiny_target(), tiny_target(seed=5)
    drafter = tiny_drafter(outer)
    expected = [greedy(target, IDS, max_new_tokens=16) for target in (outer, inner)]
    inner_outputs = []

    def start_another(input_ids, scores, **kwargs):
        inner_outputs.append(run(inner, drafter).sequences)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    output = greedy(outer, IDS, max_new_tokens=6, assistant_model=drafter, stopping_criteria=[start_another])
    assert torch.equal(output, expected[0][:, :15])
    assert len(inner_outputs) == 6
    assert all(torch.equal(ids, expected[1]) for ids in inner_outputs)


def test_two_drafters_with_one_target_in_turn():
    target = tiny_target()
    plain = greedy(target, IDS, max_new_tokens=16)
    drafters = [
        tiny_drafter(target),
        OracleDrafter.for_target(target, plain[0], hit_rate=0.9),
        tiny_drafter(target, seed=7, block_size=2, num_hidden_layers=1, target_layer_ids=[0, 2]),
    ]
    rounds = []
    for _ in range(2):
        for drafter in drafters:
            output = run(target, drafter)
            assert torch.equal(output.sequences, plain)
            rounds.append(output.speculation.num_rounds)
    assert rounds[:3] == rounds[3:]
    assert rounds[1] < min(rounds[0], rounds[2])
