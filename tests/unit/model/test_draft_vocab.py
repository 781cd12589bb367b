"""A reduced draft vocabulary: offsets, the head's rows, and what a checkpoint must hold."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_drafter, tiny_target
from torch import nn

from dspark_hf import CheckpointFormatError, DSparkConfigError, DSparkDraftModel
from dspark_hf.model.draft_vocab import DraftVocabHead, check_offsets, draft_index, offsets_of, token_ids_of

IDS = torch.tensor([0, 2, 3, 7, 10, 60])


def reduced_drafter(ids=IDS, **overrides):
    drafter = tiny_drafter(tiny_target(), draft_vocab_size=len(ids), **overrides)
    drafter.d2t.copy_(offsets_of(ids))
    return drafter


def test_offsets_and_ids_are_two_ways_to_write_the_same():
    assert offsets_of(IDS).tolist() == [0, 1, 1, 4, 6, 55]
    assert torch.equal(token_ids_of(offsets_of(IDS)), IDS)
    check_offsets(offsets_of(IDS), 61)
    check_offsets(torch.zeros(5, dtype=torch.long), 5)


def test_index_names_every_token():
    index = draft_index(IDS, 61)
    assert index[IDS].tolist() == list(range(6))
    assert (index >= 0).sum() == 6 and index.shape == (61,)


@pytest.mark.parametrize("ids", [[0, 2, 2, 5], [0, 5, 3, 7], [-1, 2, 3, 4], [0, 2, 3, 61], [0, 2**40, 3, 4]], ids=str)
def test_ids_that_are_twice_the_same_or_out_of_range_are_refused(ids):
    with pytest.raises(CheckpointFormatError, match="d2t"):
        check_offsets(offsets_of(torch.tensor(ids)), 61)


# -- the head -------------------------------------------------------------------------------------------------------


class WrappedLinear(nn.Linear):
    """A head that is more than a product."""

    def forward(self, hidden):
        return super().forward(hidden).tanh() + 1


def count_calls(head):
    calls = []
    head.register_forward_hook(lambda module, inputs, output: calls.append(output.shape))
    return calls


def with_hook(head):
    head.register_forward_hook(lambda module, inputs, output: output * 2)


def with_pre_hook(head):
    head.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))


def with_forward(head):
    forward = head.forward
    head.forward = lambda hidden: forward(hidden) - 3  # as accelerate's hooks do


KINDS = {"hook": with_hook, "pre_hook": with_pre_hook, "forward": with_forward, "plain": lambda head: None}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cls", [nn.Linear, WrappedLinear])
@torch.no_grad()
def test_rows_equal_the_whole_heads_output(cls, kind, bias):
    torch.manual_seed(0)
    head = cls(32, 61, bias=bias)
    KINDS[kind](head)
    reduced = DraftVocabHead(head, IDS)
    for shape in ((1, 4), (3, 7), (5,)):
        hidden = torch.randn(*shape, 32)
        torch.testing.assert_close(reduced(hidden), head(hidden).index_select(-1, IDS), atol=1e-6, rtol=0)


@torch.no_grad()
def test_of_a_plain_head_only_the_rows_are_multiplied():
    head = nn.Linear(32, 61)
    reduced = DraftVocabHead(head, IDS)
    calls = count_calls(head)
    reduced(torch.randn(1, 4, 32))
    assert calls == []
    hooked = DraftVocabHead(head, IDS)
    hooked(torch.randn(1, 4, 32))
    assert calls == [(1, 4, 61)]


@pytest.mark.parametrize("options", [{}, {"final_logit_softcapping": 2.0, "logit_multiplier": 0.5}], ids=str)
@torch.no_grad()
def test_base_logits_are_entries_of_the_whole_ones(options):
    target = tiny_target()
    whole, reduced = tiny_drafter(target), reduced_drafter()
    for drafter in (whole, reduced):
        for name, value in options.items():
            setattr(drafter.config, name, value)
    hidden = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(0))
    expected = whole.base_logits(hidden, whole.borrow_head(target.lm_head, 61))[..., IDS]
    got = reduced.base_logits(hidden, reduced.borrow_head(target.lm_head, 61))
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)
    assert whole.borrow_head(target.lm_head, 61) is target.lm_head


# -- configuration and checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1, 61, 100])
def test_sizes_that_reduce_nothing_are_refused(size):
    with pytest.raises(DSparkConfigError, match="draft_vocab_size"):
        tiny_drafter(tiny_target(), draft_vocab_size=size)


def test_a_new_reduced_drafter_drafts_the_lowest_ids():
    drafter = tiny_drafter(tiny_target(), draft_vocab_size=6)
    assert drafter.draft_token_ids.tolist() == list(range(6))
    assert drafter.markov_head.markov_w2.weight.shape == (6, 8)
    assert drafter.markov_head.markov_w1.weight.shape == (61, 8)
    assert tiny_drafter(tiny_target()).draft_token_ids is None
    assert "d2t" not in tiny_drafter(tiny_target()).state_dict()


def test_save_and_load_keep_the_tokens(tmp_path):
    drafter = reduced_drafter(markov_head_type="rnn")
    drafter.save_pretrained(tmp_path)
    half = DSparkDraftModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(half.draft_token_ids, IDS) and half.d2t.dtype == torch.int64
    again = DSparkDraftModel.from_pretrained(tmp_path)
    assert torch.equal(again.draft_token_ids, IDS)
    assert again.config.draft_vocab_size == 6
    assert again.state_dict().keys() == drafter.state_dict().keys()
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in drafter.state_dict().items())


def test_half_precision_keeps_the_tokens_exact():
    ids = torch.tensor([0, 1, 259, 513])  # 257, 258 and 510 are no bfloat16 numbers
    drafter = tiny_drafter(tiny_target(vocab_size=600), draft_vocab_size=4)
    drafter.d2t.copy_(offsets_of(ids))
    assert torch.equal(drafter.to(torch.bfloat16).draft_token_ids, ids)


def damaged_checkpoint(folder, change):
    reduced_drafter().save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def without(weights):
    del weights["d2t"]


def shorter(weights):
    weights["d2t"] = weights["d2t"][:-1].clone()


def twice(weights):
    weights["d2t"][3] = weights["d2t"][2] - 1


def too_high(weights):
    weights["d2t"][-1] += 1


def negative(weights):
    weights["d2t"][0] = -1


@pytest.mark.parametrize("change", [without, shorter, twice, too_high, negative], ids=lambda f: f.__name__)
def test_a_checkpoint_without_its_tokens_is_refused(tmp_path, change):
    with pytest.raises(CheckpointFormatError, match="d2t"):
        DSparkDraftModel.from_pretrained(damaged_checkpoint(tmp_path, change))


def test_a_reduced_checkpoint_under_a_config_without_the_field_is_refused(tmp_path):
    reduced_drafter().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["draft_vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointFormatError, match="markov_w2"):
        DSparkDraftModel.from_pretrained(tmp_path)


def test_a_rank_0_checkpoint_under_a_config_without_the_field_is_refused(tmp_path):
    """No weight has another shape then; only d2t shows that it was trained for some tokens."""
    reduced_drafter(markov_rank=0, confidence_head_with_markov=False).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["draft_vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointFormatError, match="d2t"):
        DSparkDraftModel.from_pretrained(tmp_path)
