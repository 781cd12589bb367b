"""An examination as text and tables."""

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .doctor import Examination, Finding
from .intervals import LEVEL, Estimate

_STYLES = {"fault": "bold red", "note": "yellow", "passed": "green", "not examined": "dim"}


def render_examination(report: Examination, console: Console) -> None:
    """Print every check, then what was found, each with its certainty and what mends it."""
    origin = report.provenance
    lines = {
        "target": f"{report.target}, {origin.dtype}",
        "drafter": report.drafter,
        "device": f"{origin.device}, {origin.num_threads} threads",
        "run": f"{origin.n} prompts, seed {origin.seed}",
    }
    for label, text in lines.items():
        console.print(f"{label:<8} {text}", markup=False, highlight=False, soft_wrap=True)
    console.print(_checks_table(report))
    if "acceptance" in report.measured:
        console.print(_slots_table(report))
    for kind, found in (("FAULT", report.faults), ("note", report.notes)):
        for check, finding in found:
            _print_finding(kind, check, finding, console)
    _print_verdict(report, console)


def _checks_table(report: Examination) -> Table:
    table = Table("check", "result", "", box=box.SIMPLE, pad_edge=False, show_edge=False)
    for one in report.outcomes:
        # Not markup: details hold names from files.
        table.add_row(one.check, Text(one.status, style=_STYLES[one.status]), Text(one.detail))
    return table


def _slots_table(report: Examination) -> Table:
    acceptance = report.measured["acceptance"]
    table = Table(
        "slot",
        "reached",
        "accepted",
        "conditional acceptance",
        title=f"tau {_told(acceptance['tau'])}, {acceptance['num_rounds']} rounds, {LEVEL:.0%} intervals over prompts",
        box=box.SIMPLE,
    )
    for slot in acceptance["slots"]:
        numbers = (slot["slot"], slot["num_reached"], slot["num_accepted"])
        table.add_row(*map(str, numbers), _told(slot["conditional_acceptance"]))
    return table


def _told(estimate: Estimate) -> str:
    if estimate.value is None:
        return "-"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.2f}"
    return f"{estimate.value:.2f} ({estimate.low:.2f} to {estimate.high:.2f})"


def _print_finding(kind: str, check: str, finding: Finding, console: Console) -> None:
    style = _STYLES["fault" if finding.is_fault else "note"]
    # Soft wrap: a terminal breaks long lines itself, a pipe gets them whole.
    console.print(f"{kind}, {check}: {finding.what}", style=style, markup=False, highlight=False, soft_wrap=True)
    for label, text in (("how sure", finding.certainty), ("mend", finding.mend)):
        console.print(f"  {label}: {text}", markup=False, highlight=False, soft_wrap=True)


def _print_verdict(report: Examination, console: Console) -> None:
    skipped = [one.check for one in report.outcomes if one.status == "not examined"]
    verdict = "no fault found" if report.is_healthy else f"{len(report.faults)} faults found"
    text = f"{verdict}, {len(report.notes)} notes" + (f"; not examined: {', '.join(skipped)}" if skipped else "")
    console.print(text, style="bold", markup=False, highlight=False, soft_wrap=True)
