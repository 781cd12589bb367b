"""The learning curves of a run as a picture."""

import logging
from pathlib import Path
from typing import Any

from ..evaluation.pictures import save_figure

logger = logging.getLogger(__name__)


def plot_curves(history: list[dict[str, Any]], path: Path) -> bool:
    """Draw tau, acceptance per slot and loss parts over the steps; False without matplotlib or without data."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning('no curves without matplotlib: pip install "dspark-hf[train]"')
        return False
    training = [entry for entry in history if "expected_tau" in entry]
    held_out = [entry for entry in history if "eval_expected_tau" in entry]
    if not training and not held_out:
        return False
    figure = Figure(figsize=(13, 4), layout="constrained")
    tau, acceptance, loss = figure.subplots(1, 3)
    _draw(tau, training, {"expected_tau": "expected, training"}, "-")
    _draw(
        tau,
        held_out,
        {
            "eval_expected_tau": "expected, held out",
            "eval_tau_greedy": "decoded, greedy",
            "eval_tau_sampled": "decoded, temperature 1",
        },
        "o-",
    )
    slots = [name for name in (training or held_out)[-1] if name.startswith("acceptance_")]
    _draw(acceptance, training, {name: f"slot {name.rsplit('_', 1)[1]}" for name in slots}, "-")
    parts = ("cross_entropy", "total_variation", "confidence")
    _draw(loss, training, {name: f"{name.replace('_', ' ')}, training" for name in parts}, "-")
    _draw(loss, held_out, {f"eval_{name}": f"{name.replace('_', ' ')}, held out" for name in parts}, "o--")
    titles = {tau: "accepted length tau (bonus counted)", acceptance: "conditional acceptance", loss: "loss"}
    for axes, title in titles.items():
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    save_figure(figure, path, dpi=120)
    return True


def _draw(axes: Any, entries: list[dict[str, Any]], names: dict[str, str], style: str) -> None:
    for name, label in names.items():
        points = [(entry["step"], entry[name]) for entry in entries if name in entry]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=3)
