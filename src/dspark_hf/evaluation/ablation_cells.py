"""One cell of the ablation: what a replay came to on a machine, beside the replays it is compared with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ..decoding.policies.facts import StepCosts
from .intervals import Estimate, Floats, Sums, bootstrap
from .trace_replay import Doubles, FlatTraces, RoundLog

NUM_RESAMPLES = 2000


@dataclass(frozen=True)
class Fairness:
    """How verification is shared out among prompts.

    Attributes:
        jain: Jain's index of the prompts' mean drafts verified per round: 1 if all have the same, 1/n if one has all;
            None where nothing was verified.
        lowest_budget: Least mean of a prompt.
        share_starved: Rounds, of all rows, in which none of a row's drafts was verified.
        longest_wait: Longest run of such rounds of a row.
        slow_speed: 5 % of the prompts get their tokens at this share of the mean speed, or slower.
        budget_by_domain: Mean drafts verified per round, of the prompts of each domain.
    """

    jain: float | None
    lowest_budget: float
    share_starved: float
    longest_wait: int
    slow_speed: float
    budget_by_domain: dict[str, float]


@dataclass(frozen=True)
class Cell:
    """A schedule at one load of one machine.

    Attributes:
        mode: Of the traces, `greedy` or `sampled`.
        machine: Its name; times are in its unit.
        num_rows: Rows of every round.
        policy: Name of the schedule.
        setting: Length or threshold that was tuned on other prompts; None where there is none.
        theta: Tokens per unit of time of all rows, by prompt.
        over_plain, over_full, over_static, over_hindsight: Theta over that of plain decoding, of whole drafts, of the
            better one of fixed length and threshold, and of hindsight, minus 1; paired by prompt. None for itself.
        scheduler_share: Of the logarithm of the gain over plain decoding, the part that whole drafts do not have; None
            where there is no clear gain.
        expected_theta: Mean over rounds of Theta as the survival estimates have it: what hindsight is best at.
        tau: Tokens per round of a row, bonus counted.
        budget: Drafts verified per round of a row.
        share_accepted: Of drafts verified; None where there is none.
        share_plain: Rounds in which nothing was drafted.
        fairness: See there.
        num_rounds: Rounds of the batch.
    """

    mode: str
    machine: str
    num_rows: int
    policy: str
    setting: float | None
    theta: Estimate
    over_plain: Estimate | None
    over_full: Estimate | None
    over_static: Estimate | None
    over_hindsight: Estimate | None
    scheduler_share: Estimate | None
    expected_theta: float
    tau: float
    budget: float
    share_accepted: float | None
    share_plain: float
    fairness: Fairness
    num_rounds: int


@dataclass(frozen=True)
class Place:
    """Where a cell stands in the tables."""

    mode: str
    machine: str
    num_rows: int


def cells_of(
    place: Place,
    logs: Mapping[str, RoundLog],
    settings: Mapping[str, float],
    static: str,
    traces: FlatTraces,
    costs: Mapping[str, StepCosts],
    *,
    seed: int,
) -> list[Cell]:
    """The cells of schedules that worked through the same load.

    Args:
        logs: By name, with `plain`, `full`, `hindsight` and `static` among them.
        settings: What was tuned, by name.
        static: Name of the better static schedule.
        costs: Of the machine, for the load's rows, by name: plain generation's are not those of a drafter's loop.
        seed: Of the resampling.
    """
    num_prompts = len(traces.starts)
    columns = {
        name: (log.by_prompt(log.tokens, num_prompts), log.by_prompt(log.text_seconds(costs[name]), num_prompts))
        for name, log in logs.items()
    }

    def over(name: str, other: str) -> Estimate | None:
        return None if name == other else _ratio(columns[name], columns[other], seed)

    return [
        Cell(
            mode=place.mode,
            machine=place.machine,
            num_rows=place.num_rows,
            policy=name,
            setting=settings.get(name),
            theta=_theta(columns[name], seed),
            over_plain=(gain := over(name, "plain")),
            over_full=over(name, "full"),
            over_static=over(name, static),
            over_hindsight=over(name, "hindsight"),
            scheduler_share=_scheduler_share(columns, name, gain, seed),
            expected_theta=float((log.expected_tokens / log.seconds(costs[name])).mean()),
            tau=float(log.tokens.sum() / log.rounds.sum()),
            budget=float(log.drafts.sum() / log.rounds.sum()),
            share_accepted=float(log.accepted.sum() / log.drafts.sum()) if log.drafts.any() else None,
            share_plain=float((log.num_slots == 0).mean()),
            fairness=_fairness(log, columns[name], traces),
            num_rounds=len(log.num_verified),
        )
        for name, log in logs.items()
    ]


_Columns = tuple[Doubles, Doubles]  # tokens and seconds of each prompt


def _estimate(columns: Mapping[str, Doubles], statistic: Callable[[Sums], Floats], seed: int) -> Estimate:
    lists = {name: values.tolist() for name, values in columns.items()}
    return bootstrap(lists, statistic, seed=seed, num_resamples=NUM_RESAMPLES)


def _theta(columns: _Columns, seed: int) -> Estimate:
    return _estimate(dict(zip(("tokens", "seconds"), columns, strict=True)), lambda s: s["tokens"] / s["seconds"], seed)


def _ratio(columns: _Columns, others: _Columns, seed: int) -> Estimate:
    named = dict(zip(("tokens", "seconds", "their tokens", "their seconds"), (*columns, *others), strict=True))
    return _estimate(named, lambda s: s["tokens"] / s["seconds"] / (s["their tokens"] / s["their seconds"]) - 1.0, seed)


def _scheduler_share(columns: Mapping[str, _Columns], name: str, gain: Estimate | None, seed: int) -> Estimate | None:
    if gain is None or gain.low is None or gain.low <= 0 or name == "full":
        return None
    named = {
        f"{kind} {what}": values
        for kind, of in (("own", name), ("full", "full"), ("plain", "plain"))
        for what, values in zip(("tokens", "seconds"), columns[of], strict=True)
    }

    def share(sums: Sums) -> Floats:
        own, full, plain = (
            np.log(sums[f"{kind} tokens"] / sums[f"{kind} seconds"]) for kind in ("own", "full", "plain")
        )
        value: Floats = (own - full) / (own - plain)
        return value

    return _estimate(named, share, seed)


def _fairness(log: RoundLog, columns: _Columns, traces: FlatTraces) -> Fairness:
    num_prompts = len(traces.starts)
    rounds = log.by_prompt(log.rounds, num_prompts)
    budget = log.by_prompt(log.drafts, num_prompts) / rounds
    speed = columns[0] / columns[1]
    squares = float((budget**2).sum())
    domains = np.array(traces.domains)
    return Fairness(
        jain=float(budget.sum() ** 2 / (num_prompts * squares)) if squares else None,
        lowest_budget=float(budget.min()),
        share_starved=float(log.starved.sum() / log.rounds.sum()),
        longest_wait=int(log.longest_wait.max()),
        slow_speed=float(np.quantile(speed, 0.05) / speed.mean()),
        budget_by_domain={domain: float(budget[domains == domain].mean()) for domain in sorted(set(traces.domains))},
    )
