"""A comparison as text and tables, for 80 columns."""

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .agreement import MAX_FLOAT32_GAP
from .intervals import LEVEL, Estimate
from .results import ComparisonReport, PromptResult

# Below this, resampling so few prompts understates how much other prompts would differ.
FEW_PROMPTS = 8
MAX_DIFFERENCES_SHOWN = 20


def render(report: ComparisonReport, console: Console) -> None:
    """Print a report."""
    _header(report, console)
    for table in (_speed_table(report), _estimates_table(report)):
        console.print("", table)
    if 2 <= len(report.prompts) < FEW_PROMPTS:
        _note(
            console,
            f"Intervals: bootstrap over prompts; of fewer than {FEW_PROMPTS} they are too narrow.",
        )
    for table in (_slots_table(report), _stages_table(report)):
        console.print("", table)
    console.print()
    _agreement(report, console)


def _header(report: ComparisonReport, console: Console) -> None:
    origin, settings = report.provenance, report.settings
    drafter = {
        "given": report.drafter,
        "bundled": f"{report.drafter}, shipped with dspark_hf",
        "untrained": f"untrained, seed {settings.seed}",
    }[report.drafter_kind]
    done = _prompts(len(report.prompts))
    if not report.is_complete:
        done = f"{len(report.prompts)} of {_prompts(report.num_planned)} (interrupted)"
    cuts = {"top_p": settings.top_p, "top_k": settings.top_k}
    law = " ".join(f"{name} {value:g}" for name, value in cuts.items() if value is not None)
    mode = "greedy" if settings.is_greedy else f"temperature {settings.temperature:g} {law}".strip()
    lines = {
        "target": f"{report.target}, {origin.dtype}",
        "drafter": f"{drafter}; {report.num_draft_tokens} drafts per round, policy {report.policy}",
        "device": f"{origin.device}, {origin.num_threads} threads",
        "run": f"{done}, {settings.repeats} x each, up to {settings.max_new_tokens} new tokens, "
        f"{mode}, seed {settings.seed}",
    }
    for label, text in lines.items():
        # Soft wrap: a terminal breaks long lines itself, a pipe gets them whole.
        console.print(f"{label:<8} {text}", markup=False, highlight=False, soft_wrap=True)
    if report.drafter_kind == "untrained":
        _note(
            console,
            "This drafter is UNTRAINED: its drafts are noise, so no speed-up can be expected, only "
            "the target's own text. Pass a trained one with --drafter ID_OR_FOLDER.",
            style="bold yellow",
        )


def _speed_table(report: ComparisonReport) -> Table:
    table = _table("", "plain", "DSpark")
    table.add_row("tokens per second", _short(report.plain_tokens_per_s), _short(report.dspark_tokens_per_s))
    table.add_row("new tokens", str(report.plain_num_new_tokens), str(report.dspark_num_new_tokens))
    table.add_row("seconds", f"{report.plain_latency_s:.2f}", f"{report.dspark_latency_s:.2f}")
    table.add_row("target forwards", str(report.plain_num_new_tokens), str(report.dspark_num_target_forwards))
    return table


def _estimates_table(report: ComparisonReport) -> Table:
    n = len(report.prompts)
    table = _table("", "value", f"{LEVEL:.0%} interval (n = {_prompts(n)})")
    _add_estimate(table, "speed, DSpark / plain", report.speed_ratio, 2, "x")
    _add_estimate(table, "tau, tokens per round", report.tau, 2)
    _add_estimate(table, "target forwards saved", report.target_forwards_saved_percent, 1, " %")
    return table


def _add_estimate(table: Table, name: str, estimate: Estimate, digits: int, unit: str = "") -> None:
    def text(value: float) -> str:
        return f"{value:.{digits}f}{unit}"

    value = "-" if estimate.value is None else text(estimate.value)
    if estimate.low is None or estimate.high is None:
        interval = "needs 2 prompts or more" if estimate.n < 2 else "-"
    else:
        interval = f"{text(estimate.low)} to {text(estimate.high)}"
    table.add_row(name, value, interval)


def _slots_table(report: ComparisonReport) -> Table:
    table = _table("draft slot", "reached", "accepted", "conditional acceptance")
    for slot in report.slots:
        rate = slot.conditional_acceptance
        table.add_row(
            str(slot.slot),
            str(slot.num_reached),
            str(slot.num_accepted),
            "-" if rate is None else f"{rate:.3f}",
        )
    return table


def _stages_table(report: ComparisonReport) -> Table:
    table = _table("DSpark stage", "seconds", "share")
    for stage in report.stages:
        table.add_row(stage.stage, f"{stage.seconds:.3f}", f"{100 * stage.share:.1f} %")
    return table


def _agreement(report: ComparisonReport, console: Console) -> None:
    if report.num_identical is None:
        _note(
            console,
            "Sampled texts differ between plain and DSpark by design: same law, other draws.",
        )
        return
    n, dtype = len(report.prompts), report.provenance.dtype
    agreed = f"{report.num_identical} of {_prompts(n)} identical"
    _note(console, f"Outputs: {agreed} (greedy, {dtype}).")
    differing = [prompt for prompt in report.prompts if prompt.difference is not None]
    if not differing:
        return
    _note(console, "First differences: number of the new token, both token ids, the target's logit gap there.")
    console.print("", _differences_table(differing[:MAX_DIFFERENCES_SHOWN]), "")
    if len(differing) > MAX_DIFFERENCES_SHOWN:
        hidden = len(differing) - MAX_DIFFERENCES_SHOWN
        _note(console, f"... and {hidden} more; --json FILE has them all.")
    if dtype != "float32":
        _note(
            console,
            f"In {dtype} a logit rounds differently when several tokens are verified at once, so "
            "near-ties may flip; --dtype float32 shows that nothing else does.",
        )
    if num_errors := len(report.losslessness_errors):
        _note(
            console,
            f"ERROR: {num_errors} of {_prompts(n)} differ where rounding cannot be the cause (a gap "
            f"above {MAX_FLOAT32_GAP:g} in float32, or one text going on where the other ended). "
            "This is a bug in dspark_hf: please report it with the output of --json.",
            style="bold red",
        )


def _differences_table(prompts: list[PromptResult]) -> Table:
    table = _table("prompt", "at token", "plain", "DSpark", "gap", "verdict")
    for prompt in prompts:
        found = prompt.difference
        assert found is not None, "only differing prompts are shown"
        table.add_row(
            Text(prompt.prompt_id),  # not markup: ids come from a file
            str(found.position),
            _token(found.plain_token_id),
            _token(found.dspark_token_id),
            "-" if found.token_gap is None else f"{found.token_gap:.2g}",
            "ERROR" if found.is_error else "near-tie",
        )
    return table


def _token(token_id: int | None) -> str:
    return "ended" if token_id is None else str(token_id)


def _prompts(count: int) -> str:
    return f"{count} prompt" if count == 1 else f"{count} prompts"


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False)
    table.add_column(first, no_wrap=True, max_width=26)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _note(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, highlight=False)


def _short(value: float) -> str:
    """Three digits at least: 9.87, 98.7, 987."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
