"""Finished measurements on disk, one JSON line each, so that an interrupted run goes on where it stopped.

The first line says what was asked for. Every later line holds a measurement under a key of its own, or names a session:
the provenance of a run that added measurements.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..settings import ComparisonError

FORMAT_VERSION = 1
_WAY_OUT = "name another --output, or remove the file to measure anew"


class CellStore:
    """Measurements by key.

    Args:
        path: JSONL; its folder exists.
        identity: Everything that measurements depend on, as JSON has it.
        session: Who measures now; noted before the first measurement that this object adds.

    Raises:
        ComparisonError: the file holds measurements of something else, or cannot be read or written.
    """

    def __init__(self, path: Path, identity: dict[str, Any], session: dict[str, Any]) -> None:
        self._path = path
        self._session: dict[str, Any] | None = session
        self.sessions: list[dict[str, Any]] = []
        self._found: dict[str, Any] = {}
        identity = json.loads(json.dumps({"format_version": FORMAT_VERSION, **identity}))
        try:
            if path.exists():
                self._read(identity)
            else:
                self._begin(identity)
        except OSError as error:
            raise ComparisonError(f"{path} cannot be read or written ({error}); name another --output") from error

    def __contains__(self, key: str) -> bool:
        return key in self._found

    def __getitem__(self, key: str) -> Any:
        return self._found[key]

    def __len__(self) -> int:
        return len(self._found)

    def items(self) -> Iterator[tuple[str, Any]]:
        """Keys and measurements, in the order in which they were made."""
        yield from self._found.items()

    def add(self, key: str, value: Any) -> None:
        """Keep a measurement.

        Raises:
            OSError: it cannot be written; what was kept before is whole.
        """
        assert key not in self._found, f"{key} is measured once"
        value = json.loads(json.dumps(value))  # as a later run will read it
        if self._session is not None:
            self._append({"session": self._session})
            self.sessions.append(self._session)
            self._session = None
        self._append({"key": key, "value": value})
        self._found[key] = value

    def _append(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _begin(self, identity: dict[str, Any]) -> None:
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}.partial")
        try:
            partial.write_text(json.dumps(identity) + "\n", encoding="utf-8")
            os.replace(partial, self._path)
        finally:
            partial.unlink(missing_ok=True)

    def _read(self, identity: dict[str, Any]) -> None:
        content = self._path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        try:
            header, *lines = (json.loads(line) for line in whole.decode("utf-8").splitlines())
            for line in lines:
                if "session" in line:
                    self.sessions.append(line["session"])
                else:
                    self._found[line["key"]] = line["value"]
            differing = sorted(name for name in {*header, *identity} if header.get(name) != identity.get(name))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ComparisonError(f"{self._path} cannot be read as measurements ({error}); {_WAY_OUT}") from error
        if differing:
            told = "; ".join(_told(name, header.get(name), identity.get(name)) for name in differing)
            raise ComparisonError(f"{self._path} holds measurements made with other settings: {told}; {_WAY_OUT}")
        if len(whole) < len(content):  # a last line that an interruption cut short
            os.truncate(self._path, len(whole))


def _told(name: str, then: Any, now: Any) -> str:
    """What differs, part by part where both have parts."""
    if isinstance(then, dict) and isinstance(now, dict):
        parts = sorted(part for part in {*then, *now} if then.get(part) != now.get(part))
        return ", ".join(_told(f"{name}.{part}", then.get(part), now.get(part)) for part in parts)
    return f"{name} was {_short(then)}, now {_short(now)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
