"""A simulation beside the paper's curves, in Markdown."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ...hub.markdown import escape, table
from .cells import base_cell, mean_of
from .loads import curve, gain_at_load, point_of
from .measures import ratio_over_seeds
from .paper import PaperModel, columns, fitted_round, gain_at_users, paper_models, source
from .study import DRIFT_POLICY, MachineResult, SimulationReport
from .systems import FIXED, MTP, PLAIN

# Users at which the paper's gains are told.
PAPER_USERS = (25, 50, 100, 200)


def paper_lines(report: SimulationReport) -> Iterator[str]:
    yield f"{source()}."
    yield ""
    yield (
        "The gain with as many users is the ratio of accepted lengths over the ratio of round times. For the paper the "
        f"round times are those of its {MTP} line at the budgets that it shows (verified tokens only; what drafting "
        "costs is not in it, and so lowers the ratio of accepted lengths):"
    )
    yield ""
    head = ["", "users", "gain", "accepted length, ratio", "round time, ratio", "budget"]
    rows = [
        [f"paper, {model.name}", f"{users:g}", *_paper_factors(model, users).cells()]
        for model in paper_models()
        for users in PAPER_USERS
    ]
    for machine in report.machines:
        systems = dict.fromkeys(point.system for point in machine.closed)
        for system in [name for name in systems if name not in (MTP, PLAIN) and not name.startswith(FIXED)]:
            for point in curve(machine.closed, system):
                factors = _own_factors(machine, system, point.load)
                if factors is not None:
                    rows.append([f"{machine.name}, {system}", f"{point.load:g}", *factors.cells()])
    yield table(head, rows)
    yield ""
    yield from _causes(report)


class _Factors(NamedTuple):
    """A gain over MTP-1 with as many users: `tau / round_time`, both ratios; and the budget."""

    gain: float
    tau: float
    round_time: float
    budget: float

    def cells(self) -> list[str]:
        return [f"{number:.2f}" for number in self]


def _paper_factors(model: PaperModel, users: float) -> _Factors:
    gain = float(gain_at_users(model, users))
    budget = float(np.interp(users, *columns(model.budget["dspark"])))
    base = fitted_round(model.name).tokens_per_base
    round_time = (base + users * budget) / (base + users * 2)
    return _Factors(gain, gain * round_time, round_time, budget)


def _own_factors(machine: MachineResult, system: str, load: float) -> _Factors | None:
    gain = gain_at_load(machine.closed, system, MTP, load)
    ours, theirs = point_of(machine.closed, system, load), point_of(machine.closed, MTP, load)
    if gain is None or gain.value is None or ours is None or theirs is None:
        return None
    tau = ratio_over_seeds(ours.by_seed["tau"], theirs.by_seed["tau"]).value or float("nan")
    return _Factors(gain.value, tau, tau / gain.value, mean_of(machine.closed, system, load, "budget"))


def _causes(report: SimulationReport) -> Iterator[str]:
    """Differences from the paper, in numbers of this run."""
    flash = fitted_round("V4-Flash").tokens_per_base
    pro = fitted_round("V4-Pro").tokens_per_base
    yield "Where the curves differ, and why:"
    yield ""
    yield (
        f"- Shape of the profile. The paper's {MTP} curves imply that {flash:.0f} (V4-Flash) and {pro:.0f} (V4-Pro) "
        f"verified tokens cost as much as the rest of a round. {_shapes(report)}"
    )
    taus = {domain: 1 + sum(values) for domain, values in report.slot_survival.items()}
    firsts = [values[0] for values in report.slot_survival.values()]
    yield (
        f"- Acceptance. A whole block of these rounds brings {min(taus.values()):.2f} to {max(taus.values()):.2f} "
        f"tokens by domain, and one draft {1 + min(firsts):.2f} to {1 + max(firsts):.2f}. The paper tells neither for "
        "its production models; the ratios of accepted lengths above are what its curves imply."
    )
    yield from _factors(report)
    num_slots = len(next(iter(report.slot_survival.values())))
    yield (
        f"- Budget. It ends at {num_slots + 1} here, a whole block, where a draft costs next to nothing; the paper's "
        "largest is 6, and its requests differ in domain as live traffic does. The budget falls with load as the price "
        "of a draft rises through the survival of the slots; the tables of prices say where."
    )
    yield (
        "- What is not simulated: limits of memory, prompts in chunks, expert routing, the width of a padded batch. "
        "A round costs what its verified tokens cost on the machine's curve."
    )


def _factors(report: SimulationReport) -> Iterator[str]:
    """The ratio of our gain to the paper's, as a ratio of accepted lengths times one of round times."""
    flash = paper_models()[0]
    for machine in report.machines:
        points = [point for point in curve(machine.closed, DRIFT_POLICY) if point.load in PAPER_USERS]
        for point in points:
            ours = _own_factors(machine, point.system, point.load)
            if ours is None:
                continue
            theirs = _paper_factors(flash, point.load)
            lengths, rounds = ours.tau / theirs.tau, theirs.round_time / ours.round_time
            yield (
                f"- {escape(machine.name)}, {point.load:g} users: `{point.system}` gains {ours.gain:.2f}, and "
                f"{flash.name} {theirs.gain:.2f}. Of the factor {ours.gain / theirs.gain:.2f} between them accepted "
                f"lengths make {lengths:.2f} and round times {rounds:.2f}, with budgets of {ours.budget:.2f} and "
                f"{theirs.budget:.2f}."
            )


def _shapes(report: SimulationReport) -> str:
    parts = []
    for machine in report.machines:
        first, last = machine.prices[0], machine.prices[-1]
        parts.append(
            f"On {escape(machine.name)} it is {base_cell(first.tokens_per_base)} with {first.users} users and "
            f"{base_cell(last.tokens_per_base)} with {last.users}, so that a draft pays from a survival of "
            f"{first.draft_tokens:.3f} and {last.draft_tokens:.3f} on."
        )
    return " ".join(parts)
