"""A throughput profile as a picture."""

import logging
from pathlib import Path

from .throughput import ThroughputProfile

logger = logging.getLogger(__name__)

SUFFIXES = (".png", ".pdf", ".svg")


def plot_profile(profile: ThroughputProfile, path: Path) -> bool:
    """Draw SPS over B, one panel per context, one curve per number of rows; False without matplotlib.

    The bands are quartiles. Both axes are logarithmic; the suffix of `path`, one of `SUFFIXES`, chooses the format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning('no plot without matplotlib: pip install "dspark-hf[eval]"')
        return False
    grid = profile.grid
    figure = Figure(figsize=(1 + 5 * len(grid.contexts), 4), layout="constrained")
    panels = figure.subplots(1, len(grid.contexts), sharey=True, squeeze=False)[0]
    for c, (axes, context) in enumerate(zip(panels, grid.contexts, strict=True)):
        for r, num_rows in enumerate(grid.num_rows):
            num_tokens = [num_rows * tokens for tokens in grid.tokens_per_row]
            sps = 1 / profile.step.median_s[r, :, c]
            (line,) = axes.plot(num_tokens, sps.tolist(), "o-", markersize=3, label=f"{num_rows}")
            low, high = (1 / table[r, :, c] for table in (profile.step.q3_s, profile.step.q1_s))
            axes.fill_between(num_tokens, low.tolist(), high.tolist(), alpha=0.2, color=line.get_color())
        axes.set(title=f"context {context}", xlabel="B, tokens verified in one step", xscale="log", yscale="log")
        axes.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("SPS, target steps per second")
    panels[-1].legend(title="rows", fontsize="small")
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        figure.savefig(partial, dpi=120)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return True
