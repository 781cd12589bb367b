"""A drafter's card: the README.md of its folder, made of its config, its reports and their provenance."""

import hashlib
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, StrictUndefined, Template

from .. import zoo
from ..checkpoints.digest import checkpoint_facts
from ..configuration_dspark import DSparkConfig
from ..errors import ReportError
from ..evaluation.provenance import check_can_write
from ..evaluation.report_files import KINDS, REPORTS_FOLDER
from ..evaluation.scrub import scrub_any
from . import card_facts as of_pair
from .files import CARD_NAME as CARD_NAME
from .markdown import MAX_READ_LENGTH, Safe, block, escape, prose
from .metadata import metadata_block
from .numbers import count
from .report_store import StoredReport, read_about, read_reports
from .report_views import (
    batches_view,
    evaluation_metrics,
    evaluation_view,
    speed_metrics,
    speed_view,
)
from .run_views import (
    calibration_metrics,
    calibration_view,
    commands_of,
    config_calibration,
    hub_datasets,
    sources_table,
    training_view,
)

# Of the package; no package index has it.
INSTALL = "pip install .  # in a clone of dspark_hf"

_MARK = re.compile(r"\n<!-- rendered by `dspark card`, ([0-9a-f]{16}); [^\n]*-->\n")


def render_card(
    folder: Path, *, repo_id: str | None = None, reports_at: str = REPORTS_FOLDER, tags: Sequence[str] = ()
) -> str:
    """The text of a drafter's card. The same folder always gives the same text.

    Args:
        folder: The drafter's; `reports/` in it holds what was measured, `notes.md` what its author has to say.
        repo_id: Hub id that the drafter is, or will be, shared under; None for a card that is read locally.
        reports_at: Where the card finds `reports/`, as a relative address.
        tags: Of the Hub, besides those of every drafter.

    Raises:
        CheckpointFormatError, DSparkConfigError: the folder holds no drafter.
        ReportError: a report or `notes.md` is damaged, or `repo_id` is no Hub id.
    """
    folder = Path(folder)
    if repo_id is not None and not zoo.is_hub_id(repo_id):
        raise ReportError(f"repo_id must be a Hub id (owner/name), got {repo_id!r}")
    facts = checkpoint_facts(folder)
    config: DSparkConfig = DSparkConfig.from_pretrained(folder)
    reports = read_reports(folder, facts.sha256)
    calibrations = of_pair.checked_calibrations([one for one in reports if one.why_not_shown is None], config)
    shown, not_shown = _sorted_out(reports, [report for report, _ in calibrations])
    by_kind = {kind: [report for report in shown if report.kind == kind] for kind in KINDS}
    about = read_about(folder)
    target = of_pair.target_facts(shown, about, facts.sha256)
    name = repo_id or folder.resolve().name
    metrics = [metric for report in by_kind["evaluation"] for metric in evaluation_metrics(report, facts.sha256)]
    metrics += [metric for report in by_kind["speed"] for metric in speed_metrics(report)]
    metrics += [metric for report, mode in calibrations for metric in calibration_metrics(report, mode)]
    metadata = metadata_block(
        name,
        base_model=target.hub_id,
        license_id=about.license,
        datasets=hub_datasets(by_kind["training"]),
        metrics=metrics,
        tags=tags,
    )
    target_link = of_pair.target_link(target)
    commands = commands_of(shown)
    context = {
        "name": name,
        "install": Safe(INSTALL),
        "metadata": Safe(metadata),
        "target": target_link,
        "target_is_known": target.name is not None,
        "snippet": block(of_pair.snippet(folder, repo_id, target), "python"),
        "architecture": of_pair.architecture_table(config, target_link),
        "config": config,
        "evaluations": [evaluation_view(report, facts.sha256) for report in by_kind["evaluation"]],
        "speeds": [speed_view(report) for report in by_kind["speed"]],
        "batches": [batches_view(report) for report in by_kind["batches"]],
        "calibrations": [calibration_view(report, mode) for report, mode in calibrations],
        "noted_calibrations": config_calibration(config, {mode for _, mode in calibrations}),
        "trainings": [training_view(report) for report in by_kind["training"]],
        "chat_templates": of_pair.chat_templates(shown, facts.sha256),
        "sizes": of_pair.size_table(facts, target),
        "target_was_measured": target.num_parameters is not None,
        "cache_bytes": of_pair.cache_bytes_per_token(config),
        "sources": sources_table(shown) if shown else None,
        "commands": block([scrub_any(command[:MAX_READ_LENGTH]) for command in commands], "bash") if commands else None,
        "not_shown": not_shown,
        "notes": of_pair.read_notes(folder),
        "reports_at": Safe(reports_at),
    }
    return _marked(_template().render(context))


def _sorted_out(
    reports: list[StoredReport], calibrations: list[StoredReport]
) -> tuple[list[StoredReport], list[tuple[str, str]]]:
    """Reports that the card shows; names of the others, with the reason."""
    shown, not_shown = [], []
    for report in reports:
        why = report.why_not_shown
        if why is None and report.kind == "calibration" and report not in calibrations:
            why = "it is of another calibration than the one in config.json"
        if why is None:
            shown.append(report)
        else:
            not_shown.append((f"{report.name}.json", why))
    return shown, not_shown


@cache
def _template() -> Template:
    # `finalize` sees every value that the template writes, so nothing from outside gets past it; HTML alone would not
    # do, hence no `autoescape`.
    environment = Environment(
        undefined=StrictUndefined,
        finalize=escape,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters |= {"prose": prose, "count": count}
    return environment.from_string((Path(__file__).parent / "template.md").read_text(encoding="utf-8"))


# --- the file ------------------------------------------------------------------------------------------------------


def reports_address(folder: Path, card: Path) -> str:
    """Where a card finds the reports of a drafter, relative to itself."""
    address = os.path.relpath((folder / REPORTS_FOLDER).resolve(), card.parent.resolve())
    return quote(address.replace(os.sep, "/"))


def is_rendered(text: str) -> bool:
    """Whether a card was rendered by `render_card` and not changed since."""
    found = _MARK.search(text)
    return found is not None and found[1] == _digest(_MARK.sub("\n", text, count=1))


def write_card(path: Path, text: str, *, replace: bool = False) -> None:
    """Write a card in one step.

    Args:
        replace: Whether it may take the place of a text that was written or changed by hand.

    Raises:
        ReportError: it may not, and there is one.
        OSError: the file cannot be written.
    """
    if path.exists() and not replace and not is_rendered(path.read_text(encoding="utf-8", errors="replace")):
        raise ReportError(
            f"{path} was written or changed by hand and would be lost; move your text into {of_pair.NOTES_NAME} of the "
            "drafter's folder, name another output, or pass --replace"
        )
    check_can_write(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _marked(text: str) -> str:
    head, end, body = text.partition("\n---\n")
    assert end, "a card starts with its metadata"
    note = f"write text of your own into {of_pair.NOTES_NAME}"
    return f"{head}\n---\n<!-- rendered by `dspark card`, {_digest(text)}; {note} -->\n{body}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
