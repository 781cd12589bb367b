"""An ablation's report as tables for a terminal."""

from rich import box
from rich.console import Console
from rich.table import Table

from .ablation import SCHEDULES, AblationReport
from .intervals import LEVEL


def render_ablation(report: AblationReport, console: Console) -> None:
    """Print speed over plain decoding, by machine and load; the page and the JSON hold the rest."""
    for fact in report.traces:
        console.print(
            f"{fact.mode}: {fact.file}, tau of whole drafts {fact.tau:.2f}; tuned on {fact.num_tuning} prompts, judged "
            f"on {fact.num_judged}; tokens per unit of time over plain decoding, * where the {LEVEL:.0%} interval of "
            "the difference from the better static schedule excludes 0",
            markup=False,
            highlight=False,
        )
    names = [name for name in SCHEDULES if name != "plain"]
    panels = dict.fromkeys((cell.mode, cell.machine) for cell in report.cells)
    for mode, machine in panels:
        table = Table("rows", *names, title=f"{mode}, step time {machine}", box=box.SIMPLE)
        cells = [cell for cell in report.cells if (cell.mode, cell.machine) == (mode, machine)]
        for num_rows in dict.fromkeys(cell.num_rows for cell in cells):
            row = [str(num_rows)]
            for name in names:
                cell = next(c for c in cells if (c.num_rows, c.policy) == (num_rows, name))
                speed = None if cell.over_plain is None else cell.over_plain.value
                static = cell.over_static
                is_clear = static is not None and static.low is not None and static.high is not None
                mark = "*" if is_clear and (static.low > 0 or static.high < 0) else ""  # type: ignore[union-attr,operator]
                row.append("-" if speed is None else f"{1 + speed:.2f}{mark}")
            table.add_row(*row)
        console.print(table)
    peeking = [name for name, one in report.lookahead.items() if one.num_violations]
    console.print(f"policies whose decisions follow from later slots: {', '.join(peeking) or 'none'}", highlight=False)
