"""A calibration's report as tables."""

from rich import box
from rich.console import Console
from rich.table import Table

from ..fitting.sts import MIN_OUTCOMES, MIN_PROPOSALS
from .calibration import CalibrationReport
from .intervals import LEVEL, Estimate


def render_calibration(report: CalibrationReport, console: Console) -> None:
    """Print a report."""
    console.print(
        f"target {report.target}, drafter {report.drafter}, {report.provenance.dtype}; survival of the first k drafts, "
        f"{LEVEL:.0%} intervals by bootstrap over held-out prompts; {report.held_out_use}",
        markup=False,
        highlight=False,
    )
    for mode, result in report.modes.items():
        settings = ", ".join(f"{name} {value:g}" for name, value in result.settings.items())
        title = (
            f"{mode} ({settings}): fitted on {result.num_fitted} rounds of {result.num_fitted_prompts} prompts, judged "
            f"on {result.num_held_out} of {result.num_held_out_prompts}"
        )
        columns = ("slot", "map", "accepted", "ECE before", "ECE after", "floor", "AUC after", "Brier before", "after")
        table = Table(*columns, title=title, box=box.SIMPLE)
        for k, slot in enumerate(result.slots):
            fitted = f"T {result.temperatures[k]:.3f}"
            if result.platt is not None:
                fitted = "a {:.3f} b {:.3f}".format(*result.platt[k])
            table.add_row(
                str(slot.slot),
                fitted,
                f"{slot.share_accepted:.3f}",
                _cell(slot.before.ece),
                _cell(slot.after.ece),
                f"{slot.ece_floor:.4f}",
                _cell(slot.after.auc),
                f"{slot.before.brier.value:.4f}",
                f"{slot.after.brier.value:.4f}",
            )
        means = (f"{m:.4f}" for m in (result.mean_ece_before, result.mean_ece_after, result.mean_ece_floor))
        table.add_row("mean", "", "", *means, "", "", "")
        console.print(table)
        if result.slots_not_fitted:
            console.print(
                f"left as they are, since a map needs {MIN_PROPOSALS} verified rounds with {MIN_OUTCOMES} accepted and "
                f"as many rejected prefixes: {result.slots_not_fitted}; a higher --num-proposals records more",
                highlight=False,
                soft_wrap=True,
            )
        if result.slots_left_as_they_are:
            console.print(f"left as they are, since no map was better on held-out: {result.slots_left_as_they_are}")
        if not result.is_written:
            console.print(f"not written: slots {result.slots_worse} are worse than before")


def _cell(value: Estimate) -> str:
    if value.value is None:
        return "-"
    if value.low is None or value.high is None:
        return f"{value.value:.4f}"
    return f"{value.value:.4f} ({value.low:.4f} to {value.high:.4f})"
