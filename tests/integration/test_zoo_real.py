"""The real target: its weights, its tokenizer, and the way they get into the cache."""

import os
import time
from pathlib import Path

import pytest
import torch

from dspark_hf import prompts, zoo

pytestmark = pytest.mark.real_model

NAME = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def tokenizer():
    return zoo.load_tokenizer(NAME)


@pytest.fixture(scope="module")
def target():
    return zoo.load_target(NAME)


def test_resolving_again_takes_no_time(tokenizer):
    begin = time.perf_counter()
    zoo.resolve(NAME)
    assert time.perf_counter() - begin < 0.1


def test_loaded_as_asked(target):
    assert target.dtype == torch.bfloat16
    assert not target.training
    assert sum(weight.numel() for weight in target.parameters()) == 134_515_008
    assert target.generation_config.eos_token_id == 2


def test_digits_are_single_tokens_also_after_spaces(tokenizer):
    if not (Path(zoo.resolve(NAME)) / "zoo.json").exists():
        pytest.skip("the target comes from the Hub: its tokenizer is not our conversion")
    # Without the digit step the two spaces would be two tokens, [216, 216], instead of one.
    assert tokenizer("a  12").input_ids == [81, 256, 33, 34]


def test_chat_template_and_generation_prompt(tokenizer):
    prompt = prompts.Prompt("x", ({"role": "user", "content": "Hello 42"},))
    ids = prompts.encode_prompt(tokenizer, prompt)
    assert ids.dtype == torch.int64
    text = tokenizer.decode(ids[0])
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nHello 42<|im_end|>\n<|im_start|>assistant\n")


def test_greedy_answer_makes_sense(target, tokenizer):
    [prompt] = [prompt for prompt in prompts.quickstart_prompts() if "JSON" in str(prompt.messages)]
    ids = prompts.encode_prompt(tokenizer, prompt)
    output = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
    answer = tokenizer.decode(output[0, ids.shape[1] :])
    assert '"name": "Ada"' in answer
    assert '"city": "Turin"' in answer


@pytest.mark.full
def test_conversion_in_a_fresh_cache_gives_the_same_weights(target, tmp_path, monkeypatch):
    monkeypatch.setattr(zoo, "_from_hub", no_hub)
    seed = torch.random.get_rng_state()
    folder = Path(zoo.resolve(NAME, cache_dir=tmp_path))
    assert torch.equal(torch.random.get_rng_state(), seed)
    assert os.listdir(folder.parent) == [folder.name]
    fresh = zoo.load_target(str(folder), dtype="auto").state_dict()
    for name, weight in target.state_dict().items():
        assert torch.equal(fresh[name], weight), name


def no_hub(hub_id):
    raise zoo.ZooDownloadError("no Hub in this test")
