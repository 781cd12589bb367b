"""Multimodal wrappers: their text config makes the drafter, images come with the prompt, cached ones are refused."""

import pytest
import torch
from target_builders import gemma3, llava, llava_image, qwen_vl, qwen_vl_image, smol_vlm, smol_vlm_image
from tiny import greedy, random_ids, tiny_drafter
from transformers import DynamicCache

from dspark_hf import DSparkConfig, UnsupportedGenerationError

WITH_IMAGES = pytest.mark.parametrize(
    ("make", "prompt"), [(llava, llava_image), (qwen_vl, qwen_vl_image), (smol_vlm, smol_vlm_image)]
)


@pytest.mark.parametrize("make", [gemma3, llava, qwen_vl, smol_vlm])
def test_a_drafter_is_sized_by_the_text_config(make, tmp_path):
    config = make(tmp_path).config
    text = config.get_text_config()
    drafter_config = DSparkConfig.from_target(config)
    assert drafter_config.to_dict() == DSparkConfig.from_target(text).to_dict()
    assert (drafter_config.hidden_size, drafter_config.num_target_layers) == (text.hidden_size, text.num_hidden_layers)
    assert set(drafter_config.rope_parameters) == {"rope_type", "rope_theta"}  # no M-RoPE sections


@WITH_IMAGES
def test_the_image_decides_the_text_also_with_a_drafter(make, prompt, tmp_path):
    target = make(tmp_path)
    drafter = tiny_drafter(target)
    first, second = prompt(), prompt()
    second["pixel_values"] = -3 * second["pixel_values"]
    plain = [target.generate(**inputs, do_sample=False, max_new_tokens=12) for inputs in (first, second)]
    assert not torch.equal(*plain)
    for inputs, expected in zip((first, second), plain, strict=True):
        output = target.generate(**inputs, do_sample=False, max_new_tokens=12, assistant_model=drafter)
        assert torch.equal(output, expected)


@WITH_IMAGES
def test_a_cache_that_holds_an_image_is_refused_and_kept(make, prompt, tmp_path):
    target = make(tmp_path)
    inputs = prompt()
    whole = target.generate(**inputs, do_sample=False, max_new_tokens=12)
    cache = DynamicCache(config=target.config.get_text_config())
    text = target.generate(**inputs, do_sample=False, max_new_tokens=6, cache=cache)
    held = cache.get_seq_length()
    with pytest.raises(UnsupportedGenerationError, match="tokens of images"):
        greedy(target, text, max_new_tokens=6, cache=cache, assistant_model=tiny_drafter(target))
    assert cache.get_seq_length() == held
    assert torch.equal(greedy(target, text, max_new_tokens=6, cache=cache), whole)


@pytest.mark.parametrize("make", [gemma3, llava, qwen_vl])
def test_text_only_conversations_of_a_wrapper_keep_their_cache(make, tmp_path):
    target = make(tmp_path)
    drafter, ids = tiny_drafter(target), random_ids(9, vocab_size=56)
    whole = greedy(target, ids, max_new_tokens=12)
    cache = DynamicCache(config=target.config.get_text_config())
    first = greedy(target, ids, max_new_tokens=6, cache=cache, assistant_model=drafter)
    assert torch.equal(greedy(target, first, max_new_tokens=6, cache=cache, assistant_model=drafter), whole)


@pytest.mark.parametrize("make", [gemma3, llava, qwen_vl])
def test_left_padding_of_a_wrapper(make, tmp_path):
    target = make(tmp_path)
    ids = torch.cat([torch.zeros(1, 3, dtype=torch.long), random_ids(9, vocab_size=56)], dim=1)
    options = {"attention_mask": (ids != 0).long(), "max_new_tokens": 12}
    plain = greedy(target, ids, **options)
    assert torch.equal(greedy(target, ids, **options, assistant_model=tiny_drafter(target)), plain)
