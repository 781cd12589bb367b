"""A report as Markdown, and on a terminal."""

import os
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...hub.markdown import Safe, escape, prose, table
from .report import BenchReport
from .tables import Section, sections


def to_markdown(report: BenchReport, figures: dict[str, str]) -> str:
    """A page.

    Args:
        figures: File names of the pictures that were drawn, by name of the figure.
    """
    parts: list[str] = []
    for number, section in enumerate(sections(report)):
        parts.append(f"{'#' if number == 0 else '##'} {escape(section.title)}")
        if section.text:
            parts.append(prose(section.text))
        if section.header:
            parts.append(table(section.header, [[_cell(cell) for cell in row] for row in section.rows]))
        if section.figure in figures:
            parts.append(f"![{escape(section.title)}]({figures[section.figure]})")
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> Safe:
    return Safe(text) if text == "-" else prose(text)  # commands and reasons are longer than names


def write_page(path: Path, text: str) -> None:
    """Write a page in one step.

    Raises:
        OSError: it cannot be written; an older one is left as it was.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def print_report(report: BenchReport, console: Console) -> None:
    """Print a report."""
    for section in sections(report):
        if not section.is_wide:
            _print(section, console)


def _print(section: Section, console: Console) -> None:
    console.print(f"\n[bold]{section.title}[/bold]")
    if section.text:
        console.print(section.text, markup=False, highlight=False)
    if section.header:
        drawn = Table(box=box.SIMPLE, pad_edge=False, show_edge=False, show_header=any(section.header))
        for place, name in enumerate(section.header):
            drawn.add_column(Text(name), justify="left" if place == 0 or len(section.header) < 3 else "right")
        for row in section.rows:
            drawn.add_row(*map(Text, row))  # not markup: names come from outside
        console.print(drawn)
