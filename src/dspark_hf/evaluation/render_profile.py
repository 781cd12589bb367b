"""A throughput profile as tables."""

from rich import box
from rich.console import Console
from rich.table import Table

from ..fitting.throughput import ThroughputProfile


def render_profile(profile: ThroughputProfile, console: Console) -> None:
    """Print a profile: per context, milliseconds of steps, drafts and plain steps by rows; then how even it is."""
    own = profile.fingerprint
    threads = "" if own.num_threads is None else f", {own.num_threads} threads"
    lines = {
        "target": f"{profile.target}, {own.dtype}",
        "drafter": profile.drafter or "the default one: bundled, or untrained",
        "device": f"{own.device}{threads}, layout {own.layout}",
        "run": f"median of {profile.num_repeats} measurements per point, in random order",
    }
    for label, text in lines.items():
        console.print(f"{label:<8} {text}", markup=False, highlight=False, soft_wrap=True)
    for c in range(len(profile.grid.contexts)):
        console.print(_steps_table(profile, c))
    console.print(_shapes_table(profile))


def _steps_table(profile: ThroughputProfile, c: int) -> Table:
    grid = profile.grid
    table = Table(title=f"context {grid.contexts[c]}: milliseconds", box=box.SIMPLE)
    for name in (
        "rows",
        *(f"step, {tokens}/row" for tokens in grid.tokens_per_row),
        "draft",
        "1 slot",
        "other",
        "plain step",
    ):
        table.add_column(name, justify="right")
    for r, num_rows in enumerate(grid.num_rows):
        cells = [
            *profile.step.median_s[r, :, c].tolist(),
            float(profile.draft.median_s[r, c]),
            float(profile.first_slot.median_s[r, c]),
            float(profile.overhead.median_s[r]),
            float(profile.plain.median_s[r, c]),
        ]
        table.add_row(str(num_rows), *(f"{1000 * seconds:.1f}" for seconds in cells))
    return table


def _shapes_table(profile: ThroughputProfile) -> Table:
    table = Table(title="SPS over B: rises, and the largest jump of a step's time", box=box.SIMPLE)
    for name in ("rows", "context", "steps of B", "rises", "clear rises", "largest jump", "after B"):
        table.add_column(name, justify="right")
    for shape in profile.curve_shapes():
        counts = (shape.num_rows, shape.context, shape.num_steps, shape.num_rises, shape.num_clear_rises)
        table.add_row(*map(str, counts), f"x {shape.largest_jump:.2f}", str(shape.jump_at_num_tokens))
    return table
