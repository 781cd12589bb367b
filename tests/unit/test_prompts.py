"""Prompt files and prompt encoding, without a tokenizer or a model."""

import json

import pytest

from dspark_hf import prompts


def test_quickstart_prompts():
    shipped = prompts.quickstart_prompts()
    assert len(shipped) == 8
    assert len({prompt.id for prompt in shipped}) == 8
    for prompt in shipped:
        [message] = prompt.messages
        assert message["role"] == "user"
        assert 40 < len(message["content"]) < 500


def test_the_three_forms_of_a_prompt(tmp_path):
    path = tmp_path / "mine.jsonl"
    lines = [
        {"id": "a", "turns": ["first", "second"], "answer": 4},
        {"id": "b", "prompt": "line\u2028separator"},
        {"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}]},
    ]
    text = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n"
    path.write_text(text, encoding="utf-8-sig")
    assert prompts.load_prompts(path) == [
        prompts.Prompt("a", ({"role": "user", "content": "first"},)),
        prompts.Prompt("b", ({"role": "user", "content": "line\u2028separator"},)),
        prompts.Prompt("mine/5", ({"role": "system", "content": ""}, {"role": "user", "content": "hi"})),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting property name"),
        ("[1]", "expected a JSON object, got list"),
        ('{"id": 3, "prompt": "x"}', "`id` must be a non-empty string of printable characters, got 3"),
        ('{"id": "a\\u001b]0;b", "prompt": "x"}', "printable characters"),
        ('{"prompt": "\\ud800"}', "surrogates not allowed"),
        ("[" * 100_000, "recursion"),
        ('{"id": "first", "prompt": "x"}', "id 'first' was used before"),
        ('{"id": "x"}', "needs exactly one of `turns`, `messages`, `prompt`, has none"),
        ('{"prompt": "x", "turns": ["y"]}', "has `turns` and `prompt`"),
        ('{"prompt": " "}', "`prompt` must hold text, got ' '"),
        ('{"prompt": 3}', "`prompt` must hold text, got 3"),
        ('{"turns": []}', r"`turns` must hold text, got \[\]"),
        ('{"turns": "x"}', "`turns` must be a list of strings, got 'x'"),
        ('{"turns": ["x", 3]}', "`turns` must be a list of strings"),
        ('{"messages": []}', "`messages` must be a non-empty list"),
        ('{"messages": [{"role": "user"}]}', "needs the strings `role` and `content`"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "is the assistant's"),
    ],
)
def test_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"id": "first", "prompt": "good"}\n' + line + "\n")
    with pytest.raises(prompts.PromptFileError, match=message) as caught:
        prompts.load_prompts(path)
    assert str(caught.value).startswith(f"{path}, line 2: ")


@pytest.mark.parametrize("content", [None, b"", b"\n\n", b"\xff\xfe\xff"])
def test_bad_file_is_named(tmp_path, content):
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(prompts.PromptFileError) as caught:
        prompts.load_prompts(str(path))
    assert str(path) in str(caught.value)


class FakeTokenizer:
    def __init__(self, chat_template):
        self.chat_template = chat_template

    def apply_chat_template(self, messages, **kwargs):
        assert kwargs == {
            "add_generation_prompt": True,
            "return_tensors": "pt",
            "return_dict": True,
        }
        return {"input_ids": ("templated", messages)}

    def __call__(self, text, **kwargs):
        assert kwargs == {"return_tensors": "pt"}
        return {"input_ids": ("plain", text)}


def test_encode_prompt_uses_the_template_if_there_is_one():
    messages = ({"role": "system", "content": "short"}, {"role": "user", "content": "hi"})
    prompt = prompts.Prompt("x", messages)
    assert prompts.encode_prompt(FakeTokenizer("..."), prompt) == ("templated", list(messages))
    assert prompts.encode_prompt(FakeTokenizer(None), prompt) == ("plain", "short\nhi")
