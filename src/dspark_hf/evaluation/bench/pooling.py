"""What the runs of a cell come to: ratios with intervals, tau, target forwards per token, time to the first token."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..intervals import Estimate, Floats, Sums, bootstrap
from .repetitions import ratio_over_repetitions
from .settings import Cell
from .way_run import WayRun
from .ways import WayFacts

IntervalOver = Literal["prompts", "repetitions"]


class Place(NamedTuple):
    """Which run of a cell: its batch, and which repetition of it."""

    batch: int
    repeat: int


# Runs of a cell's ways on one batch, by way; all taken in turns.
Runs = Mapping[Place, Mapping[str, WayRun]]


@dataclass(frozen=True)
class WayNumbers:
    """One way at one cell.

    Attributes:
        num_runs: generate() calls.
        interval_over: What intervals say: how other prompts would do, or how well the machine was measured on these.
        speed_over: Tokens per second over those of other ways, by their names.
        tau: Tokens that a round commits, bonus token counted; of plain generation 1.
        target_forwards_per_token: Forwards of the target for each new token; rows of a batch share forwards.
        first_token_s: Median seconds until the forward that gives the first token was over.
        reached_per_slot, accepted_per_slot: Of drafts, pooled; empty for what is no drafter of ours.
        num_texts, num_identical, num_errors: Rows of all runs, those with the text of plain generation, and those that
            differ where rounding cannot be the reason; the last two None where texts are sampled.
    """

    way: str
    num_runs: int
    num_new_tokens: int
    latency_s: float
    tokens_per_s: float
    interval_over: IntervalOver
    speed_over: dict[str, Estimate]
    tau: Estimate
    target_forwards_per_token: Estimate
    first_token_s: float
    reached_per_slot: tuple[int, ...]
    accepted_per_slot: tuple[int, ...]
    num_texts: int
    num_identical: int | None
    num_errors: int | None

    @property
    def conditional_acceptance(self) -> list[float | None]:
        """Per slot, among drafts whose predecessors were all accepted; None where no draft got that far."""
        counts = zip(self.accepted_per_slot, self.reached_per_slot, strict=True)
        return [accepted / reached if reached else None for accepted, reached in counts]


def pool(
    cell: Cell, way: WayFacts, runs: Runs, over: Sequence[str], *, num_batches: int, seed: int
) -> WayNumbers | None:
    """Numbers of one way; None where it has no run.

    Args:
        over: Ways that its speed is put over; those that did not run here are left out.
        num_batches: Of the cell; a repetition counts towards intervals when all of them were run.
        seed: Of resampling.
    """
    own = {place: by_way[way.name] for place, by_way in runs.items() if way.name in by_way}
    if not own:
        return None
    several = list(own.values())
    tokens, seconds = sum(run.num_new_tokens for run in several), sum(run.latency_s for run in several)
    spoken = [run.speculation for run in several if run.speculation is not None]
    is_greedy = all(run.num_identical is not None for run in several)
    is_over_prompts = cell.kind == "main"

    def ratio(columns: Mapping[str, list[float]], statistic: Callable[[Sums], Floats]) -> Estimate:
        return bootstrap(columns, statistic, seed=seed)

    return WayNumbers(
        way=way.name,
        num_runs=len(several),
        num_new_tokens=tokens,
        latency_s=seconds,
        tokens_per_s=tokens / seconds,
        interval_over="prompts" if is_over_prompts else "repetitions",
        speed_over={
            other: _speed_over(runs, way.name, other, num_batches, seed, is_over_prompts=is_over_prompts)
            for other in over
            if other != way.name and any(other in runs[place] for place in own)
        },
        tau=ratio(_by_batch(own, lambda run: _tau_terms(way, run)), lambda sums: sums["over"] / sums["under"]),
        target_forwards_per_token=ratio(
            _by_batch(own, lambda run: (run.num_forwards, run.num_new_tokens)),
            lambda sums: sums["over"] / sums["under"],
        ),
        first_token_s=statistics.median(run.first_token_s for run in several),
        reached_per_slot=_summed([one.reached_per_slot for one in spoken]),
        accepted_per_slot=_summed([one.accepted_per_slot for one in spoken]),
        num_texts=sum(run.num_rows for run in several),
        num_identical=sum(run.num_identical or 0 for run in several) if is_greedy else None,
        num_errors=sum(one.is_error for run in several for one in run.differences) if is_greedy else None,
    )


def _speed_over(runs: Runs, way: str, other: str, num_batches: int, seed: int, *, is_over_prompts: bool) -> Estimate:
    """Tokens per second of `way` over those of `other`, both on the same batches in the same turns."""
    pairs = {place: (by_way[way], by_way[other]) for place, by_way in runs.items() if {way, other} <= set(by_way)}
    if is_over_prompts:
        columns = {
            f"{kind} {side}": _sums_by(pairs, lambda place: place.batch, side, kind)
            for side in (0, 1)
            for kind in ("num_new_tokens", "latency_s")
        }

        def statistic(sums: Sums) -> Floats:
            ours, theirs = (sums[f"num_new_tokens {side}"] / sums[f"latency_s {side}"] for side in (0, 1))
            return ours / theirs

        return bootstrap(columns, statistic, seed=seed)
    counts: dict[int, int] = {}
    for place in pairs:
        counts[place.repeat] = counts.get(place.repeat, 0) + 1
    whole = {place: pair for place, pair in pairs.items() if counts[place.repeat] == num_batches} or pairs
    speeds = []
    for side in (0, 1):
        tokens, seconds = (_sums_by(whole, lambda p: p.repeat, side, k) for k in ("num_new_tokens", "latency_s"))
        speeds.append([a / b for a, b in zip(tokens, seconds, strict=True)])
    return ratio_over_repetitions(*speeds)


def _sums_by(
    pairs: Mapping[Place, tuple[WayRun, WayRun]], group_of: Callable[[Place], int], side: int, kind: str
) -> list[float]:
    sums: dict[int, float] = {}
    for place, pair in sorted(pairs.items()):
        sums[group_of(place)] = sums.get(group_of(place), 0.0) + getattr(pair[side], kind)
    return list(sums.values())


def _by_batch(own: Mapping[Place, WayRun], terms: Callable[[WayRun], tuple[float, float]]) -> dict[str, list[float]]:
    """Numerators and denominators, repetitions of a batch added up."""
    sums: dict[int, list[float]] = {}
    for place, run in sorted(own.items()):
        over, under = terms(run)
        entry = sums.setdefault(place.batch, [0.0, 0.0])
        entry[0] += over
        entry[1] += under
    return {"over": [entry[0] for entry in sums.values()], "under": [entry[1] for entry in sums.values()]}


def _tau_terms(way: WayFacts, run: WayRun) -> tuple[float, float]:
    """Tokens that rounds committed, and rounds. A drafter of ours takes the first token from the prompt's forward;
    transformers' assisted generation verifies drafts there already."""
    if way.kind == "plain":
        return 1.0, 1.0
    if run.speculation is not None:
        return run.num_new_tokens - run.num_rows, run.speculation.num_rounds
    return run.num_new_tokens, run.num_forwards  # of one row


def _summed(counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    width = max(map(len, counts), default=0)
    return tuple(sum(one[slot] for one in counts if slot < len(one)) for slot in range(width))
