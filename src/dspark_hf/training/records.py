"""Answers on disk, as token sequences with a loss mask."""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import TrainingDataError

logger = logging.getLogger(__name__)

# How `datasets` reads a file; JSONL is read here.
_READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_COLUMN_PAIRS = (("prompt_ids", "response_ids"), ("input_ids", "loss_mask"))


@dataclass(frozen=True)
class TrainingSequence:
    """One conversation, tokenised.

    Attributes:
        id: Of its prompt; all answers to one prompt share it, so that a split never separates them.
        input_ids: int64 `[length]`.
        loss_mask: bool `[length]`, true on the tokens that the target wrote.
    """

    id: str
    input_ids: Tensor
    loss_mask: Tensor

    def __len__(self) -> int:
        return self.input_ids.shape[0]


def load_sequences(
    source: str | Path | Sequence[str | Path], *, vocab_size: int, max_length: int
) -> list[TrainingSequence]:
    """Read answers from JSONL or Parquet files, or from all such files of a folder.

    A row has `prompt_ids` and `response_ids`, as `dspark train data` writes them, or `input_ids` and `loss_mask` of
    the same length; an `id` is optional. Rows longer than `max_length` tokens are cut there, and rows without two
    supervised tokens in a row are left out, since no block fits.

    Args:
        source: File, folder, or several of them.
        vocab_size: The target's; ids at or above it are refused.
        max_length: Tokens kept of a row.

    Raises:
        TrainingDataError: a file is missing or unreadable, a column is missing or of another kind, an id is not the
            target's, or nothing is left.
    """
    paths = data_files(source)
    sequences: list[TrainingSequence] = []
    num_cut = num_left_out = 0
    for path in paths:
        for number, row in enumerate(read_rows(path), start=1):
            try:
                whole = parse_row(row, f"{path.name}/{number}", vocab_size)
            except ValueError as error:
                raise TrainingDataError(f"{path}, row {number}: {error}") from error
            sequence = TrainingSequence(whole.id, whole.input_ids[:max_length], whole.loss_mask[:max_length])
            num_cut += len(whole) > max_length
            if not bool((sequence.loss_mask[:-1] & sequence.loss_mask[1:]).any()):
                num_left_out += 1
                continue
            sequences.append(sequence)
    if num_cut or num_left_out:
        logger.warning("%d rows were cut at %d tokens, %d left out: no block fits", num_cut, max_length, num_left_out)
    if not sequences:
        raise TrainingDataError(
            f"{', '.join(map(str, paths))}: no row holds two supervised tokens in a row within {max_length} tokens, so "
            "there is nothing to train on; longer answers or a larger max_length would help"
        )
    return sequences


def split_held_out(
    sequences: Iterable[TrainingSequence], fraction: float
) -> tuple[list[TrainingSequence], list[TrainingSequence]]:
    """Training and held-out sequences; a prompt's id decides, so the split is the same in every run and order."""
    train: list[TrainingSequence] = []
    held_out: list[TrainingSequence] = []
    for sequence in sequences:
        (held_out if is_held_out(sequence.id, fraction) else train).append(sequence)
    return train, held_out


def is_held_out(prompt_id: str, fraction: float) -> bool:
    """Whether training with that `held_out_fraction` leaves the prompt of this id out."""
    digest = hashlib.sha256(prompt_id.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < fraction


def data_digest(sequences: Iterable[TrainingSequence], *, with_prompt_ids: bool = False) -> str:
    """sha256 over tokens and masks, in order, and over the ids that decide about the held-out split if asked."""
    digest = hashlib.sha256()
    for sequence in sequences:
        if with_prompt_ids:
            digest.update(sequence.id.encode() + b"\0")
        digest.update(len(sequence).to_bytes(8, "little"))
        digest.update(sequence.input_ids.numpy().tobytes())
        digest.update(sequence.loss_mask.numpy().tobytes())
    return digest.hexdigest()


def data_files(source: str | Path | Sequence[str | Path]) -> list[Path]:
    """The data files that files and folders name, sorted within a folder.

    Raises:
        TrainingDataError: one does not exist, is of another kind, or is a folder without data files.
    """
    names = [source] if isinstance(source, str | Path) else list(source)
    files: list[Path] = []
    for name in names:
        path = Path(name).expanduser()
        if path.is_dir():
            found = sorted(p for p in path.iterdir() if p.suffix in _READERS and not p.name.endswith(".settings.json"))
            if not found:
                raise TrainingDataError(f"{path} holds no {', '.join(_READERS)} file; pass a file or a folder of them")
            files.extend(found)
        elif not path.is_file():
            raise TrainingDataError(f"{path} does not exist; make answers with `dspark train data`")
        elif path.suffix not in _READERS:
            raise TrainingDataError(f"{path} is neither a folder nor a {', '.join(_READERS)} file; pass one of these")
        else:
            files.append(path)
    return files


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL, JSON or Parquet file, one at a time.

    Raises:
        TrainingDataError: the file is damaged or empty, or `datasets`, which reads all but JSONL, is not installed.
    """
    if path.suffix == ".jsonl":
        yield from _json_lines(path)
        return
    try:
        import datasets
    except ImportError as error:
        raise TrainingDataError('reading training data needs datasets: pip install "dspark-hf[train]"') from error
    try:
        # Streaming reads the file itself: no second copy in a cache that could be stale.
        table = datasets.load_dataset(_READERS[path.suffix], data_files=str(path), split="train", streaming=True)
        yield from table
    except TrainingDataError:
        raise
    except Exception as error:  # each reader has its own errors for damaged files
        raise TrainingDataError(f"{path} cannot be read ({_last_line(error)}); write or download it again") from error


def parse_row(row: dict[str, Any], default_id: str, vocab_size: int) -> TrainingSequence:
    """One row as a sequence, or ValueError saying what is wrong with it."""
    pairs = [pair for pair in _COLUMN_PAIRS if all(row.get(name) is not None for name in pair)]
    if not pairs:
        raise ValueError(
            "needs the columns prompt_ids and response_ids, or input_ids and loss_mask, each a list of integers; has "
            f"{sorted(key for key in row if row[key] is not None)}. Text is answered by `dspark train data`"
        )
    first, second = (_integers(row[name], name) for name in pairs[0])
    if pairs[0] == _COLUMN_PAIRS[0]:
        if not first:
            raise ValueError("prompt_ids is empty; a drafter needs a context to read")
        input_ids, mask = first + second, [0] * len(first) + [1] * len(second)
    else:
        input_ids, mask = first, second
        if strange := sorted(set(mask) - {0, 1})[:3]:
            raise ValueError(f"loss_mask must hold 0 and 1, 1 on the tokens to learn from, and holds {strange}")
        if len(input_ids) != len(mask):
            raise ValueError(f"input_ids has {len(input_ids)} entries and loss_mask {len(mask)}; they must agree")
    if not input_ids:
        raise ValueError("input_ids is empty")
    if min(input_ids) < 0 or max(input_ids) >= vocab_size:
        wrong = min(input_ids) if min(input_ids) < 0 else next(i for i in input_ids if not 0 <= i < vocab_size)
        raise ValueError(
            f"token id {wrong} is outside the target's vocabulary of {vocab_size}; the answers were made with another "
            "tokenizer, make them with this target"
        )
    row_id = default_id if row.get("id") in (None, "") else str(row["id"])
    return TrainingSequence(row_id, torch.tensor(input_ids), torch.tensor(mask).bool())


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Line by line: a reader of whole tables cannot say which row is wrong."""
    try:
        # Not splitlines(): JSON strings may hold the other line breaks that it knows.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingDataError(f"{path} cannot be read ({error}); write or download it again") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TrainingDataError(f"{path}, row {number} cannot be read ({error}); write it again") from error
        if not isinstance(row, dict):
            raise TrainingDataError(f"{path}, row {number}: expected a JSON object, got {type(row).__name__}")
        yield row


def _integers(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
        raise ValueError(f"{name} must be a list of integers, got {str(value)[:60]!r}")
    return value


def _last_line(error: Exception) -> str:
    cause = error.__cause__ or error
    return (str(cause).strip() or type(cause).__name__).splitlines()[-1]
