"""`pipeline("text-generation", assistant_model=drafter)` says what it says without the drafter."""

import pytest
from tiny import tiny_drafter, tiny_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TextStreamer, pipeline

from dspark_hf import record_speculation

CHAT = [{"role": "system", "content": "w3"}, {"role": "user", "content": "w1 w5 w9"}]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    special = ["<pad>", "<eos>", "<system>", "<user>", "<assistant>"]
    words = special + [f"w{i}" for i in range(61 - len(special))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", chat_template=TEMPLATE
    )


@pytest.fixture(params=["no special ids", "special ids"])
def pipelines(request, tokenizer):
    """The same target without and with a drafter."""
    target = tiny_target()
    if request.param == "special ids":  # a pipeline compares them with the drafter's
        for config in (target.config, target.generation_config):
            config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    drafter = tiny_drafter(target)
    return [
        pipeline("text-generation", model=target, tokenizer=tokenizer, **extra)
        for extra in ({}, {"assistant_model": drafter})
    ]


@pytest.mark.parametrize(
    ("prompt", "num_calls"), [(CHAT, 1), ([CHAT, CHAT[1:]], 2), ("w1 w2 w3", 1), (["w1 w2 w3", "w7 w9"], 2)]
)
@pytest.mark.parametrize("options", [{}, {"return_full_text": False}, {"batch_size": 1, "return_tensors": True}])
def test_a_pipeline_with_a_drafter(pipelines, prompt, num_calls, options):
    plain, fast = (with_length(one, do_sample=False) for one in pipelines)
    expected = plain(prompt, **options)
    with record_speculation() as report:
        assert fast(prompt, **options) == expected
    assert (report.num_calls, report.num_rounds > num_calls) == (num_calls, True)
    sampled = with_length(pipelines[1], do_sample=True)(prompt, **options)
    assert len(sampled) == len(expected)


def test_a_pipeline_streams_what_it_returns(pipelines, tokenizer, capsys):
    plain, fast = (with_length(one, do_sample=False) for one in pipelines)
    shown = []
    for one in (plain, fast):
        result = one(CHAT, streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
        shown.append((capsys.readouterr().out, result))
    assert shown[0] == shown[1]
    assert shown[1][0].split() == shown[1][1][0]["generated_text"][-1]["content"].split()


def with_length(one, **options):
    return lambda prompt, **more: one(prompt, max_new_tokens=12, **options, **more)
