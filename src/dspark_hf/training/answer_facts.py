"""What is known about files of answers: who gave them, to which prompts, and how, as `dspark train data` noted it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..prompts import ChatTemplate
from .records import data_files
from .response_writer import settings_path

# More files than these are counted, not described; a report is no listing of a disk.
MAX_FILES = 32


@dataclass(frozen=True)
class PromptSource:
    """Where prompts came from: a file's or folder's name, or a data set of the Hub."""

    name: str
    is_on_hub: bool


@dataclass(frozen=True)
class AnswerFacts:
    """One file of answers; what its settings file does not say is None.

    Attributes:
        file: Name without folders.
        target: Name of the model that gave the answers.
        temperatures: The mix; 0 is greedy.
        max_new_tokens: Most tokens of an answer.
        chat_templates: Of all runs that made the answers, without repetition.
        prompt_sources: Likewise.
        commands: Likewise; of processes that were no commands of ours too.
    """

    file: str
    target: str | None
    temperatures: list[float] | None
    max_new_tokens: int | None
    chat_templates: list[ChatTemplate] | None
    prompt_sources: list[PromptSource] | None
    commands: list[str] | None


def prompt_source(source: str | Path) -> PromptSource:
    """How a source of `load_prompt_dataset` is named in reports, which say nothing about folders."""
    path = Path(source).expanduser()
    return PromptSource(path.resolve().name, False) if path.exists() else PromptSource(str(source), True)


def answer_facts(sources: Sequence[str | Path]) -> list[AnswerFacts]:
    """Of the first `MAX_FILES` files that `data_files` finds.

    Raises:
        TrainingDataError: as for `data_files`.
    """
    return [_facts_of(path) for path in data_files(list(sources))[:MAX_FILES]]


def _facts_of(path: Path) -> AnswerFacts:
    try:
        content = json.loads(settings_path(path).read_text(encoding="utf-8"))
        identity, runs = dict(content["identity"]), [dict(run) for run in content["runs"]]
        templates = _without_repetition([run.get("chat_template") for run in runs])
        commands = _without_repetition([run.get("command") for run in runs])
        sources = _without_repetition([source for run in runs for source in run.get("prompt_sources") or [None]])
        return AnswerFacts(
            file=path.name,
            target=runs[-1].get("target_name"),
            temperatures=identity.get("temperatures"),
            max_new_tokens=identity.get("max_new_tokens"),
            chat_templates=None if None in templates else [ChatTemplate(**one) for one in templates],
            prompt_sources=None if None in sources else [PromptSource(**one) for one in sources],
            commands=None if None in commands else commands,
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError):  # answers from elsewhere have no such file
        return AnswerFacts(path.name, None, None, None, None, None, None)


def _without_repetition(values: list[Any]) -> list[Any]:
    return [value for i, value in enumerate(values) if value not in values[:i]]


def described(facts: Sequence[AnswerFacts]) -> list[dict[str, Any]]:
    """For JSON."""
    return [asdict(one) for one in facts]
