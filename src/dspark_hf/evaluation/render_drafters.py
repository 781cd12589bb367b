"""A report about drafters in the terminal, and as a Markdown file."""

import os
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..hub.markdown import block, escape, prose, table
from .drafters import DraftersReport
from .evaluation_tables import evaluation_tables, headlines


def render_drafters(report: DraftersReport, console: Console) -> None:
    """Print the main tables of a report."""
    for line in headlines(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    tables = evaluation_tables(report)
    for one in tables:
        if one.is_brief:
            drawn = Table(*one.header, title=Text(one.title) if one.title else None, box=box.SIMPLE)
            for row in one.rows:
                drawn.add_row(*map(Text, row))  # names are no markup
            console.print(drawn)
    if any(not one.is_brief for one in tables):
        console.print(
            "shorter drafts, thresholds and groups of data sets: --markdown FILE, --json FILE, --figures FOLDER"
        )


def markdown_of(report: DraftersReport, figures: Sequence[Path] = (), *, relative_to: Path | None = None) -> str:
    """All tables of a report as Markdown.

    Args:
        figures: PNG files to be shown.
        relative_to: Folder of the Markdown file, from which figures are linked.
    """
    provenance = report.provenance
    parts = [f"# Drafters of {escape(report.target)}", *map(prose, headlines(report))]
    parts.append(prose(f"Lengths and thresholds: {report.meaning_of_cuts}."))
    for one in evaluation_tables(report):
        parts += [f"## {escape(one.title)}" if one.title else "", table(one.header, one.rows)]
    for path in figures:
        shown = Path(os.path.relpath(path, relative_to)) if relative_to is not None else path
        parts.append(f"![{escape(path.stem)}](<{shown.as_posix()}>)")
    versions = ", ".join(f"{name} {version}" for name, version in provenance.versions.items())
    facts = f"{provenance.device}, {provenance.num_threads} threads, {provenance.dtype}, seed {provenance.seed}"
    commit = provenance.git_commit or "not in a repository"
    parts += [
        "## Where the numbers come from",
        block(provenance.command, "bash"),
        prose(f"{provenance.date_utc}; {facts}; commit {commit}; {versions}"),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def write_markdown(path: Path, text: str) -> None:
    """Write a Markdown file in one step.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
