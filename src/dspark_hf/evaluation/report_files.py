"""Where a drafter's folder keeps the reports and figures that its card is made of."""

from pathlib import Path
from typing import Any

from .provenance import write_report

# Travels with the drafter, so nothing lies in it that is not meant to be shared.
REPORTS_FOLDER = "reports"
# What a report can be of. Files are named `<kind>.json` or `<kind>-<label>.json`; a figure has its report's name.
KINDS = ("training", "evaluation", "calibration", "speed", "batches")


def report_path(drafter_folder: Path, name: str) -> Path:
    """Path of the report `name`, a kind and perhaps a label; its folder is made."""
    folder = drafter_folder / REPORTS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.json"


def keep_report(drafter_folder: Path, name: str, content: dict[str, Any]) -> Path:
    """Write a report into a drafter's folder, scrubbed; the path of its figure, which the caller may draw.

    Raises:
        OSError: it cannot be written.
    """
    path = report_path(drafter_folder, name)
    write_report(path, content)
    return path.with_suffix(".png")
