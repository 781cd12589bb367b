"""Rounds of decoded prompts on disk.

A JSONL file. Its first line says what the rounds were made with, each other one holds the rounds of one prompt, so
that an interrupted run goes on where it stopped. A prompt is known by its id and token ids: prompts may change between
runs, and rounds of others stay in the file without counting.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import CalibrationError


@dataclass(frozen=True)
class PromptRounds:
    """The rounds of one decoded prompt, as one line of the file holds them.

    Attributes:
        id: Of the prompt.
        digest: Of its token ids.
        logits: Raw confidence logits of each round's drafts; empty lists without a confidence head.
        num_verified, num_accepted: Of each round, bonus tokens not counted.
        num_new_tokens: What was generated, the token of the prompt's forward counted; None in files of older releases.
        num_plain: Rounds besides, in which nothing was drafted.
    """

    id: str
    digest: str
    logits: list[list[float]]
    num_verified: list[int]
    num_accepted: list[int]
    num_new_tokens: int | None = None
    num_plain: int = 0

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from other prompts, and from another text under the same id."""
        return self.id, self.digest


def open_rounds_file(path: Path, identity: dict[str, Any]) -> dict[tuple[str, str], PromptRounds]:
    """What an earlier run left, by prompt; a new file gets its first line.

    Args:
        path: JSONL.
        identity: What the rounds are made with.

    Raises:
        CalibrationError: the file was made with something else, or cannot be read or written.
    """
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
            partial.write_text(json.dumps(identity) + "\n", encoding="utf-8")
            os.replace(partial, path)
            return {}
    except OSError as error:
        raise CalibrationError(f"{path} cannot be written ({error}); name another output") from error
    found, done = read_rounds_file(path)
    differing = sorted(key for key in identity if found.get(key) != identity[key])

    def _told(key: str) -> str:
        then, now = found.get(key), identity[key]
        if not (isinstance(then, dict) and isinstance(now, dict)):
            return key
        parts = [
            f"{part} {then.get(part)}, now {now.get(part)}" for part in {*then, *now} if then.get(part) != now.get(part)
        ]
        return f"{key} ({'; '.join(sorted(parts))})"

    if differing:
        raise CalibrationError(
            f"{path} holds proposals made with other: {', '.join(map(_told, differing))}; name another output, or "
            "remove the file"
        )
    return done


def read_rounds_file(path: Path) -> tuple[dict[str, Any], dict[tuple[str, str], PromptRounds]]:
    """First line, and rounds by prompt; a last line that an interruption cut short is taken off the file.

    Raises:
        CalibrationError: it cannot be read, or holds something else.
    """
    try:
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        header, *lines = whole.decode("utf-8").splitlines()
        done = {one.key: one for one in (PromptRounds(**json.loads(line)) for line in lines)}
        identity = json.loads(header)
        if len(whole) < len(content):
            os.truncate(path, len(whole))
    except (OSError, ValueError, TypeError) as error:
        raise CalibrationError(f"{path} cannot be read as proposals ({error}); remove it, or name another") from error
    return identity, done


def append_rounds(path: Path, rounds: Sequence[PromptRounds]) -> None:
    """Add prompts to a file.

    Raises:
        CalibrationError: it cannot be written.
    """
    lines = "".join(json.dumps(asdict(one)) + "\n" for one in rounds)
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(lines)
    except OSError as error:
        raise CalibrationError(f"{path} cannot be written ({error}); make room and run again") from error
