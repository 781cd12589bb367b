"""Figures of an evaluation, in the manner of the paper's Figures 2 to 6, with the paper's own curves in grey."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..hub.numbers import mode_name
from .acceptance_tables import GroupScore
from .calibration_files import plot_reliability
from .data_sets import ALL
from .decoded import slug
from .drafters import DrafterScore, DraftersReport
from .intervals import LEVEL, Estimate
from .paper_curves import paper_offline_curves
from .pictures import save_figure
from .settings import ComparisonError
from .tau_tables import MEAN

DPI = 110
LEGEND_COLUMN_INCHES = 2.4
PAPER = {"color": "0.6", "linewidth": 1.2}
PAPER_MARKERS = {("DSpark", "1"): "v", ("DSpark", "2"): "^", ("DSpark", "5"): "D", ("DFlash", "5"): "s"}
PAPER_STYLES = {"DSpark": "-", "DFlash": "--", "Eagle3": ":", "DSpark, rnn head": "-."}


def check_can_draw() -> None:
    """Find out before a long run whether figures can be drawn.

    Raises:
        ComparisonError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ComparisonError('figures need matplotlib: pip install "dspark-hf[eval]"') from error


def draw_figures(report: DraftersReport, folder: Path) -> list[Path]:
    """Write a report's figures as PNG files; which there are depends on what was measured.

    Raises:
        ComparisonError: matplotlib is not installed.
        OSError: the folder cannot be written.
    """
    check_can_draw()
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []

    def keep(figure: Any, name: str) -> None:
        path = folder / f"{name}.png"
        save_figure(figure, path, dpi=DPI)
        paths.append(path)

    for temperature in dict.fromkeys(score.temperature for score in report.scores):
        mode = mode_name(temperature)
        scores = [score for score in report.scores if score.temperature == temperature]
        keep(_acceptance_by_slot(scores, mode), f"figure2-acceptance-by-slot-{slug_of_mode(temperature)}")
        keep(_tau_by_length(scores, mode), f"figure4-tau-by-length-{slug_of_mode(temperature)}")
        if any(depth.temperature == temperature for depth in report.depths):
            keep(_tau_by_depth(report, temperature), f"figure3-tau-by-depth-{slug_of_mode(temperature)}")
        for score in scores:
            if score.groups[ALL].thresholds:
                name = f"figure5-thresholds-{slug(score.drafter)}-{slug_of_mode(temperature)}"
                keep(_threshold_sweep(score, mode), name)
    for drafter, modes in report.reliability.items():
        path = folder / f"figure6-reliability-{slug(drafter)}.png"
        plot_reliability(modes, path, overlay=_paper_reliability())
        paths.append(path)
    return paths


def slug_of_mode(temperature: float) -> str:
    """A temperature as part of a file's name."""
    return "greedy" if temperature == 0 else f"t{temperature:g}"


def _panels(groups: Sequence[str], *, width: float = 4.2, sharey: bool = True) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, width * len(groups)), 4), layout="constrained")
    axes = list(figure.subplots(1, len(groups), squeeze=False, sharey=sharey)[0])
    for one, group in zip(axes, groups, strict=True):
        one.set_title(group)
        one.grid(alpha=0.3)
    return figure, axes


def _groups(scores: Sequence[DrafterScore]) -> list[str]:
    return list(dict.fromkeys(group for score in scores for group in score.groups))


def _with_error(axes: Any, x: Sequence[float], values: Sequence[Estimate], **style: Any) -> None:
    """A line with intervals; entries without a value are left out."""
    known = [(at, one) for at, one in zip(x, values, strict=True) if one.value is not None]
    y = [one.value or 0.0 for _, one in known]
    ends = [(one.value if end is None else end for end in (one.low, one.high)) for _, one in known]
    low, high = zip(*ends, strict=True) if ends else ((), ())
    errors = [
        [max(0.0, a - b) for a, b in zip(y, low, strict=True)],
        [max(0.0, b - a) for a, b in zip(y, high, strict=True)],
    ]
    axes.errorbar([at for at, _ in known], y, yerr=errors, marker="o", markersize=4, capsize=2, linewidth=1.5, **style)


def _whole_numbers(axes: Any, label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(label)


def _paper_line(axes: Any, x: Sequence[float], y: Sequence[float], drafter: str) -> None:
    axes.plot(x, y, linestyle=PAPER_STYLES.get(drafter, "-"), label=f"paper: {drafter}", zorder=1, **PAPER)


def _finish(figure: Any, title: str) -> Any:
    """Title, what is grey, and one legend for all panels."""
    curves = paper_offline_curves()
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        found, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, found, strict=True))
    num_columns = max(1, int(figure.get_figwidth() / LEGEND_COLUMN_INCHES))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=num_columns, fontsize="x-small")
    figure.suptitle(
        f"{title}; bars: {LEVEL:.0%} intervals over prompts\ngrey: {curves['source'].split(',')[0]}, "
        f"{curves['setting'].split(',')[0]}, temperature 1, read from its figures",
        fontsize="small",
    )
    return figure


def _acceptance_by_slot(scores: Sequence[DrafterScore], mode: str) -> Any:
    groups = _groups(scores)
    figure, panels = _panels(groups)
    for axes, group in zip(panels, groups, strict=True):
        for drafter, values in paper_offline_curves()["conditional_acceptance"].get(group, {}).items():
            _paper_line(axes, range(1, len(values) + 1), values, drafter)
        for score in scores:
            slots = score.groups[group].slots
            _with_error(axes, [s.slot for s in slots], [s.conditional_acceptance for s in slots], label=score.drafter)
        _whole_numbers(axes, "slot")
    panels[0].set_ylabel("acceptance, given all slots before")
    return _finish(figure, f"conditional acceptance by slot, {mode}")


def _tau_by_length(scores: Sequence[DrafterScore], mode: str) -> Any:
    groups = _groups(scores)
    figure, panels = _panels(groups)
    paper = paper_offline_curves()["tau_by_draft_length"]
    for axes, group in zip(panels, groups, strict=True):
        for drafter, values in paper.get(group, {}).items():
            _paper_line(axes, paper["num_draft_tokens"], values, drafter)
        for score in scores:
            lengths = score.groups[group].lengths
            _with_error(axes, [one.value for one in lengths], [one.tau for one in lengths], label=score.drafter)
        _whole_numbers(axes, "drafts per round (the paper counts the anchor too)")
    panels[0].set_ylabel("tau, tokens per round")
    return _finish(figure, f"accepted length by proposal length, {mode}")


def _tau_by_depth(report: DraftersReport, temperature: float) -> Any:
    from matplotlib.figure import Figure

    depths = [depth for depth in report.depths if depth.temperature == temperature]
    names = list(dict.fromkeys(name for depth in depths for name in depth.tau if name not in (ALL, MEAN)))
    columns = [*names, ALL, MEAN]
    figure = Figure(figsize=(1.5 + 1.1 * len(columns), 4.2), layout="constrained")
    axes = figure.subplots()
    for number, depth in enumerate(depths):
        at = [i + 0.6 * (number + 0.5) / len(depths) - 0.3 for i in range(len(columns))]
        label = f"{depth.family}, {_layers(depth.num_layers)}"
        _with_error(axes, at, [depth.tau[name] for name in columns], label=label, linestyle="none")
    for drafter, layers in paper_offline_curves()["tau_by_depth"].items():
        for num_layers, taus in layers.items():
            known = [(i, taus[name]) for i, name in enumerate(columns) if name in taus]
            if known:
                label = f"paper: {drafter}, {_layers(int(num_layers))}"
                marker = PAPER_MARKERS.get((drafter, num_layers), "o")
                style: dict[str, Any] = {"color": "0.6", "linestyle": "none", "markerfacecolor": "none"}
                axes.plot(*zip(*known, strict=True), marker=marker, label=label, zorder=1, **style)
    axes.set_xticks(range(len(columns)), columns, rotation=30, ha="right", fontsize="small")
    axes.set_ylabel("tau, tokens per round")
    axes.grid(alpha=0.3, axis="y")
    return _finish(figure, f"accepted length by depth, {mode_name(temperature)}")


def _layers(number: int) -> str:
    return "1 layer" if number == 1 else f"{number} layers"


def _threshold_sweep(score: DrafterScore, mode: str) -> Any:
    groups = list(score.groups)
    figure, panels = _panels(groups)
    for number, (axes, group) in enumerate(zip(panels, groups, strict=True)):
        _threshold_panel(axes, score.groups[group], paper_offline_curves()["threshold_sweep"], group)
        if number == 0:
            axes.set_ylabel("tokens per round, bonus counted (bars)")
    return _finish(figure, f"{score.drafter}: threshold on the raw confidence, {mode}")


def _threshold_panel(axes: Any, group: GroupScore, paper: Mapping[str, Any], name: str) -> None:
    points = group.thresholds
    at = [one.value for one in points]
    width = 0.8 * min((b - a for a, b in zip(sorted(at), sorted(at)[1:], strict=False)), default=0.1)
    accepted = [1 + _value(one.accepted) for one in points]
    axes.bar(at, accepted, width, color="tab:blue", alpha=0.5, label="accepted")
    rejected = [_value(one.rejected) for one in points]
    axes.bar(at, rejected, width, bottom=accepted, color="tab:orange", alpha=0.5, label="rejected")
    rates = axes.twinx()
    rates.set_ylim(0, 1)
    rates.set_ylabel("accepted of verified tokens (lines)", fontsize="small")
    _with_error(rates, at, [one.rate for one in points], color="tab:green", label="rate")
    if group.calibrated_thresholds:
        calibrated = [one.rate for one in group.calibrated_thresholds]
        _with_error(rates, at, calibrated, color="tab:red", label="rate, calibrated confidence")
    if name in paper:
        rates.plot(paper["threshold"], paper[name]["rate"], label="paper: rate", **PAPER)
        style = {"color": "0.4", "linestyle": "none", "marker": "_", "markersize": 8}
        axes.plot(paper["threshold"], paper[name]["accepted_incl_bonus"], label="paper: accepted", **style)
    axes.set_xlabel("threshold")


def _value(estimate: Estimate) -> float:
    return estimate.value or 0.0


def _paper_reliability() -> dict[int, dict[str, list[list[float]]]]:
    """By slot, `before` and `after`: points of predicted and realised survival."""
    return {int(slot): points for slot, points in paper_offline_curves()["reliability"].items()}
