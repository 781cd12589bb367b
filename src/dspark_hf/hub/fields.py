"""Typed access to JSON that somebody else may have written: a wrong kind of value is an error that names the field."""

import json
from pathlib import Path
from typing import Any

from ..errors import ReportError

# Reports are tables; a larger file is something else.
MAX_REPORT_BYTES = 16_000_000


def read_object(path: Path) -> "Fields":
    """The one JSON object of a file.

    Raises:
        ReportError: it cannot be read, is too large, or holds something else.
    """
    way_out = "make it again with the command that writes such reports, or remove it"
    try:
        size = path.stat().st_size
        if size > MAX_REPORT_BYTES:
            raise ReportError(f"{path} has {size} bytes, and a report at most {MAX_REPORT_BYTES}; {way_out}")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ReportError(f"{path} cannot be read as a report ({error}); {way_out}") from error
    if not isinstance(content, dict):
        raise ReportError(f"{path} must hold one JSON object, got a {type(content).__name__}; {way_out}")
    return Fields(content, path.name)


class Fields:
    """A JSON object of a report.

    Each method takes a field's name and returns None where it is absent or null.

    Raises:
        ReportError: the value is of another kind; the message names file, field and rule.
    """

    def __init__(self, content: dict[str, Any], where: str) -> None:
        self.content = content
        self.where = where

    def text(self, name: str) -> str | None:
        """A string."""
        value = self.content.get(name)
        self._require(value is None or isinstance(value, str), name, value, "a text")
        return value

    def number(self, name: str) -> float | None:
        """A finite number."""
        value = self.content.get(name)
        self._require(value is None or is_number(value), name, value, "a finite number")
        return value

    def count(self, name: str) -> int | None:
        """A whole number from 0."""
        value = self.content.get(name)
        holds = value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63)
        self._require(holds, name, value, "a whole number from 0")
        return value

    def flag(self, name: str) -> bool | None:
        """True or false."""
        value = self.content.get(name)
        self._require(value is None or isinstance(value, bool), name, value, "true or false")
        return value

    def one(self, name: str) -> "Fields":
        """An object; an empty one where it is absent."""
        value = self.content.get(name)
        self._require(value is None or isinstance(value, dict), name, value, "an object")
        return Fields(value or {}, f"{self.where}: {name}")

    def many(self, name: str) -> "list[Fields]":
        """A list of objects; an empty one where it is absent."""
        return [self._item(name, i, value) for i, value in enumerate(self._list(name))]

    def named(self, name: str) -> "dict[str, Fields]":
        """An object of objects; an empty one where it is absent."""
        return {key: self.one(name).one(key) for key in self.one(name).content}

    def numbers(self, name: str) -> list[float | None]:
        """A list of finite numbers, null for one that is undefined; an empty list where it is absent."""
        values = self._list(name)
        holds = all(value is None or is_number(value) for value in values)
        self._require(holds, name, values, "a list of finite numbers")
        return values

    def texts(self, name: str) -> list[str]:
        """A list of strings; an empty one where it is absent."""
        values = self._list(name)
        self._require(all(isinstance(value, str) for value in values), name, values, "a list of texts")
        return values

    def _list(self, name: str) -> list[Any]:
        value = self.content.get(name)
        self._require(value is None or isinstance(value, list), name, value, "a list")
        return value or []

    def _item(self, name: str, index: int, value: Any) -> "Fields":
        self._require(isinstance(value, dict), f"{name}[{index}]", value, "an object")
        return Fields(value, f"{self.where}: {name}[{index}]")

    def _require(self, holds: bool, name: str, value: object, rule: str) -> None:
        if not holds:
            shown = repr(value)
            shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
            raise ReportError(
                f"{self.where}: {name} must be {rule}, got {shown}; make the report again with the command that writes "
                "it, or remove it"
            )


def is_number(value: object) -> bool:
    """Whether a value is a finite number, and not true or false."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300
