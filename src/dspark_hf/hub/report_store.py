"""The reports in a drafter's folder: which there are, whether they are of these weights, and new ones."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import zoo
from ..checkpoints.digest import checkpoint_facts
from ..configuration_dspark import DSparkConfig
from ..errors import ReportError
from ..evaluation.report_files import KINDS, REPORTS_FOLDER, keep_report
from .fields import Fields, read_object

# What a command writes for its own user, such as one entry for each prompt or step; a card shows none of it.
_BULK = frozenset({"prompts", "texts", "history", "bins", "groups", "depths", "reliability"})
_LABEL = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class StoredReport:
    """One report of a drafter's folder.

    Attributes:
        kind: One of `KINDS`.
        name: Of its file, without suffix.
        fields: Its content.
        figure: Name of the figure's file beside it, if there is one.
        why_not_shown: Why a card may not show it; None: it is of these weights and this calibration.
    """

    kind: str
    name: str
    fields: Fields
    figure: str | None
    why_not_shown: str | None


def read_reports(folder: Path, sha256: str) -> list[StoredReport]:
    """All reports of a folder, sorted by kind and name.

    Args:
        folder: The drafter's.
        sha256: Of its weights.

    Raises:
        ReportError: one is damaged, or its name says no kind.
    """
    found = []
    for path in sorted((folder / REPORTS_FOLDER).glob("*.json")):
        if path.name == ABOUT_NAME:
            continue
        fields = read_object(path)
        kind = kind_of(fields)
        if path.stem != kind and not path.stem.startswith(f"{kind}-"):
            raise ReportError(f"{path} holds a report of kind {kind!r}; name it {kind}.json or {kind}-<label>.json")
        figure = path.with_suffix(".png")
        why = None if sha256 in digests_of(fields) else "it is of other weights"
        found.append(StoredReport(kind, path.stem, fields, figure.name if _is_png(figure) else None, why))
    return sorted(found, key=lambda report: (KINDS.index(report.kind), report.name))


def add_report(folder: Path, file: Path) -> Path:
    """Copy a report, and the figure of its name, into a drafter's folder: scrubbed, without what a card never shows.

    A report takes the place of one of the same kind, and of the same label where the file's name is `<kind>-<label>`.

    Args:
        folder: The drafter's.
        file: As `dspark eval`, `dspark compare`, `dspark calibrate`, `dspark train` or `scripts/batch_speed.py` wrote
            it.

    Returns:
        Where it lies now.

    Raises:
        ReportError: it is damaged, of no known kind, or of other weights.
        CheckpointFormatError: the folder holds no drafter.
        OSError: the folder cannot be written.
    """
    fields = read_object(file)
    kind = kind_of(fields)
    sha256, theirs = checkpoint_facts(folder).sha256, digests_of(fields)
    if sha256 not in theirs:
        of = ", ".join(sorted(one[:12] for one in theirs)) or "not said which"
        raise ReportError(
            f"{file} is a report of other weights ({of}) than those in {folder} ({sha256[:12]}); measure this drafter, "
            "or name the folder of the other one"
        )
    label = file.stem.removeprefix(f"{kind}-")
    name = f"{kind}-{label}" if label != file.stem and _LABEL.fullmatch(label) else kind
    content = _without_bulk(fields.content)
    source = file.with_suffix(".png")
    figure = keep_report(folder, name, content)
    if _is_png(source) and not (figure.exists() and figure.samefile(source)):
        shutil.copyfile(source, figure)
    elif not _is_png(source):
        figure.unlink(missing_ok=True)  # of the report that was here before
    return figure.with_suffix(".json")


def kind_of(fields: Fields) -> str:
    """What a report is of.

    Raises:
        ReportError: it does not say, or something unknown.
    """
    kind = fields.text("kind")
    if kind not in KINDS:
        raise ReportError(
            f"{fields.where}: kind must be one of {', '.join(KINDS)}, got {kind!r}; reports of older releases do not "
            "say it, make them again"
        )
    return kind


def digests_of(fields: Fields) -> set[str]:
    """sha256 of the weights of all drafters that a report is of."""
    pairs = [fields.one("pair"), *fields.named("pairs").values()]
    return {found for pair in pairs if (found := pair.text("drafter_sha256"))}


# --- what no report says -------------------------------------------------------------------------------------------

ABOUT_NAME = "about.json"
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,60}")


@dataclass(frozen=True)
class About:
    """What a drafter's author says about it, for the card's metadata."""

    base_model: str | None = None
    license: str | None = None


def read_about(folder: Path) -> About:
    """What was kept by `keep_about`.

    Raises:
        ReportError: the file is damaged.
    """
    path = folder / REPORTS_FOLDER / ABOUT_NAME
    if not path.is_file():
        return About()
    fields = read_object(path)
    return _checked(About(fields.text("base_model"), fields.text("license")))


def keep_about(folder: Path, about: About) -> None:
    """Keep it in a drafter's folder; what is None stays as it was.

    Raises:
        ReportError: a value cannot stand in a card.
    """
    before = read_about(folder)
    _checked(about)
    content = {
        "base_model": about.base_model or before.base_model,
        "license": about.license or before.license,
    }
    keep_report(folder, ABOUT_NAME.removesuffix(".json"), content)


def _checked(about: About) -> About:
    if about.base_model is not None and not zoo.is_hub_id(about.base_model):
        raise ReportError(f"base_model must be a Hub id (owner/name), got {about.base_model!r}; pass the target's")
    if about.license is not None and not _LICENSE.fullmatch(about.license):
        raise ReportError(f"license must be an identifier of the Hub, like apache-2.0 or other, got {about.license!r}")
    return about


# --- helpers -------------------------------------------------------------------------------------------------------


def calibration_entry(mode: Fields) -> dict[str, Any]:
    """What `DSparkConfig.calibration` holds after the fit that a report's mode tells of, as far as it says so."""
    platt = mode.content.get("platt")
    return {
        "temperatures": _rounded(mode.numbers("temperatures")),
        "platt": None if platt is None else [_rounded(pair) for pair in _pairs(mode, platt)],
    }


def is_in_config(config: DSparkConfig, name: str, mode: Fields) -> bool:
    """Whether the drafter has the calibration that a report tells of."""
    entry = (config.calibration or {}).get(name)
    return entry is not None and all(entry.get(key) == value for key, value in calibration_entry(mode).items())


def _rounded(values: list[float | None]) -> list[float | None]:
    return [None if value is None else round(value, 6) for value in values]


def _pairs(mode: Fields, platt: Any) -> list[list[float | None]]:
    if not isinstance(platt, list):
        mode.numbers("platt")
    return [Fields({"platt": pair}, mode.where).numbers("platt") for pair in platt]


def _without_bulk(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _without_bulk(value) for key, value in content.items() if key not in _BULK}
    if isinstance(content, list):
        return [_without_bulk(value) for value in content]
    return content


def _is_png(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_PNG_SIGNATURE)) == _PNG_SIGNATURE
