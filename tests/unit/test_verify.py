"""The target's arguments and logits of a round, without a model where none is needed."""

from types import SimpleNamespace

import pytest
import torch
from tiny import random_ids, tiny_target
from transformers import DynamicCache, GenerationConfig

from dspark_hf import UnsupportedGenerationError
from dspark_hf.decoding.prompt_inputs import refuse_chunk_size, refuse_inputs, start_from_empty_cache
from dspark_hf.decoding.verify import TargetRunner, _lengthened, last_logits

CPU = torch.device("cpu")


def kwargs_of_a_text():
    return {
        "attention_mask": torch.tensor([[0, 1, 1]]),
        "position_ids": torch.tensor([[0, 0, 1]]),
        "token_type_ids": torch.tensor([[0, 0, 1]]),
        "mm_token_type_ids": torch.tensor([[0, 1, 1]]),
        "use_cache": True,
    }


def test_drafts_lengthen_what_is_given_per_token():
    got = _lengthened(kwargs_of_a_text(), 2)
    assert got["attention_mask"].tolist() == [[0, 1, 1, 1, 1]]
    assert got["position_ids"].tolist() == [[0, 0, 1, 2, 3]]
    assert got["token_type_ids"].tolist() == [[0, 0, 1, 1, 1]], "the type of the text before"
    assert got["mm_token_type_ids"].tolist() == [[0, 1, 1, 0, 0]], "drafts are text"
    assert got["use_cache"]


def test_positions_of_three_axes_are_lengthened_along_each():
    positions = torch.tensor([[[4, 5]], [[4, 6]], [[4, 7]]])
    got = _lengthened({"position_ids": positions}, 1)["position_ids"]
    assert got[:, 0].tolist() == [[4, 5, 6], [4, 6, 7], [4, 7, 8]]


def test_the_callers_arguments_stay_as_they_are():
    kwargs = kwargs_of_a_text()
    _lengthened(kwargs, 3)
    assert all(torch.equal(kwargs[k], v) for k, v in kwargs_of_a_text().items() if k != "use_cache")


def test_last_logits_are_those_at_the_end_in_float32():
    logits = torch.arange(12, dtype=torch.bfloat16).view(1, 4, 3)
    got = last_logits(SimpleNamespace(logits=logits), 2, CPU)
    assert got.dtype == torch.float32
    assert torch.equal(got, logits[:, 2:].float())


# -- a runner on a tiny target ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_layers=2)


def runner_of(target, *, cache=None, chunk_size=None, **kwargs):
    config = GenerationConfig(prefill_chunk_size=chunk_size)
    cache = DynamicCache(config=target.config) if cache is None else cache
    return TargetRunner(target, {"cache": cache, "use_cache": True} | kwargs, config, {})


@torch.no_grad()
def test_rounds_see_what_one_forward_over_the_text_sees(target):
    prompt, text = random_ids(5), random_ids(12, seed=3)
    runner = runner_of(target, attention_mask=torch.ones_like(prompt))
    prefill = runner.prefill(prompt, lambda outputs: None)
    runner.commit(prefill, 1, 0)
    ids = torch.cat([prompt, text[:, :1]], dim=1)
    for num_drafts, num_kept in ((3, 2), (2, 3), (0, 1), (3, 1)):
        drafts = text[:, ids.shape[1] - 5 :][:, :num_drafts]
        outputs = runner.verify(ids, drafts)
        whole = target(torch.cat([ids, drafts], dim=1)).logits[:, -num_drafts - 1 :]
        assert outputs.logits.shape == whole.shape
        assert torch.allclose(outputs.logits, whole, atol=1e-4)
        runner.commit(outputs, num_kept, num_drafts + 1 - num_kept)
        ids = torch.cat([prompt, text[:, : ids.shape[1] - 5 + num_kept]], dim=1)
        assert runner.cache.get_seq_length() == ids.shape[1] - 1
        assert runner._kwargs["attention_mask"].shape == ids.shape


@pytest.mark.parametrize("chunk_size", [1, 3, 6])
@torch.no_grad()
def test_chunks_of_a_padded_prompt_see_what_the_whole_prompt_sees(target, chunk_size):
    ids = random_ids(7)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1]])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    whole = target(ids, attention_mask=mask, position_ids=positions).logits[:, -1]
    got = runner_of(target, chunk_size=chunk_size, attention_mask=mask, position_ids=positions).prefill(
        ids, lambda outputs: None
    )
    assert torch.allclose(got.logits[:, -1], whole, atol=1e-4)


@pytest.mark.parametrize("failing_layer", [0, 1])
@torch.no_grad()
def test_after_a_failed_forward_the_cache_holds_what_was_committed(target, failing_layer):
    prompt, drafts = random_ids(5), random_ids(1, seed=4)
    runner = runner_of(target)
    runner.commit(runner.prefill(prompt, lambda outputs: None), 1, 0)
    ids = torch.cat([prompt, random_ids(1, seed=2)], dim=1)
    runner.commit(runner.verify(ids, drafts), 2, 0)
    ids = torch.cat([ids, drafts, random_ids(1, seed=5)], dim=1)

    def fail(*args):
        raise RuntimeError("planted")

    handle = target.model.layers[failing_layer].mlp.register_forward_pre_hook(fail)
    try:
        # one position only: the anchor, which is committed but not yet in the cache
        with pytest.raises(RuntimeError, match="planted"), runner.guarding_cache():
            runner.verify(ids, ids[:, :0])
    finally:
        handle.remove()
    assert [layer.get_seq_length() for layer in runner.cache.layers] == [7, 7]


def test_chunk_sizes_below_1_are_refused():
    for chunk_size in (0, -1):
        with pytest.raises(UnsupportedGenerationError, match=f"must be >= 1, got {chunk_size}"):
            refuse_chunk_size(GenerationConfig(prefill_chunk_size=chunk_size))
    for chunk_size in (None, 1):
        refuse_chunk_size(GenerationConfig(prefill_chunk_size=chunk_size))


def test_what_cannot_be_cut_is_refused_only_where_it_would_be_cut(target):
    uncuttable = {"pixel_values": torch.zeros(1, 3)}
    runner_of(target, chunk_size=5, **uncuttable).refuse_prompt(random_ids(5))
    runner_of(target, chunk_size=4, pixel_values=None).refuse_prompt(random_ids(5))
    with pytest.raises(UnsupportedGenerationError, match=r"cannot cut the inputs \['pixel_values'\]"):
        runner_of(target, chunk_size=4, **uncuttable).refuse_prompt(random_ids(5))


def test_a_cache_that_cannot_be_rolled_back_is_refused_before_any_forward(target):
    cache = SimpleNamespace(is_croppable=False, is_compileable=False, is_linear=[False], layers=[])
    with pytest.raises(UnsupportedGenerationError, match="cannot be rolled back"):
        runner_of(target, cache=cache).refuse_prompt(random_ids(5))


# -- what a call starts from ----------------------------------------------------------------------------------------


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(UnsupportedGenerationError, match="needs the prompt as input_ids"):
        refuse_inputs(torch.empty(1, 0, dtype=torch.long), {"cache": DynamicCache()})


@torch.no_grad()
def test_a_used_cache_is_emptied_for_a_longer_text_and_left_alone_otherwise(target):
    cache = DynamicCache(config=target.config)
    target(random_ids(4), cache=cache)
    refused = [
        (random_ids(4), None),  # no longer than what the cache holds
        (random_ids(9), torch.ones(1, 13)),  # nine tokens behind the four: more, but not the whole text
        (random_ids(9)[:, :3], torch.ones(1, 7)),
    ]
    for ids, mask in refused:
        with pytest.raises(UnsupportedGenerationError, match="not a longer text"):
            start_from_empty_cache(target, ids, {"cache": cache, "attention_mask": mask}, GenerationConfig())
        assert cache.get_seq_length() == 4
    start_from_empty_cache(target, random_ids(5), {"cache": cache}, GenerationConfig())
    assert cache.get_seq_length() == 0
