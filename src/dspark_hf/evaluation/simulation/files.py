"""A simulation's files."""

import os
from pathlib import Path

from ..provenance import check_can_write, write_report
from .figures import draw_figures
from .render import to_markdown
from .study import SimulationReport

JSON_NAME, MARKDOWN_NAME = "simulation.json", "simulation.md"


def prepare(folder: Path) -> None:
    """Make the folder, and find out before a long run whether reports can be written to it.

    Raises:
        OSError: they cannot.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (JSON_NAME, MARKDOWN_NAME):
        check_can_write(folder / name)


def write(report: SimulationReport, folder: Path) -> list[Path]:
    """JSON, Markdown and figures, each in one step; what was written.

    Raises:
        OSError: one cannot be written.
    """
    write_report(folder / JSON_NAME, report.to_dict())  # first: whatever happens later, the numbers are kept
    page = folder / MARKDOWN_NAME
    partial = page.with_name(f".{page.name}.{os.getpid()}.partial")
    try:
        partial.write_text(to_markdown(report), encoding="utf-8")
        os.replace(partial, page)
    finally:
        partial.unlink(missing_ok=True)
    return [folder / JSON_NAME, page, *draw_figures(report, folder)]
