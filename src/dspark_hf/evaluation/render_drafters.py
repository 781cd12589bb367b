"""A report about drafters as tables."""

from rich import box
from rich.console import Console
from rich.table import Table

from .drafters import DraftersReport
from .intervals import LEVEL, Estimate


def render_drafters(report: DraftersReport, console: Console) -> None:
    """Print a report."""
    counts = ", ".join(f"{n} at temperature {t}" for t, n in report.num_texts.items())
    console.print(f"target {report.target}, {report.provenance.dtype}; texts: {counts}", markup=False, highlight=False)
    console.print(f"tau: tokens per round, bonus counted; {LEVEL:.0%} intervals by bootstrap over prompts")
    for score in report.scores:
        mode = "greedy" if score.temperature == 0 else f"temperature {score.temperature:g}"
        table = Table("domain", "tau", "interval", "prompts", title=f"{score.drafter}, {mode}", box=box.SIMPLE)
        rows = {name: value for name, value in score.tau.items() if name != "all"}
        rows |= {"mean of domains": score.mean_tau, "pooled": score.tau["all"]}
        for name, value in rows.items():
            table.add_row(name, *_cells(value), str(value.n))
        console.print(table)
        slots = Table("slot", "conditional acceptance", "confidence AUC", "confidence ECE", box=box.SIMPLE)
        for k, acceptance in enumerate(score.conditional_acceptance):
            confidence = [values[k] if values else None for values in (score.confidence_auc, score.confidence_ece)]
            cells = ["-" if value is None else f"{value:.3f}" for value in confidence]
            slots.add_row(str(k + 1), f"{acceptance:.3f}", *cells)
        console.print(slots)
    if report.differences:
        table = Table(
            "drafter", "baseline", "temperature", "tau difference", "interval", title="paired", box=box.SIMPLE
        )
        for difference in report.differences:
            pair = (difference.drafter, difference.baseline, f"{difference.temperature:g}")
            table.add_row(*pair, *_cells(difference.tau))
        console.print(table)


def _cells(value: Estimate) -> tuple[str, str]:
    middle = "-" if value.value is None else f"{value.value:.3f}"
    if value.low is None or value.high is None:
        return middle, "-"
    return middle, f"{value.low:.3f} to {value.high:.3f}"
