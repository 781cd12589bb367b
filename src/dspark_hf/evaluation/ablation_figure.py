"""An ablation's figure: speed over the load, a panel for each mode and machine."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .ablation import SCHEDULES, AblationReport
from .ablation_cells import Cell
from .intervals import Estimate
from .pictures import save_figure

logger = logging.getLogger(__name__)

_NAMES = [name for name in SCHEDULES if name != "plain"]
BANDED = "block"
_STYLES = {"hindsight": "--", "full": ":", "fixed": ":", "survival": ":"}


def plot_ablation(report: AblationReport, path: Path) -> bool:
    """Draw Theta over plain decoding's by rows; False without matplotlib.

    Raises:
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning('no figure without matplotlib: pip install "dspark-hf[eval]"')
        return False
    modes = list(dict.fromkeys(cell.mode for cell in report.cells))
    machines = [name for name in report.machines if any(cell.machine == name for cell in report.cells)]
    figure = Figure(figsize=(3.6 * len(machines) + 1.6, 3.2 * len(modes) + 0.4), layout="constrained")
    grid = figure.subplots(len(modes), len(machines), squeeze=False, sharey="row")
    for line, mode in zip(grid, modes, strict=True):
        for axes, machine in zip(line, machines, strict=True):
            _draw(axes, [cell for cell in report.cells if (cell.mode, cell.machine) == (mode, machine)])
            axes.set_title(f"{mode}, {machine}", fontsize="small")
        line[0].set_ylabel("tokens per unit of time over plain")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
    save_figure(figure, path, dpi=110)
    return True


def _draw(axes: Any, cells: Sequence[Cell]) -> None:
    """Lines of all schedules, and the 95 % interval of one: bands of all would hide the lines."""
    for number, name in enumerate(_NAMES):
        found = [(cell.num_rows, cell.over_plain) for cell in cells if cell.policy == name]
        points = [(n, e) for n, e in found if e is not None and e.value is not None]
        look = {"color": f"C{number}"}
        axes.plot(
            [n for n, _ in points],
            _ends(points, "value"),
            _STYLES.get(name, "-"),
            marker=".",
            linewidth=1.2,
            label=name,
            **look,
        )
        bands = [(n, e) for n, e in points if e.low is not None and name == BANDED]
        axes.fill_between([n for n, _ in bands], _ends(bands, "low"), _ends(bands, "high"), alpha=0.15, **look)
    axes.axhline(1.0, color="0.7", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("rows")
    axes.grid(alpha=0.3)


def _ends(points: Sequence[tuple[int, Estimate]], name: str) -> list[float]:
    return [1.0 + getattr(estimate, name) for _, estimate in points]
