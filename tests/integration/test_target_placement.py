"""Offloaded and quantised targets are what they say, and lend embedding and head through their own calls."""

import pytest
import torch
from target_builders import int8_in_place, int8_loaded, offloaded_to_memory, placed, quanto_in_place
from tiny import greedy, random_ids, tiny_drafter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["disk", "memory"])
def test_a_target_without_a_device_lends_embedding_and_head(where, dtype, tmp_path):
    on_disk = ("model.embed_tokens", "lm_head")
    target = placed(tmp_path, *on_disk) if where == "disk" else offloaded_to_memory(tmp_path)
    drafter = tiny_drafter(target).to(dtype)
    assert target.device.type == target.lm_head.weight.device.type == "meta"
    ids = random_ids(9)
    output = greedy(target, ids, max_new_tokens=12, assistant_model=drafter, return_dict_in_generate=True)
    assert output.speculation.num_verified > 0
    assert torch.equal(output.sequences, greedy(target, ids, max_new_tokens=12))


@pytest.mark.parametrize("make", [int8_in_place, int8_loaded, quanto_in_place])
@pytest.mark.parametrize("with_head", [False, True])
def test_int8_targets_hold_int8_weights(make, with_head, tmp_path):
    target = make(tmp_path, with_head=with_head)
    weights = {"layer": target.model.layers[0].mlp.up_proj.weight, "head": target.lm_head.weight}
    is_int8 = {name: _stored(weight).dtype == torch.int8 for name, weight in weights.items()}
    assert is_int8 == {"layer": True, "head": with_head}


def _stored(weight):
    """The tensor inside a torchao or quanto weight."""
    return getattr(weight, "qdata", getattr(weight, "_data", weight))


def test_a_drafter_with_a_reduced_vocabulary_asks_a_quantised_or_offloaded_head(tmp_path):
    ids = random_ids(9)
    for target in (quanto_in_place(tmp_path, with_head=True), placed(tmp_path, "lm_head")):
        drafter = tiny_drafter(target, draft_vocab_size=40)
        drafter.d2t.copy_(torch.linspace(0, 21, 40).long())
        output = greedy(target, ids, max_new_tokens=12, assistant_model=drafter, return_dict_in_generate=True)
        assert output.speculation.num_verified > 0
        assert torch.equal(output.sequences, greedy(target, ids, max_new_tokens=12))
