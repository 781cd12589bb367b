"""Fairness, shifts and drifts in Markdown."""

from collections.abc import Iterator, Sequence

import numpy as np

from ...hub.markdown import table
from .cells import ratio_cell, value_cell
from .loads import loads_of
from .measures import STARVED_ROUNDS, over_seeds, ratio_over_seeds
from .series import WARM_SHARE, Series
from .study import DRIFT_POLICY, MENDED, NO_DRIFT, MachineResult, SimulationReport


def fairness_lines(machine: MachineResult) -> Iterator[str]:
    largest = loads_of(machine.closed)[-1]
    yield ""
    yield (
        f"Fairness with {largest:g} users. A request starves when {STARVED_ROUNDS} drafted rounds in a row verify none "
        "of its drafts. The floor gives each row a verified draft in so many drafted rounds:"
    )
    yield ""
    rows = []
    for point in [one for one in machine.closed if one.load == largest] + machine.floor:
        names = ("throughput_tok_s", "slowest_to_median", "jain_index", "starved_share", "drafts_per_round_p5")
        rows.append([point.system, *(value_cell(point.estimate(name)) for name in names)])
    head = [
        "system",
        "tokens/s",
        "slowest 5 % / median",
        "Jain's index",
        "starved share",
        "drafts a round, lowest 5 %",
    ]
    yield table(head, rows)


def shift_lines(machine: MachineResult) -> Iterator[str]:
    if machine.shift_domains is None:
        return
    before, after = machine.shift_domains
    yield ""
    yield (
        f"Traffic shift, {machine.study_users} users: all ask for {before}, from {machine.change_s:.3g} s on for "
        f"{after}. Tokens/s and verified tokens of a row, before and after:"
    )
    yield ""
    rows = []
    for system, runs in machine.shift.items():
        spans = [_spans(series, machine.change_s, machine.change_s) for series in runs]
        cells = []
        for part in (0, 1):
            for name in ("tokens_per_s", "budget"):
                cells.append(
                    value_cell(over_seeds([s.mean(name, *span[part]) for s, span in zip(runs, spans, strict=True)]))
                )
        rows.append([system, *cells])
    yield table(["system", "tokens/s before", "budget before", "tokens/s after", "budget after"], rows)


def _spans(series: Series, before_s: float, after_s: float) -> tuple[tuple[float, float], tuple[float, float]]:
    """Stretches of time before and after a change; requests from before it are given a tenth of the run to end."""
    end_s = series.bin_s * len(series.tokens_per_s)
    return (WARM_SHARE * end_s, before_s), (after_s + WARM_SHARE * end_s, end_s)


def drift_lines(report: SimulationReport, machine: MachineResult) -> Iterator[str]:
    factor = report.request.odds_factor
    yield ""
    yield (
        f"Drift of calibration, {machine.study_users} users, policy `{DRIFT_POLICY}`: from {machine.change_s:.3g} s on "
        f"the odds of all acceptance estimates are multiplied by {factor:g}. The drift watch warns, and a calibration "
        "is fitted on rounds behind its warning."
    )
    yield ""
    mended = machine.drift[MENDED]
    warned = [series.warned_s - machine.change_s for series in mended if series.warned_s is not None]
    refitted = [series.refitted_s - machine.change_s for series in mended if series.refitted_s is not None]
    yield f"- Warned in {len(warned)} of {len(mended)} runs{_after(warned)}."
    yield f"- Fitted again in {len(refitted)}{_after(refitted)}."
    false_alarms = sum(series.warned_s is not None for series in machine.drift[NO_DRIFT])
    yield f"- Warnings without drift: {false_alarms} of {len(machine.drift[NO_DRIFT])} runs."
    yield ""
    after_s = max((s.refitted_s for s in mended if s.refitted_s is not None), default=machine.change_s)
    rows = []
    for name, runs in machine.drift.items():
        spans = [_spans(series, machine.change_s, after_s)[1] for series in runs]
        means = [[s.mean(m, *span) for s, span in zip(runs, spans, strict=True)] for m in ("tokens_per_s", "budget")]
        base = [s.mean("tokens_per_s", *span) for s, span in zip(machine.drift[NO_DRIFT], spans, strict=True)]
        gaps = [_gap(series, span) for series, span in zip(runs, spans, strict=True)]
        rows.append(
            [
                name,
                value_cell(over_seeds(means[0])),
                ratio_cell(ratio_over_seeds(means[0], base)),
                value_cell(over_seeds(means[1])),
                value_cell(over_seeds(gaps)),
            ]
        )
    yield f"After {after_s:.3g} s and a tenth of the run:"
    yield ""
    yield table(["", "tokens/s", f"over {NO_DRIFT}", "budget", "predicted - realised survival"], rows)


def _after(seconds: Sequence[float]) -> str:
    return f", {min(seconds):.3g} to {max(seconds):.3g} s after it" if seconds else ""


def _gap(series: Series, span: tuple[float, float]) -> float:
    inside = [
        gap
        for i, gap in enumerate(series.survival_gap)
        if gap is not None and span[0] <= i * series.bin_s and (i + 1) * series.bin_s <= span[1] + 1e-9
    ]
    return float(np.mean(inside)) if inside else float("nan")
