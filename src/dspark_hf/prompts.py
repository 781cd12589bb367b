"""Prompts: the few that ship with the package, JSONL files of them, and their token ids.

Nothing heavy is imported: torch and transformers come with the tokenizer that is passed in.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .errors import DSparkError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "ChatTemplate",
    "Prompt",
    "PromptFileError",
    "chat_template_of",
    "demo_prompts",
    "encode_prompt",
    "load_prompts",
    "quickstart_prompts",
]

# Names under which chat templates take the switch between answering at once and thinking first.
THINKING_SWITCHES = ("enable_thinking", "thinking")


class PromptFileError(DSparkError, ValueError):
    """A prompt file cannot be read; the message names the file and the line."""


@dataclass(frozen=True)
class Prompt:
    """One request: an id and the chat messages, `{"role": ..., "content": ...}`, to be answered."""

    id: str
    messages: tuple[Mapping[str, str], ...]


@dataclass(frozen=True)
class ChatTemplate:
    """How prompts become text for one tokenizer.

    Attributes:
        sha256: Of the template; None: there is none, and contents are joined by line breaks.
        thinking: `absent`: the template has no such switch. `on`, `off`: what it does when nothing is asked for, which
            is how prompts are encoded here. `own`: neither.
    """

    sha256: str | None
    thinking: Literal["absent", "on", "off", "own"]


def quickstart_prompts() -> list[Prompt]:
    """The short prompts shipped with the package: arithmetic, code, translation and so on."""
    return _shipped("quickstart_prompts.jsonl")


def demo_prompts() -> list[Prompt]:
    """The demo's examples, one of each kind; their ids are names of kinds."""
    return _shipped("demo_prompts.jsonl")


def _shipped(name: str) -> list[Prompt]:
    text = resources.files("dspark_hf").joinpath("data", name)
    return _parse_prompts(text.read_text(encoding="utf-8"), Path(name))


def load_prompts(path: str | Path) -> list[Prompt]:
    """Reads prompts from a JSONL file, one object a line; blank lines are skipped.

    An object holds exactly one of `prompt` (a string), `messages` (chat messages, the last not the
    assistant's) and `turns` (user turns; later ones answer what a model said, so only the first is
    kept). `id` is optional, by default file name and line number, and unique. Other keys are
    ignored.

    Raises:
        PromptFileError: The file cannot be read, has no prompt or has a bad line.
    """
    path = Path(path)
    if not path.is_file():
        raise PromptFileError(f"there is no file {path}; pass a JSONL file of prompts, or none for the built-in ones")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptFileError(f"cannot read prompts from {path}: {error}") from error
    return _parse_prompts(text, path)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> torch.LongTensor:
    """Token ids [1, L] of a prompt, ready for the answer to follow.

    The tokenizer's chat template is applied, generation prompt added; a tokenizer without one
    encodes the contents of the messages, one a line.
    """
    if tokenizer.chat_template:
        messages = [dict(message) for message in prompt.messages]
        encoded: Any = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        text = "\n".join(message["content"] for message in prompt.messages)
        encoded = tokenizer(text, return_tensors="pt")
    ids: torch.LongTensor = encoded["input_ids"]
    return ids


def chat_template_of(tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    """The template that `encode_prompt` applies, and whether the model thinks under it."""
    template = tokenizer.chat_template
    if not template:
        return ChatTemplate(None, "absent")
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    switch = next((name for name in THINKING_SWITCHES if re.search(rf"\b{name}\b", text)), None)
    if switch is None:
        return ChatTemplate(sha256, "absent")
    untold = _applied(tokenizer)
    on, off = (untold == _applied(tokenizer, **{switch: value}) for value in (True, False))
    if on and off:  # the word stands in it for something else
        return ChatTemplate(sha256, "absent")
    return ChatTemplate(sha256, "on" if on else "off" if off else "own")


def _applied(tokenizer: PreTrainedTokenizerBase, **options: bool) -> str:
    apply: Any = tokenizer.apply_chat_template  # options of the template are any keyword
    return str(apply([{"role": "user", "content": "a"}], add_generation_prompt=True, tokenize=False, **options))


def _parse_prompts(text: str, path: Path) -> list[Prompt]:
    prompts: dict[str, Prompt] = {}
    # Not splitlines(): JSON strings may hold the other line breaks that it knows.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            prompt = _parse_prompt(json.loads(line), default_id=f"{path.stem}/{number}")
            _require_encodable(prompt)
            if prompt.id in prompts:
                raise ValueError(f"id {prompt.id!r} was used before")
        except (ValueError, RecursionError) as error:
            raise PromptFileError(f"{path}, line {number}: {error}") from error
        prompts[prompt.id] = prompt
    if not prompts:
        raise PromptFileError(f"{path} holds no prompt: it needs one JSON object a line")
    return list(prompts.values())


def _require_encodable(prompt: Prompt) -> None:
    """UnicodeEncodeError, a ValueError, for text that no tokenizer takes (JSON can spell half a surrogate pair)."""
    for message in prompt.messages:
        message["content"].encode("utf-8")


def _parse_prompt(record: object, default_id: str) -> Prompt:
    """One line as a Prompt, or ValueError saying what is wrong with it."""
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, got {type(record).__name__}")
    prompt_id = record.get("id", default_id)
    if not isinstance(prompt_id, str) or not prompt_id or not prompt_id.isprintable():
        raise ValueError(f"`id` must be a non-empty string of printable characters, got {prompt_id!r}")
    keys = [key for key in ("turns", "messages", "prompt") if key in record]
    if len(keys) != 1:
        found = " and ".join(f"`{key}`" for key in keys) or "none of them"
        raise ValueError(f"needs exactly one of `turns`, `messages`, `prompt`, has {found}")
    if keys == ["messages"]:
        return Prompt(prompt_id, _parse_messages(record["messages"]))
    value = record[keys[0]]
    if keys == ["turns"]:
        if not isinstance(value, list) or not all(isinstance(turn, str) for turn in value):
            raise ValueError(f"`turns` must be a list of strings, got {value!r}")
        value = value[0] if value else ""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"`{keys[0]}` must hold text, got {record[keys[0]]!r}")
    return Prompt(prompt_id, ({"role": "user", "content": value},))


def _parse_messages(value: object) -> tuple[Mapping[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"`messages` must be a non-empty list, got {value!r}")
    messages = []
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(f"a message needs the strings `role` and `content`, got {message!r}")
        messages.append({"role": message["role"], "content": message["content"]})
    if messages[-1]["role"] == "assistant":
        raise ValueError("the last message is the assistant's: there is nothing to answer")
    return tuple(messages)
