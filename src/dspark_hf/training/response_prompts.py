"""Prompts out of any text or chat data set: local files, folders and the Hub."""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import TrainingDataError
from ..prompts import Prompt

logger = logging.getLogger(__name__)

# Tried in this order; the first that a row has a value for is its prompt.
TEXT_COLUMNS = ("messages", "conversations", "turns", "prompt", "instruction", "question", "text")
ID_COLUMNS = ("id", "question_id", "task_id")

# Rows after which a data set without any of the columns is given up; it may be a large one of the Hub.
ROWS_WITHOUT_COLUMNS = 1000

_BUILDERS = {".jsonl": None, ".json": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}
# One of them lies in a folder that `datasets` saved: of one split, or of several.
_SAVED_FILES = ("state.json", "dataset_dict.json")
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
}


def load_prompt_dataset(
    source: str | Path | Sequence[str | Path], *, split: str = "train", max_prompts: int | None = None
) -> list[Prompt]:
    """Read prompts from data sets of any common layout.

    A row's prompt is the first of these columns with a value: `messages` or `conversations` (chat, as role and
    content or ShareGPT's from and value; trailing assistant turns are dropped), `turns` (user turns, the first
    counts), `prompt` (text or chat), `instruction` with an optional `input`, `question`, `text`. Its id comes from
    `id`, `question_id` or `task_id`, else it is the file's or data set's name and the row's number from 1. Rows
    repeated under one id are dropped; another prompt under the same id gets `#2`, `#3`, ... behind it.

    A row without text gives a prompt without messages, for `write_responses` to skip and count.

    Args:
        source: A .jsonl, .json, .parquet, .csv or .txt (one prompt a line) file, a folder of them, a folder that
            `datasets` saved to disk, a data set of the Hub as `owner/name` or `owner/name:config`, or several of these.
        split: Of a Hub data set, or of one that was saved in splits.
        max_prompts: Most rows taken of each source, from its start; None for all.

    Raises:
        TrainingDataError: a source is missing, unreadable or empty, has none of the columns above, or needs
            `datasets`, which is not installed.
    """
    if max_prompts is not None and max_prompts < 1:
        raise TrainingDataError(f"max_prompts must be >= 1, or None for all, got {max_prompts}")
    sources = [source] if isinstance(source, str | Path) else list(source)
    prompts: dict[str, Prompt] = {}
    num_repeated = 0
    for one in sources:
        for prompt in islice(_prompts_of(one, split), max_prompts):
            free = _free_id(prompt, prompts)
            if free is None:
                num_repeated += 1
            else:
                prompts[free] = Prompt(free, prompt.messages)
    if not prompts:
        names = ", ".join(map(str, sources))
        raise TrainingDataError(f"{names or 'the list of sources'} holds no row; name data with prompts in it")
    if num_repeated:
        logger.info("%d repeated prompts were left out", num_repeated)
    return list(prompts.values())


def _free_id(prompt: Prompt, taken: Mapping[str, Prompt]) -> str | None:
    """Id under which the prompt can be added, or None if it is there already."""
    name, number = prompt.id, 1
    while (other := taken.get(name)) is not None:
        if other.messages == prompt.messages:
            return None
        number += 1
        name = f"{prompt.id}#{number}"
    return name


def _prompts_of(source: str | Path, split: str) -> Iterator[Prompt]:
    path = Path(source).expanduser()
    if path.is_dir() and any((path / name).is_file() for name in _SAVED_FILES):
        yield from _parse_rows(_saved_rows(path, split), path.name, str(path))
    elif path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in _BUILDERS and not _is_hidden(p.relative_to(path)))
        if not files:
            raise TrainingDataError(f"{path} holds no {', '.join(_BUILDERS)} file; pass a file or a folder of them")
        for file in files:
            yield from _parse_rows(_file_rows(file), file.stem, str(file))
    elif path.is_file():
        if path.suffix not in _BUILDERS:
            raise TrainingDataError(f"{path} is no {', '.join(_BUILDERS)} file; convert it to one of these")
        yield from _parse_rows(_file_rows(path), path.stem, str(path))
    else:
        name = str(source)
        if name.startswith(("/", ".", "~")) or name.count("/") > 1 or path.suffix in _BUILDERS or not name:
            raise TrainingDataError(
                f"{name!r} does not exist; pass an existing file or folder, or a Hub id (owner/name)"
            )
        yield from _parse_rows(_hub_rows(name, split), name, name)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _file_rows(path: Path) -> Iterator[Any]:
    builder = _BUILDERS[path.suffix]
    if builder is None:
        return _json_lines(path)
    return _dataset_rows(str(path), builder, data_files=str(path), split="train")


def _saved_rows(path: Path, split: str) -> Iterator[Any]:
    """Rows of a data set that `save_to_disk` wrote."""
    datasets = import_datasets(f"reading {path}")
    try:
        saved = datasets.load_from_disk(str(path))
    except Exception as error:  # as for _dataset_rows
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TrainingDataError(f"{path} cannot be read ({reason}); save the data set again") from error
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise TrainingDataError(f"{path} has no split {split!r}, only {', '.join(saved)}; name one of these")
        saved = saved[split]
    return iter(saved)


def _hub_rows(name: str, split: str) -> Iterator[Any]:
    repository, _, config = name.partition(":")
    return _dataset_rows(name, repository, name=config or None, split=split)


def _json_lines(path: Path) -> Iterator[Any]:
    """Rows of a JSONL file, None for a line that is no JSON: one bad line must not lose the others."""
    try:
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    try:
                        yield json.loads(line)
                    except (ValueError, RecursionError):
                        yield None
    except OSError as error:
        raise TrainingDataError(f"{path} cannot be read ({error}); check the file and its permissions") from error


def _dataset_rows(what: str, builder: str, **arguments: Any) -> Iterator[Any]:
    datasets = import_datasets(f"reading {what}")
    try:
        # Streaming: no second copy in a cache that could be stale, and no more is fetched than is taken.
        yield from datasets.load_dataset(builder, streaming=True, **arguments)
    except Exception as error:  # each reader has its own errors for damaged files and absent data sets
        reason = (str(error.__cause__ or error).strip() or type(error).__name__).splitlines()[0]
        raise TrainingDataError(
            f"{what} cannot be read ({reason}); check the file, or the name, split and configuration "
            "(owner/name:configuration) of a Hub data set"
        ) from error


def import_datasets(purpose: str) -> Any:
    """The `datasets` library.

    Raises:
        TrainingDataError: it is not installed; `purpose` begins the message.
    """
    try:
        import datasets
    except ImportError as error:
        raise TrainingDataError(f'{purpose} needs datasets: pip install "dspark-hf[train]"') from error
    return datasets


def _parse_rows(rows: Iterable[Any], name: str, what: str) -> Iterator[Prompt]:
    columns: set[str] = set()
    waiting: list[Prompt] = []  # until some row shows that the data set is one that can be read
    for number, row in enumerate(rows, start=1):
        if isinstance(row, dict):
            columns.update(row)
        messages = _messages(row) if isinstance(row, dict) else ()
        waiting.append(Prompt(_row_id(row, f"{name}/{number}"), messages))
        if columns.intersection(TEXT_COLUMNS):
            yield from waiting
            waiting.clear()
        elif len(waiting) == ROWS_WITHOUT_COLUMNS:
            break
    if waiting:
        found = f"the columns {', '.join(sorted(columns))}" if columns else "no JSON object"
        raise TrainingDataError(f"{what} has {found}; a prompt needs one of the columns {', '.join(TEXT_COLUMNS)}")


def _row_id(row: Any, default: str) -> str:
    if isinstance(row, dict):
        for column in ID_COLUMNS:
            value = row.get(column)
            if isinstance(value, str | int) and str(value).strip() and str(value).isprintable():
                return str(value)
    return default


def _messages(row: dict[str, Any]) -> tuple[Mapping[str, str], ...]:
    """Chat messages of a row, empty if it has no text to answer."""
    column = next((name for name in TEXT_COLUMNS if row.get(name) is not None), None)
    if column is None:
        return ()
    value = row[column]
    if column == "turns":
        value = value[0] if isinstance(value, list) and value else None
    elif column == "instruction" and isinstance(row.get("input"), str) and row["input"].strip():
        value = f"{value}\n\n{row['input']}" if isinstance(value, str) else None
    if isinstance(value, str) and column not in ("messages", "conversations"):
        return ({"role": "user", "content": value},) if value.strip() and _is_encodable(value) else ()
    return _chat(value) if column in ("messages", "conversations", "prompt") else ()


def _chat(value: Any) -> tuple[Mapping[str, str], ...]:
    if isinstance(value, dict) and all(isinstance(item, list) for item in value.values()):
        # The layout in which `datasets` gives sequences of structs that older versions wrote.
        value = [dict(zip(value, items, strict=False)) for items in zip(*value.values(), strict=False)]
    if not isinstance(value, list):
        return ()
    messages = []
    for item in value:
        message = _message(item)
        if message is None:
            return ()
        messages.append(message)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    has_request = any(message["role"] != "system" and message["content"].strip() for message in messages)
    return tuple(messages) if has_request else ()


def _message(item: Any) -> dict[str, str] | None:
    if not isinstance(item, dict):
        return None
    if item.get("role") is not None:
        role, content = item["role"], item.get("content")
    else:
        role, content = item.get("from"), item.get("value")
        role = _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else None
    if isinstance(content, list):  # content as typed parts
        parts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in content]
        content = "\n".join(parts) if all(isinstance(part, str) for part in parts) else None
    if not isinstance(role, str) or not isinstance(content, str) or not _is_encodable(content):
        return None
    return {"role": role, "content": content}


def _is_encodable(text: str) -> bool:
    """False for text that no tokenizer takes (JSON can spell half a surrogate pair)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
