"""Eq. 1 of the paper, `L = (T_draft + T_verify) / tau`, from a throughput profile, against measured seconds a token.

What Eq. 1 leaves out is split into parts that add up to the difference exactly:

    the prompt            its forward, which commits one token
    the first token       is committed by that forward, so that fewer rounds are needed than Eq. 1 counts
    the machine since     how much slower or faster plain steps, taken in the same turns, are than in the profile
    draft, target step    what these stages took, minus what the profile says of the same rounds at today's speed
    accept and commit     stage 5, stop checks, roll-back, bookkeeping
    outside               what generate() does before and after
    ended rows            rows that have ended wait for the last one of their batch
    cut off               drafts accepted behind the text's end

Seconds a token are those that a row waits: wall seconds times rows, by new tokens of all rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...fitting.throughput import ThroughputProfile
from .way_run import Round, WayRun


@dataclass(frozen=True)
class LatencySplit:
    """Predicted and measured seconds a token of one way at one cell.

    Attributes:
        tau: Tokens per round as Eq. 1 has them: accepted drafts plus one, whether or not a stop then cut some off.
        draft_s, step_s: Mean seconds of a round's draft and target step by the profile, of the rounds that there were.
        predicted_s: `(draft_s + step_s) / tau`.
        measured_s: Seconds that a row waited for a token.
        parts: What `measured_s` is more than `predicted_s`, by reason; they add up to the difference.
    """

    way: str
    cell: str
    tau: float
    draft_s: float
    step_s: float
    predicted_s: float
    measured_s: float
    parts: dict[str, float]

    @property
    def residual_s(self) -> float:
        """Measured minus predicted."""
        return self.measured_s - self.predicted_s


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of rounds by a profile.

    Attributes:
        step_s: Of a target step: rows, tokens of all of them, context.
        draft_s: Of a draft: rows, slots (0: none), context.
        plain_s: Of a step of plain generation: rows, context.
    """

    step_s: Callable[[int, int, int], float]
    draft_s: Callable[[int, int, int], float]
    plain_s: Callable[[int, int], float]

    @classmethod
    def of(cls, profile: ThroughputProfile) -> "RoundCosts":
        """Costs that a profile holds; asking for rows or tokens that it does not know raises as there."""

        def draft_s(num_rows: int, num_slots: int, context: int) -> float:
            if num_slots == 0:
                return 0.0
            costs = profile.step_costs(num_rows, context)
            num_left_out = profile.grid.tokens_per_row[-1] - 1 - num_slots
            return costs.draft_s - num_left_out * costs.slot_s

        return cls(profile.step_s, draft_s, profile.plain_step_s)


def split_drafter(
    way: str, cell: str, runs: Sequence[WayRun], costs: RoundCosts, *, slowdown: float = 1.0
) -> LatencySplit:
    """Of a drafter's runs at one cell; each has at least one round.

    Args:
        slowdown: Seconds of plain steps in the same turns, over what the profile says.

    Raises:
        ThroughputProfileError: the profile does not know so many rows.
    """
    tokens = num_first = row_rounds = num_accepted = committed = 0
    measured = idle = draft_by_round = step_by_round = 0.0
    stage_s = dict.fromkeys(("prefill_s", "draft_s", "verify_s", "accept_s", "other_s", "outside_s"), 0.0)
    predicted = {"draft_s": 0.0, "verify_s": 0.0}
    for run in runs:
        spoken = run.speculation
        assert spoken is not None, "a drafter's run tells of its rounds"
        tokens += run.num_new_tokens
        num_first += run.num_rows
        committed += run.num_new_tokens - run.num_rows
        row_rounds += spoken.num_rounds
        num_accepted += spoken.num_accepted
        measured += run.num_rows * run.latency_s
        for stage in stage_s:
            stage_s[stage] += run.num_rows * getattr(spoken.stages, stage)
        for one in spoken.rounds:
            draft_s, step_s = _round_s(one, costs)
            draft_by_round += one.num_rows * draft_s
            step_by_round += one.num_rows * step_s
            idle += (run.num_rows - one.num_rows) * (draft_s + step_s)
            predicted["draft_s"] += run.num_rows * draft_s
            predicted["verify_s"] += run.num_rows * step_s
    draft_s, step_s = draft_by_round / row_rounds, step_by_round / row_rounds
    round_s = draft_s + step_s
    tau = (num_accepted + row_rounds) / row_rounds
    kept = committed / row_rounds
    return LatencySplit(
        way=way,
        cell=cell,
        tau=tau,
        draft_s=draft_s,
        step_s=step_s,
        predicted_s=round_s / tau,
        measured_s=measured / tokens,
        parts={
            "the prompt": stage_s["prefill_s"] / tokens,
            "the first token": -round_s / kept * num_first / tokens,
            "the machine since": (slowdown - 1) * sum(predicted.values()) / tokens,
            "draft": (stage_s["draft_s"] - slowdown * predicted["draft_s"]) / tokens,
            "target step": (stage_s["verify_s"] - slowdown * predicted["verify_s"]) / tokens,
            "accept and commit": (stage_s["accept_s"] + stage_s["other_s"]) / tokens,
            "outside": stage_s["outside_s"] / tokens,
            "ended rows": idle / tokens,
            "cut off": round_s * (1 / kept - 1 / tau),
        },
    )


def split_plain(
    way: str, cell: str, runs: Sequence[WayRun], contexts: Sequence[int], costs: RoundCosts
) -> LatencySplit:
    """Of runs of plain generation, whose steps commit one token: tau is 1, and nothing is drafted.

    Args:
        contexts: Tokens of the longest prompt of each run.

    Raises:
        ThroughputProfileError: as for [`split_drafter`].
    """
    tokens = num_first = num_steps = 0
    measured = prompt = predicted = idle = 0.0
    for run, context in zip(runs, contexts, strict=True):
        steps = run.num_forwards - 1
        step_s = costs.plain_s(run.num_rows, context + steps // 2)
        tokens += run.num_new_tokens
        num_first += run.num_rows
        measured += run.num_rows * run.latency_s
        prompt += run.num_rows * run.first_token_s
        predicted += run.num_rows * steps * step_s
        num_steps += run.num_new_tokens - run.num_rows
        idle += (run.num_rows * steps - (run.num_new_tokens - run.num_rows)) * step_s
    step_s = (predicted - idle) / num_steps
    return LatencySplit(
        way=way,
        cell=cell,
        tau=1.0,
        draft_s=0.0,
        step_s=step_s,
        predicted_s=step_s,
        measured_s=measured / tokens,
        parts={
            "the prompt": prompt / tokens,
            "the first token": -step_s * num_first / tokens,
            "the machine since": (measured - prompt - predicted) / tokens,
            "ended rows": idle / tokens,
        },
    )


def slowdown_of(runs: Sequence[WayRun], contexts: Sequence[int], costs: RoundCosts) -> float:
    """Seconds of the steps of plain runs over what the profile says of them; arguments as for [`split_plain`].

    Raises:
        ThroughputProfileError: as for [`split_drafter`].
    """
    measured = predicted = 0.0
    for run, context in zip(runs, contexts, strict=True):
        steps = run.num_forwards - 1
        measured += run.latency_s - run.first_token_s
        predicted += steps * costs.plain_s(run.num_rows, context + steps // 2)
    return measured / predicted if predicted else 1.0


def _round_s(one: Round, costs: RoundCosts) -> tuple[float, float]:
    """Seconds of draft and step. Rows that have ended and are still in the step are not known here."""
    return (
        costs.draft_s(one.num_rows, one.num_slots, one.context),
        costs.step_s(one.num_rows, one.num_flat or one.num_rows * (1 + one.width), one.context),
    )
