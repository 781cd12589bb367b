"""Texts that a target wrote, read for a replay."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..training.records import data_files, parse_row, read_rows
from .replay import TargetText
from .settings import ComparisonError


def load_texts(sources: Sequence[Path], vocab_size: int) -> dict[float, list[TargetText]]:
    """Texts of two answer tokens or more, by temperature.

    Raises:
        ComparisonError: there is none, or a row is not an answer of a target with that vocabulary.
        TrainingDataError: a file cannot be read.
    """
    groups: dict[float, list[TargetText]] = {}
    for path in data_files(list(sources)):
        for number, row in enumerate(read_rows(path), start=1):
            text = _parse_text(row, path, number, vocab_size)
            if text.input_ids.shape[0] >= text.prompt_length + 2:
                groups.setdefault(text.temperature, []).append(text)
    if not groups:
        raise ComparisonError(f"{', '.join(map(str, sources))}: no answer of two tokens or more to replay")
    return dict(sorted(groups.items()))


def _parse_text(row: dict[str, Any], path: Path, number: int, vocab_size: int) -> TargetText:
    try:
        sequence = parse_row(row, f"{path.stem}/{number}", vocab_size)
        temperature = row.get("temperature")
        if "prompt_ids" not in row or not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
            raise ValueError("needs prompt_ids, response_ids and the temperature that the answer was drawn at")
    except ValueError as error:
        raise ComparisonError(f"{path}, row {number}: {error}; write it with `dspark train data`") from error
    return TargetText(sequence.id, sequence.input_ids, len(row["prompt_ids"]), float(temperature))
