"""A simulation's report in Markdown."""

from collections.abc import Iterator, Sequence

from ...hub.markdown import escape, table
from ..intervals import LEVEL
from .cells import base_cell, mean_of, ratio_cell
from .loads import Points, gain_at_load, gain_at_throughput, gain_at_user_speed, loads_of
from .render_paper import paper_lines
from .render_studies import drift_lines, fairness_lines, shift_lines
from .study import MachineResult, SimulationReport
from .systems import MTP, PLAIN

# Few users are as fast with MTP-1 as many are with a better drafter, so this ratio has no bound.
NOMINAL = ", and nominal where few users are compared with many"


def to_markdown(report: SimulationReport) -> str:
    """The whole report."""
    lines = ["# Load simulation", "", *_head(report)]
    for machine in report.machines:
        lines += ["", f"## {escape(machine.name)}", "", *_machine(report, machine)]
    lines += ["", "## Beside the paper", "", *paper_lines(report)]
    return "\n".join(lines) + "\n"


def _head(report: SimulationReport) -> Iterator[str]:
    own, request = report.provenance, report.request
    yield f"`{own.command}`, commit {(own.git_commit or 'unknown')[:12]}, seeds from {own.seed}."
    yield ""
    yield (
        f"Numbers are means over {own.n} seeded runs; {LEVEL:.0%} intervals are Student's over runs, so they tell what "
        "other requests of the same kind would give, not what other texts or machines would. Differences and ratios "
        "compare runs of the same seed."
    )
    yield ""
    yield f"{MTP} is {report.mtp_from}. Rounds: {escape(_rounds_from(report))}. Lengths: {request.lengths.kind}."
    yield ""
    yield "Share of recorded rounds in which drafts 1 to k are all accepted:"
    yield ""
    slots = [str(k + 1) for k in range(len(next(iter(report.slot_survival.values()))))]
    yield table(
        ["domain", *slots, "tau"], [[d, *_three(v), f"{1 + sum(v):.2f}"] for d, v in report.slot_survival.items()]
    )


def _rounds_from(report: SimulationReport) -> str:
    found = report.rounds_from
    if "file" in found:
        return f"recorded, {found['file']}, {found.get('mode')}"
    return "of a drafter with the conditional acceptance that the paper shows for Qwen3-4B (Figure 2), calibrated"


def _three(values: Sequence[float]) -> list[str]:
    return [f"{value:.3f}" for value in values]


def _machine(report: SimulationReport, machine: MachineResult) -> Iterator[str]:
    prefill = f"{1e3 * machine.prefill_token_s:.3g} ms a prompt token, which hold up all rows"
    yield f"{escape(machine.description)}. Prompts: {prefill if machine.prefill_token_s else 'filled in elsewhere'}."
    yield ""
    yield f"Closed loops, {machine.max_rows} rows at most: tokens/s of all users, and of a user (mean; slowest 5 %):"
    yield ""
    loads = loads_of(machine.closed)
    systems = list(dict.fromkeys(point.system for point in machine.closed))
    yield table(["users", *systems], [[f"{load:g}", *_speeds(machine.closed, systems, load)] for load in loads])
    yield ""
    yield "Verified tokens of a row in a round, anchor counted; tokens that a row gets in a round:"
    yield ""
    yield table(["users", *systems], [[f"{load:g}", *_budgets(machine.closed, systems, load)] for load in loads])
    if MTP in systems:
        yield from _gains(machine, [name for name in systems if name not in (MTP, PLAIN)])
    yield from _prices(machine)
    yield from _poisson(machine)
    yield from fairness_lines(machine)
    yield from shift_lines(machine)
    yield from drift_lines(report, machine)


def _speeds(points: Points, systems: Sequence[str], load: float) -> list[str]:
    return [
        f"{mean_of(points, s, load, 'throughput_tok_s'):.0f}; {mean_of(points, s, load, 'user_tok_s_mean'):.1f}; "
        f"{mean_of(points, s, load, 'user_tok_s_p5'):.1f}"
        for s in systems
    ]


def _budgets(points: Points, systems: Sequence[str], load: float) -> list[str]:
    return [f"{mean_of(points, s, load, 'budget'):.2f}; {mean_of(points, s, load, 'tau'):.2f}" for s in systems]


def _gains(machine: MachineResult, systems: Sequence[str]) -> Iterator[str]:
    for title, note, gain in (
        (f"Throughput over {MTP} with as many users (figure 8)", "", gain_at_load),
        (f"Speed of a user over {MTP} at the same throughput of all", "", gain_at_throughput),
        (f"Throughput over {MTP} at the same speed of a user (figure 7)", NOMINAL, gain_at_user_speed),
    ):
        yield ""
        yield f"{title}; none where the two curves do not meet{note}:"
        yield ""
        rows = []
        for load in loads_of(machine.closed):
            rows.append([f"{load:g}", *(ratio_cell(gain(machine.closed, name, MTP, load)) for name in systems)])
        yield table([f"users of {MTP}", *systems], rows)


def _prices(machine: MachineResult) -> Iterator[str]:
    yield ""
    yield (
        "What a verified draft costs: tokens that all users could have had in its seconds, so a draft pays where its "
        "survival is above that; and how many verified tokens cost as much as everything else in a round:"
    )
    yield ""
    rows = [[str(p.users), f"{p.draft_tokens:.3f}", base_cell(p.tokens_per_base)] for p in machine.prices]
    yield table(["users", "survival from which a draft pays", "tokens that cost as much as the rest"], rows)


def _poisson(machine: MachineResult) -> Iterator[str]:
    if not machine.poisson:
        return
    yield ""
    yield (
        "Poisson arrivals, as a share of what plain steps can do: tokens/s of all users; of a user; median seconds to "
        "the first token, waiting included. Where a system cannot keep up, waiting grows without end and shows the "
        "run's length only."
    )
    yield ""
    systems = list(dict.fromkeys(point.system for point in machine.poisson))
    rows = []
    for load in loads_of(machine.poisson):
        cells = [
            f"{mean_of(machine.poisson, s, load, 'throughput_tok_s'):.0f}; "
            f"{mean_of(machine.poisson, s, load, 'user_tok_s_mean'):.1f}; "
            f"{mean_of(machine.poisson, s, load, 'first_token_s_p50'):.2g}"
            for s in systems
        ]
        rows.append([f"{load:g}", *cells])
    yield table(["load", *systems], rows)
