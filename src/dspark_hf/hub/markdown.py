"""Texts from outside (names, commands, configs) as Markdown and Python that say nothing but them.

A template's every `{{ value }}` goes through `escape`, unless it is `Safe`; what makes a `Safe` is in this file.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence

from ..evaluation.scrub import scrub_any

# Longer names are cut in running text and in tables; commands are never.
MAX_NAME_LENGTH = 200
MAX_PROSE_LENGTH = 4000
# Of a text that may be megabytes long, no more is looked at.
MAX_READ_LENGTH = 20_000

# An underscore between letters starts and ends nothing.
_SPECIAL = re.compile(r"([\\`*\[\]|~$#!]|(?<![^\W_])_|_(?![^\W_]))")
_BLOCK_START = re.compile(r"^(?:[-=](?=[-= ]*$)|[-+](?= |$)|\d+(?=[.)](?: |$)))")
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


class Safe(str):
    """Markdown of our own making."""

    __slots__ = ()


def escape(value: object, max_length: int = MAX_NAME_LENGTH) -> str:
    """Markdown that shows `value`, scrubbed, on one line: no markup, HTML, table cell, link or mention comes of it."""
    if isinstance(value, Safe):
        return value
    text = one_line(scrub_any(str(value)[:MAX_READ_LENGTH]))
    if len(text) > max_length:
        text = f"{text[: max_length - 3]}..."
    text = _SPECIAL.sub(r"\\\1", text.translate(_ENTITIES))
    # Addresses that Markdown links without being asked; entities are no letters of an address.
    text = text.replace("://", "&#58;//").replace("www.", "www&#46;").replace("@", "&#64;")
    # What would be a list, a heading or a rule at the start of a line.
    return _BLOCK_START.sub(lambda found: f"&#{ord(found[0][0])};{found[0][1:]}", text)


def prose(value: object) -> Safe:
    """`escape` for sentences, which are longer than names."""
    return Safe(escape(value, MAX_PROSE_LENGTH))


def one_line(text: str) -> str:
    """`text` without line breaks, control characters and those that turn the direction of writing."""
    kept = (" " if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") else char for char in text)
    return " ".join("".join(kept).split())


def block(lines: str | Iterable[str], language: str = "") -> Safe:
    """A fenced block of code, line breaks kept."""
    text = lines if isinstance(lines, str) else "\n".join(lines)
    text = "".join(char for char in text if char == "\n" or unicodedata.category(char) not in ("Cc", "Cf", "Cs"))
    fence = "`" * max(3, _longest_run(text) + 1)
    return Safe(f"{fence}{language}\n{text}\n{fence}")


def table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> Safe:
    """A table; every cell is escaped."""
    lines = [[escape(cell) for cell in header], ["---"] * len(header)]
    lines += [[escape(cell) for cell in row] for row in rows]
    assert all(len(line) == len(header) for line in lines), "every row has a cell for every column"
    return Safe("\n".join(f"| {' | '.join(line)} |" for line in lines))


def bold(value: object) -> Safe:
    """In bold type."""
    return Safe(f"**{escape(value)}**")


def link(text: object, address: str) -> Safe:
    """A link to an address of our own making."""
    return Safe(f"[{escape(text)}]({address})")


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
