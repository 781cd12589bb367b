"""The figures of a bench: ways, sweeps over batches and contexts, Eq. 1 against the measurement, gamma."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..intervals import Estimate
from ..pictures import save_figure
from .report import BenchReport, CellReport
from .ways import BASELINE

logger = logging.getLogger(__name__)

DPI = 110


def draw_figures(report: BenchReport, folder: Path) -> dict[str, str]:
    """Write what there is to draw; file names by figure. Nothing without matplotlib, which is said once.

    Raises:
        OSError: a file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning('no figures without matplotlib: pip install "dspark-hf[eval]"')
        return {}
    drawn = {}
    for name, draw in _FIGURES.items():
        figure = Figure(figsize=(7.5, 4.2), layout="constrained")
        if draw(report, figure.subplots()):
            path = folder / f"bench-{name}.png"
            save_figure(figure, path, dpi=DPI)
            drawn[name] = path.name
    return drawn


def _ways(report: BenchReport, axes: Any) -> bool:
    main = report.cell("main")
    rows = [] if main is None else [(w.way, w.speed_over[BASELINE]) for w in main.ways if BASELINE in w.speed_over]
    for place, (_, ratio) in enumerate(rows):
        axes.barh(place, ratio.value or 0.0, color="tab:blue", alpha=0.6)
        axes.errorbar(ratio.value or 0.0, place, xerr=_bars([ratio]), color="black", capsize=3)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.axvline(1.0, color="grey", linewidth=1)
    axes.set(xlabel=f"tokens per second over {BASELINE}", title="single prompts, 95 % intervals over prompts")
    axes.invert_yaxis()
    return bool(rows)


def _sweep(report: BenchReport, axes: Any, kind: str, label: str, point: Callable[[CellReport], int | None]) -> bool:
    cells = [cell for cell in report.cells if cell.cell.kind == kind and cell.ways]
    names = list(dict.fromkeys(way.way for cell in cells for way in cell.ways if BASELINE in way.speed_over))
    for name in names:
        found = [
            (point(cell), way.speed_over[BASELINE])
            for cell in cells
            for way in cell.ways
            if way.way == name and BASELINE in way.speed_over
        ]
        ratios = [ratio for _, ratio in found]
        axes.errorbar(
            [x for x, _ in found], [r.value or 0.0 for r in ratios], yerr=_bars(ratios), fmt="o-", capsize=3, label=name
        )
    axes.axhline(1.0, color="grey", linewidth=1)
    axes.set(xlabel=label, ylabel=f"tokens per second over {BASELINE}", xscale="log")
    ticks = [point(cell) for cell in cells]
    axes.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    if names:
        axes.legend(fontsize="small")
    return bool(names)


def _batches(report: BenchReport, axes: Any) -> bool:
    return _sweep(report, axes, "batch", "prompts that share forwards", lambda cell: cell.cell.num_rows)


def _contexts(report: BenchReport, axes: Any) -> bool:
    return _sweep(report, axes, "context", "tokens of each prompt", lambda cell: cell.cell.context)


def _prediction(report: BenchReport, axes: Any) -> bool:
    """Stacked: what Eq. 1 says, and the parts of the difference, against the measurement."""
    splits = [split for cell in report.cells for split in cell.latency]
    names = list(dict.fromkeys(name for split in splits for name in split.parts))
    for place, split in enumerate(splits):
        axes.barh(place, 1000 * split.predicted_s, color="lightgrey", label="Eq. 1" if place == 0 else None)
        right, left = split.predicted_s, 0.0
        for number, name in enumerate(names):
            part = split.parts.get(name, 0.0)
            start = right if part >= 0 else left + part
            axes.barh(
                place, 1000 * abs(part), left=1000 * start, color=f"C{number}", label=name if place == 0 else None
            )
            right, left = (right + part, left) if part >= 0 else (right, left + part)
        axes.plot(1000 * split.measured_s, place, "k|", markersize=12, label="measured" if place == 0 else None)
    axes.set_yticks(range(len(splits)), [f"{split.cell}: {split.way}" for split in splits], fontsize="x-small")
    axes.set(xlabel="milliseconds a token", title="Eq. 1, and what it leaves out")
    axes.invert_yaxis()
    if splits:
        axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return bool(splits)


def _gamma(report: BenchReport, axes: Any) -> bool:
    for advice in report.gamma:
        gammas = [point.gamma for point in advice.points]
        ratios = [point.speed_ratio for point in advice.points]
        label = f"{advice.drafter}, {advice.num_rows} rows"
        axes.errorbar(gammas, [r.value or 0.0 for r in ratios], yerr=_bars(ratios), fmt="o-", capsize=3, label=label)
    axes.axhline(1.0, color="grey", linewidth=1)
    axes.set(xlabel="gamma, drafts verified a round", ylabel="expected speed over plain generation")
    axes.grid(alpha=0.3)
    if report.gamma:
        axes.legend(fontsize="small")
    return bool(report.gamma)


_FIGURES: dict[str, Callable[[BenchReport, Any], bool]] = {
    "ways": _ways,
    "batches": _batches,
    "contexts": _contexts,
    "prediction": _prediction,
    "gamma": _gamma,
}


def _bars(estimates: Sequence[Estimate]) -> list[list[float]]:
    """Lengths of error bars downwards and upwards; 0 where there is no interval."""
    downwards = [0.0 if one.low is None else max(0.0, (one.value or 0.0) - one.low) for one in estimates]
    upwards = [0.0 if one.high is None else max(0.0, one.high - (one.value or 0.0)) for one in estimates]
    return [downwards, upwards]
