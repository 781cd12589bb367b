"""An ablation's report as a Markdown page."""

import os
from collections.abc import Sequence
from pathlib import Path

from .ablation import FLOOR_EVERY, SCHEDULES, AblationReport, TraceFacts
from .ablation_cells import Cell
from .intervals import LEVEL, Estimate

# Whose gains over static schedules have columns of their own.
ADAPTIVE = ("goodput", "prefix", "smoothed", "block", "lagged", "gated block")

DESCRIPTIONS = {
    "plain": "no draft",
    "full": "every draft of whole blocks",
    "fixed": "the best number of drafts, tuned on other prompts for each load; that many are drafted; 0 is plain",
    "survival": "static threshold on survival (the stop of SpecDec++, arXiv 2405.19715), tuned likewise",
    "goodput": "one length for all, chosen before drafting by the acceptance so far (TurboSpec, arXiv 2406.14066)",
    "prefix": "the paper's Algorithm 1 (arXiv 2607.05147)",
    "smoothed": "early stop on a smooth curve, then what fits into the stair",
    "block": "as many as a forecast says pay",
    "lagged": "the likeliest; how many, from the estimates of two rounds earlier",
    "floored block": f"`block`, and each row has a draft verified once in {FLOOR_EVERY} rounds (min_drafts_every)",
    "gated block": "`block` as generate() runs it: drafts nothing, or fewer slots, where that pays",
    "hindsight": "the best of each round by its estimates, all seen first; a bound, not lossless",
}


def write_page(path: Path, report: AblationReport, figure: Path | None) -> None:
    """Write the Markdown page in one step.

    Args:
        figure: To be shown, beside the page; None: none.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(page_of(report, None if figure is None else os.path.relpath(figure, path.parent)), "utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def page_of(report: AblationReport, figure: str | None = None) -> str:
    """The page's text."""
    lines = ["# What scheduling gains: one drafter, many schedules", ""]
    lines += [_about(fact) for fact in report.traces]
    lines += ["", *_method(), ""]
    if figure is not None:
        lines += [f"![speed over plain decoding by rows]({figure})", ""]
    for mode, machine in _panels(report):
        cells = [cell for cell in report.cells if (cell.mode, cell.machine) == (mode, machine)]
        lines += [f"## {mode}, step time {machine} (in {report.machines[machine]})", ""]
        lines += ["Tokens per unit of time over those of plain decoding:", "", *_speeds(cells), ""]
        lines += ["What scheduling adds to the drafter:", "", *_gains(cells), ""]
    lines += ["## Distance from hindsight", "", *_distances(report), ""]
    lines += ["## Who gets the drafts", "", *_fairness(report), ""]
    lines += ["## Does a policy look ahead", "", *_lookahead(report), ""]
    lines += [_provenance(report), ""]
    return "\n".join(lines)


def _about(fact: TraceFacts) -> str:
    domains = ", ".join(f"{domain} {n}" for domain, n in fact.domains.items())
    drafter = f"Drafter {fact.source['drafter']} of {fact.source['target']}" if "drafter" in fact.source else "Traces"
    return (
        f"- {fact.mode}: {drafter}, {fact.num_slots} slots, tau of whole drafts {fact.tau:.2f}; tuned on "
        f"{fact.num_tuning} prompts, judged on {fact.num_judged} others ({domains}); traces of layout {fact.layout}."
    )


def _method() -> list[str]:
    rows = [[f"`{name}`", DESCRIPTIONS[name]] for name in SCHEDULES]
    return [
        *_table(["schedule", "verifies"], rows),
        "",
        "The batch is always full: a row whose text is done takes the next one. All schedules work through the same "
        f"texts, and differences are paired: ± is half of a {LEVEL:.0%} bootstrap interval over prompts. A round costs "
        "the seconds of the step for the tokens verified, of the draft for the slots drafted, and the overhead; in the "
        "formulas drafts are free, as in the paper's Theta. Plain decoding costs the steps of plain generate(); "
        "a round in which another schedule drafts nothing costs a step of the drafter's loop, and the overhead.",
        "",
        "Intervals are over prompts alone. The seconds of the rounds that a prompt met are held fixed, so neither how "
        "sure step times are nor how another batch around the prompt would have gone is in them.",
    ]


def _panels(report: AblationReport) -> list[tuple[str, str]]:
    return list(dict.fromkeys((cell.mode, cell.machine) for cell in report.cells))


def _by_rows(cells: Sequence[Cell]) -> dict[int, dict[str, Cell]]:
    loads: dict[int, dict[str, Cell]] = {}
    for cell in cells:
        loads.setdefault(cell.num_rows, {})[cell.policy] = cell
    return loads


def _speeds(cells: Sequence[Cell]) -> list[str]:
    names = [name for name in SCHEDULES if name != "plain"]
    rows = [
        [str(n), *(_signed(load[name].over_plain, base=1.0) for name in names)] for n, load in _by_rows(cells).items()
    ]
    return _table(["rows", *names], rows)


def _gains(cells: Sequence[Cell]) -> list[str]:
    """The better static schedule, adaptive ones against it, and the scheduler's part of what `block` gains."""
    rows = []
    for n, load in _by_rows(cells).items():
        static = next(name for name in ("fixed", "survival") if load[name].over_static is None)
        rows.append(
            [
                str(n),
                f"{static} {load[static].setting:g}",
                _signed(load[static].over_full),
                *(_signed(load[name].over_static) for name in ADAPTIVE),
                _share(load["block"]),
            ]
        )
    head = ["rows", "better static", "it over full", *(f"{name} over it" for name in ADAPTIVE)]
    return _table([*head, "scheduler's part of block's gain"], rows)


def _distances(report: AblationReport) -> list[str]:
    """Mean and worst of each schedule, by machine, over modes and loads."""
    names = [name for name in SCHEDULES if name not in ("plain", "hindsight")]
    rows = []
    for machine in report.machines:
        row = [machine]
        for name in names:
            found = [c.over_hindsight for c in report.cells if (c.machine, c.policy) == (machine, name)]
            values = [one.value for one in found if one is not None and one.value is not None]
            row.append(f"{sum(values) / len(values):+.1%} ({min(values):+.1%})" if values else "-")
        rows.append(row)
    return [
        "Theta against hindsight's: mean over modes and loads, and the worst in brackets. Hindsight is best at each "
        "round's expected Theta; over whole texts, and by what was really accepted, others can be above it.",
        "",
        *_table(["step time", *names], rows),
    ]


def _fairness(report: AblationReport) -> list[str]:
    """Each schedule at the largest load of the first machine, by mode."""
    rows = []
    for mode in dict.fromkeys(cell.mode for cell in report.cells):
        machine = next(iter(report.machines))
        cells = [cell for cell in report.cells if (cell.mode, cell.machine) == (mode, machine)]
        largest = max(cell.num_rows for cell in cells)
        for cell in (cell for cell in cells if cell.num_rows == largest and cell.policy != "plain"):
            fair = cell.fairness
            domains = ", ".join(f"{domain} {value:.2f}" for domain, value in fair.budget_by_domain.items())
            rows.append(
                [
                    f"{mode}, {largest} rows",
                    cell.policy,
                    f"{cell.budget:.2f}",
                    "-" if cell.share_accepted is None else f"{cell.share_accepted:.0%}",
                    "-" if fair.jain is None else f"{fair.jain:.2f}",
                    f"{fair.lowest_budget:.2f}",
                    f"{fair.share_starved:.0%}",
                    str(fair.longest_wait),
                    f"{fair.slow_speed:.2f}",
                    domains,
                ]
            )
    head = ["load", "schedule", "drafts verified a round", "of them accepted", "Jain's index", "least of a prompt"]
    head += ["rounds without", "longest wait, rounds", "speed of the slowest 5 %", "by domain"]
    return [
        f"Step time {next(iter(report.machines))}. Speed is relative to the mean of prompts; plain decoding has 1.00.",
        "",
        *_table(head, rows),
    ]


def _lookahead(report: AblationReport) -> list[str]:
    rows = [[f"`{name}`", str(one.num_violations), str(one.num_trials)] for name, one in report.lookahead.items()]
    return [
        "Confidences behind a slot are replaced, and the decision about it must stay. `hindsight` is the control.",
        "",
        *_table(["policy", "decisions that changed", "of"], rows),
    ]


def _provenance(report: AblationReport) -> str:
    facts = report.provenance
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    return (
        f"`{facts.command}`, commit {(facts.git_commit or 'unknown')[:12]}, {versions}, seed {facts.seed}, "
        f"{report.seconds:.0f} s."
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


def _signed(value: Estimate | None, base: float = 0.0) -> str:
    """A gain as per cent, or with `base` 1 as a factor, and half of its interval."""
    if value is None or value.value is None:
        return "-"
    half = "" if value.low is None or value.high is None else (value.high - value.low) / 2
    if base:
        return f"{base + value.value:.2f}" + (f" ± {half:.2f}" if half != "" else "")
    return f"{value.value:+.1%}" + (f" ± {half:.1%}" if half != "" else "")


def _share(cell: Cell) -> str:
    share = cell.scheduler_share
    if share is None or share.value is None or share.low is None or share.high is None:
        return "no clear gain"
    return f"{share.value:.0%} ({share.low:.0%} to {share.high:.0%})"
