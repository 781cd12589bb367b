"""Figures of a simulation: like the paper's 7 and 8 with its curves beside ours, and what changes over time."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..pictures import save_figure
from .loads import Points, curve, gain_at_load, loads_of
from .paper import MOST_USERS, PaperModel, at_most_users, columns, gain_at_users, paper_models
from .series import Series
from .study import MachineResult, SimulationReport
from .systems import MTP

logger = logging.getLogger(__name__)

DPI = 110
PAPER_COLOURS = ("0.25", "0.6")


def draw_figures(report: SimulationReport, folder: Path) -> list[Path]:
    """Draw into `folder`; the files written, none without matplotlib.

    Raises:
        OSError: one cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning('no figures without matplotlib: pip install "dspark-hf[eval]"')
        return []
    written = []
    drawings = {
        "load_curves.png": (1, _load_curves),
        "budget.png": (2, _budget),
        "fairness.png": (1, _fairness),
        "shift.png": (2, _shift),
        "drift.png": (2, _drift),
    }
    for name, (num_rows, draw) in drawings.items():
        machines = [one for one in report.machines if name != "shift.png" or one.shift]
        if not machines:
            continue
        figure = Figure(figsize=(1 + 5.5 * len(machines), 0.6 + 3.8 * num_rows), layout="constrained")
        panels = figure.subplots(num_rows, len(machines), squeeze=False)
        for column, machine in enumerate(machines):
            draw(list(panels[:, column]), machine)
        save_figure(figure, folder / name, dpi=DPI)
        written.append(folder / name)
    return written


def _systems(points: Points) -> list[str]:
    return list(dict.fromkeys(point.system for point in points))


def _means(points: Points, system: str, name: str) -> list[float]:
    return [point.estimate(name).value or float("nan") for point in curve(points, system)]


# -- loads ------------------------------------------------------------------------------------------------------------


def _load_curves(panels: Sequence[Any], machine: MachineResult) -> None:
    """Figure 7, both axes over MTP-1 at its highest load; without MTP-1 as they are."""
    axes, points = panels[0], machine.closed
    has_mtp = MTP in _systems(points)
    scale_x = _means(points, MTP, "user_tok_s_mean")[-1] if has_mtp else 1.0
    scale_y = _means(points, MTP, "throughput_tok_s")[-1] if has_mtp else 1.0
    for system in _systems(points):
        x = np.array(_means(points, system, "user_tok_s_mean")) / scale_x
        y = np.array(_means(points, system, "throughput_tok_s")) / scale_y
        axes.plot(x, y, "o-", markersize=3, label=system)
    if has_mtp:
        for model, colour in zip(paper_models(), PAPER_COLOURS, strict=True):
            _paper_load_curves(axes, model, colour)
    unit = f", over {MTP} at its highest load" if has_mtp else ", tokens/s"
    axes.set(title=machine.name, xlabel=f"speed of a user{unit}", ylabel=f"throughput{unit}", yscale="log")
    _finish(axes)


def _paper_load_curves(axes: Any, model: PaperModel, colour: str) -> None:
    speed, throughput = at_most_users(model)
    for system, style in (("mtp-1", ":"), ("dspark", "--")):
        x, y = columns(model.user_speed_and_throughput[system])
        axes.plot(x / speed, y / throughput, style, color=colour, label=f"paper {model.name}, {system}")


def _budget(panels: Sequence[Any], machine: MachineResult) -> None:
    """Figure 8: verified tokens of a row, and the gain at as many users."""
    points = machine.closed
    largest = loads_of(points)[-1]
    for system in _systems(points):
        x = [point.load / largest for point in curve(points, system)]
        panels[0].plot(x, _means(points, system, "budget"), "o-", markersize=3, label=system)
        gains = [gain_at_load(points, system, MTP, point.load) for point in curve(points, system)]
        if any(gain is not None for gain in gains):
            middle = [float("nan") if gain is None else gain.value for gain in gains]
            panels[1].plot(x, middle, "o-", markersize=3, label=system)
    shared = np.linspace(0.1, 1, 19)
    for model, colour in zip(paper_models(), PAPER_COLOURS, strict=True):
        users, budget = columns(model.budget["dspark"])
        panels[0].plot(users / MOST_USERS, budget, "--", color=colour, label=f"paper {model.name}")
        panels[1].plot(
            shared, gain_at_users(model, shared * MOST_USERS), "--", color=colour, label=f"paper {model.name}"
        )
    label = f"users, over the most: {largest:g} here, {MOST_USERS:g} of the paper"
    panels[0].set(title=machine.name, xlabel=label, ylabel="verified tokens of a row, anchor counted")
    panels[1].set(xlabel=label, ylabel=f"throughput over {MTP} with as many users")
    for axes in panels:
        _finish(axes)


def _fairness(panels: Sequence[Any], machine: MachineResult) -> None:
    """How alike users' speeds are in the largest closed loop."""
    axes, largest = panels[0], loads_of(machine.closed)[-1]
    points = [point for point in machine.closed if point.load == largest] + machine.floor
    places = np.arange(len(points))
    for offset, (name, label) in enumerate(
        (("slowest_to_median", "slowest 5 % / median speed"), ("starved_share", "share of requests that starve"))
    ):
        estimates = [point.estimate(name) for point in points]
        values = np.array([estimate.value or 0.0 for estimate in estimates])
        halves = [0.0 if one.high is None or one.value is None else one.high - one.value for one in estimates]
        axes.barh(places + 0.4 * offset, values, 0.4, xerr=halves, label=label)
    axes.set_yticks(places + 0.2, [point.system for point in points], fontsize="small")
    axes.set(title=f"{machine.name}, {largest:g} users", xlim=(0, 1.05))
    axes.invert_yaxis()
    axes.legend(fontsize="x-small")


# -- over time --------------------------------------------------------------------------------------------------------


def _shift(panels: Sequence[Any], machine: MachineResult) -> None:
    """Throughput and budget while the mix of domains changes."""
    assert machine.shift_domains is not None
    before, after = machine.shift_domains
    for system, runs in machine.shift.items():
        _over_time(panels[0], runs, "tokens_per_s", system)
        _over_time(panels[1], runs, "budget", system)
    panels[0].set(title=f"{machine.name}, {machine.study_users} users: {before}, then {after}", ylabel="tokens/s")
    panels[1].set(ylabel="verified tokens of a row", xlabel="seconds")
    _finish_studies(panels, machine)


def _drift(panels: Sequence[Any], machine: MachineResult) -> None:
    """Throughput, and predicted minus realised survival, while the confidence head becomes wrong."""
    for name, runs in machine.drift.items():
        _over_time(panels[0], runs, "tokens_per_s", name)
        _over_time(panels[1], runs, "survival_gap", name)
        for series in runs if name.endswith("again") else ():
            for axes in panels:
                for time_s, style in ((series.warned_s, ":"), (series.refitted_s, "--")):
                    if time_s is not None:
                        axes.axvline(time_s, color="0.5", linestyle=style, linewidth=0.6)
    panels[0].set(title=f"{machine.name}, {machine.study_users} users (: warned, -- fitted again)", ylabel="tokens/s")
    panels[1].set(ylabel="predicted - realised survival", xlabel="seconds")
    _finish_studies(panels, machine)


def _over_time(axes: Any, runs: Sequence[Series], name: str, label: str) -> None:
    """The mean over seeds, and all between the lowest and the highest."""
    values = np.array([[np.nan if v is None else v for v in getattr(series, name)] for series in runs], dtype=float)
    is_known = np.isfinite(values).all(axis=0)
    times = ((np.arange(values.shape[1]) + 0.5) * runs[0].bin_s)[is_known]
    (line,) = axes.plot(times, values[:, is_known].mean(axis=0), label=label)
    low, high = values[:, is_known].min(axis=0), values[:, is_known].max(axis=0)
    axes.fill_between(times, low, high, alpha=0.15, color=line.get_color())


def _finish_studies(panels: Sequence[Any], machine: MachineResult) -> None:
    for axes in panels:
        axes.axvline(machine.change_s, color="0.2", linewidth=0.8)
        _finish(axes)


def _finish(axes: Any) -> None:
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")
