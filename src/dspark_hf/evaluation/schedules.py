"""Schedules for replays: the package's own policies, tuned static ones, and what generate() makes of a policy."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..decoding.policies.facts import RoundFacts, StepCosts, VerificationPolicy
from ..decoding.policies.goodput import GoodputPolicy
from ..decoding.schedule import schedule
from ..decoding.scheduler import Scheduler
from ..decoding.types import Confidence
from ..fitting.throughput import MeasuredCosts, ProfileGrid
from .trace_replay import Choice, FlatTraces, Schedule
from .traces import Counts

# Plain rounds after which goodput drafts once, to learn whether that would pay by now.
TRIAL_EVERY = 64


class StaticSchedule:
    """Lengths that follow from a row's place alone.

    Args:
        lengths: int64 `[places]`, drafts verified there.
        num_slots: Slots drafted; 0: plain steps.
    """

    def __init__(self, lengths: Counts, num_slots: int) -> None:
        self._lengths = lengths
        self._num_slots = num_slots

    def choose(self, places: Counts, row_ids: Sequence[int]) -> Choice:
        return Choice(self._num_slots, self._lengths[places])

    def observe(self, num_accepted: Counts) -> None:
        """Nothing to remember."""


def fixed(traces: FlatTraces, length: int) -> StaticSchedule:
    """`length` drafts of every row, and no slot more is drafted; 0 is plain decoding."""
    return StaticSchedule(np.full(len(traces.num_accepted), length, dtype=np.int64), length)


def survival_threshold(traces: FlatTraces, threshold: float) -> StaticSchedule:
    """Policy `survival`: drafts up to the first whose survival is below the threshold, of whole drafts."""
    keeps = (traces.survival >= threshold).cumprod(axis=1)
    return StaticSchedule(keeps.sum(axis=1).astype(np.int64), traces.num_slots)


class PolicySchedule:
    """A verification policy on whole drafts, without the gate that may leave drafting out."""

    def __init__(self, policy: VerificationPolicy, traces: FlatTraces, costs: StepCosts, num_rows: int) -> None:
        self._policy = policy
        self._traces = traces
        self._costs = costs
        self._live = torch.ones(num_rows, dtype=torch.bool)
        self._whole = torch.full((num_rows,), traces.num_slots)
        self._round: tuple[Confidence, Tensor, RoundFacts] | None = None

    def choose(self, places: Counts, row_ids: Sequence[int]) -> Choice:
        confidence = confidence_at(self._traces, places)
        lengths = self.lengths(confidence, row_ids)
        return Choice(self._traces.num_slots, lengths.numpy())

    def lengths(self, confidence: Confidence, row_ids: Sequence[int]) -> Tensor:
        """Drafts verified, int64 `[rows]`, of rows with these confidences."""
        slots = self._traces.num_slots
        facts = RoundFacts(slots, tuple(row_ids), self._live, self._whole, self._whole, self._costs)
        lengths = schedule(self._policy, confidence, facts)
        self._round = confidence, lengths, facts
        return lengths

    def observe(self, num_accepted: Counts) -> None:
        assert self._round is not None, "a round is chosen before it is observed"
        confidence, lengths, facts = self._round
        self._policy.observe(confidence, lengths, torch.from_numpy(num_accepted), facts)


class GoodputSchedule:
    """One length for all rows, decided before drafting, 0 included: only that many slots are drafted (TurboSpec).

    The estimate and the choice are policy `goodput`'s. Where plain steps look best, a round with one draft each is
    tried after every `TRIAL_EVERY` of them, since plain ones teach nothing.
    """

    def __init__(self, traces: FlatTraces, costs: StepCosts, num_rows: int) -> None:
        self._policy = GoodputPolicy()
        self._num_slots = traces.num_slots
        self._costs = costs
        self._facts = RoundFacts(
            traces.num_slots,
            tuple(range(num_rows)),
            torch.ones(num_rows, dtype=torch.bool),
            torch.full((num_rows,), traces.num_slots),
            torch.full((num_rows,), traces.num_slots),
            costs,
        )
        self._num_plain = 0
        self._length = 0

    def choose(self, places: Counts, row_ids: Sequence[int]) -> Choice:
        self._length = self._best_length()
        if self._length == 0 and self._num_plain >= TRIAL_EVERY:
            self._length = 1
        self._num_plain = 0 if self._length else self._num_plain + 1
        return Choice(self._length, np.full(len(places), self._length, dtype=np.int64))

    def observe(self, num_accepted: Counts) -> None:
        if self._length:
            lengths = torch.full((len(num_accepted),), self._length)
            self._policy.observe(Confidence(None, None), lengths, torch.from_numpy(num_accepted), self._facts)

    def _best_length(self) -> int:
        num_rows = len(self._facts.row_ids)
        rates = [num_rows / (self._costs.seconds[num_rows] + self._costs.overhead_s)]
        goodput = self._policy.goodput(self._num_slots, self._facts.num_live, self._costs).tolist()
        for length in range(1, self._num_slots + 1):
            whole_s = self._costs.round_seconds(num_rows * (1 + length))
            spared_s = (self._num_slots - length) * self._costs.slot_s
            rates.append(goodput[length] * whole_s / (whole_s - spared_s))
        return int(np.argmax(rates))


class GeneratedSchedule:
    """A policy as generate() runs it: its gate may leave drafting out, and slots that do not pay are not drafted."""

    def __init__(self, policy: VerificationPolicy, traces: FlatTraces, costs: StepCosts, num_rows: int) -> None:
        self._traces = traces
        times = _FixedCosts(costs, num_rows)
        slots = traces.num_slots
        # Rows follow one another without an end, as on a server.
        self._scheduler = Scheduler(policy, slots, times, torch.device("cpu"), block_size=slots, fills_freed_rows=True)
        self._num_rows = num_rows
        self._live = torch.ones(num_rows, dtype=torch.bool)
        self._lengths: Tensor | None = None
        self._row_ids: Sequence[int] = ()  # of the round in progress

    def choose(self, places: Counts, row_ids: Sequence[int]) -> Choice:
        self._lengths, self._row_ids = None, row_ids
        if not self._scheduler.wants_draft(self._num_rows, 1):
            return Choice(0, np.zeros(self._num_rows, dtype=np.int64))
        most = self._traces.num_slots
        num_slots = self._scheduler.slots(dict.fromkeys(row_ids, most + 1), most)
        whole = torch.full((self._num_rows,), num_slots)
        facts = RoundFacts(num_slots, tuple(row_ids), self._live, whole, whole, self._scheduler.costs)
        self._lengths = self._scheduler.lengths(confidence_at(self._traces, places, num_slots), facts)
        return Choice(num_slots, self._lengths.numpy())

    def observe(self, num_accepted: Counts) -> None:
        lengths = [0] * self._num_rows if self._lengths is None else self._lengths.tolist()
        accepted = num_accepted.tolist()
        self._scheduler.observe(torch.from_numpy(num_accepted), self._lengths, accepted, lengths, self._row_ids)


class _FixedCosts:
    """What the scheduler asks of a profile, for one number of rows and any context."""

    def __init__(self, costs: StepCosts, num_rows: int) -> None:
        slots = (len(costs.seconds) - 1) // num_rows
        self.grid = ProfileGrid((num_rows,), tuple(range(1, slots + 1)), (1,))
        self._costs = costs

    def step_costs(self, num_rows: int, context: int) -> MeasuredCosts:
        return MeasuredCosts(self._costs.step_s, self._costs.draft_s, self._costs.slot_s)

    def overhead_s(self, num_rows: int) -> float:
        return self._costs.overhead_s


def confidence_at(traces: FlatTraces, places: Counts, num_slots: int | None = None) -> Confidence:
    """What a policy sees of rows at `places`, of the first `num_slots` slots."""
    conditional, survival = (torch.from_numpy(v[places, :num_slots]) for v in (traces.conditional, traces.survival))
    return Confidence(conditional, survival)


MakeSchedule = Callable[[FlatTraces, StepCosts, int], Schedule]
