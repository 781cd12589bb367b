"""Replaying a schedule on acceptance traces: a server whose batch is always full, without models and clocks.

Rows take prompts from a queue; a row whose prompt is done takes the next one, so that every round has the same number
of rows. When the queue is empty, rows go on with prompts that count for nothing until all that count are done: no round
is easier than others for being the last. What a round costs is asked afterwards (`RoundLog.seconds`), so that one
replay of a schedule that does not read step times serves every machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..decoding.policies.facts import StepCosts
from .settings import ComparisonError
from .traces import AcceptanceTraces, Counts, Floats

Doubles = NDArray[np.float64]

# Prompts that a row gets to see at least, one after the other.
PROMPTS_PER_ROW = 2

# Where prompts are cut, least tokens that are kept of each.
MIN_TOKENS = 16


@dataclass(frozen=True, eq=False)
class FlatTraces:
    """The places of all prompts behind each other.

    Attributes:
        conditional, survival: float32 `[places, slots]`.
        num_accepted: int64 `[places]`.
        starts, ends: int64 `[prompts]`, the places of each prompt.
        domains: Of each prompt.
        is_by_position: Whether a round of n tokens goes on n places later.
    """

    conditional: Floats
    survival: Floats
    num_accepted: Counts
    starts: Counts
    ends: Counts
    domains: tuple[str, ...]
    is_by_position: bool

    @classmethod
    def of(cls, traces: AcceptanceTraces) -> "FlatTraces":
        """The same numbers."""
        ends = np.cumsum([len(prompt) for prompt in traces.prompts])
        return cls(
            conditional=np.concatenate([prompt.conditional for prompt in traces.prompts]),
            survival=np.concatenate([prompt.survival for prompt in traces.prompts]),
            num_accepted=np.concatenate([prompt.num_accepted for prompt in traces.prompts]),
            starts=np.concatenate([[0], ends[:-1]]),
            ends=ends,
            domains=tuple(prompt.domain for prompt in traces.prompts),
            is_by_position=traces.layout == "positions",
        )

    @property
    def num_slots(self) -> int:
        """gamma."""
        return int(self.survival.shape[1])


@dataclass(frozen=True, eq=False)
class Load:
    """Which prompts a batch works through; every schedule gets the same.

    Attributes:
        num_rows: Rows of every round.
        prompts: int64 `[texts]`, in the order of the queue; a prompt may come several times.
        starts, ends: int64 `[texts]`, the places of each text: a row that comes to the end takes the next text.
        limits: int64 `[texts]`, where its prompt ends: a round may go beyond a text, and not beyond its prompt.
    """

    num_rows: int
    prompts: Counts
    starts: Counts
    ends: Counts
    limits: Counts


def deal(traces: FlatTraces, num_rows: int, *, max_rounds: int, seed: int) -> Load:
    """Shuffle the prompts into a queue, as often as the rows need; cut a piece out of each where it gets too long.

    Args:
        max_rounds: Rounds of whole drafts that the queue is worth, about.

    Raises:
        ComparisonError: `num_rows` or `max_rounds` is below 1.
    """
    if num_rows < 1 or max_rounds < 1:
        raise ComparisonError(f"rows and rounds must be >= 1, got {num_rows} and {max_rounds}")
    rng = np.random.default_rng([seed, num_rows])
    num_prompts = len(traces.starts)
    repeats = -(-PROMPTS_PER_ROW * num_rows // num_prompts)
    prompts = np.concatenate([rng.permutation(num_prompts) for _ in range(repeats)])
    starts, limits = traces.starts[prompts], traces.ends[prompts]
    places_a_round = 1.0 + float(traces.num_accepted.mean()) if traces.is_by_position else 1.0
    most = max(MIN_TOKENS, int(max_rounds * num_rows * places_a_round / len(prompts)))
    starts = starts + rng.integers(0, np.maximum(limits - starts - most, 0) + 1)
    return Load(num_rows, prompts, starts, np.minimum(limits, starts + most), limits)


class Choice(NamedTuple):
    """What a schedule wants of a round: slots drafted, 0 for a plain step; drafts verified, int64 `[rows]`."""

    num_slots: int
    lengths: Counts


class Schedule(Protocol):
    """Chooses how much is drafted and verified, round by round. One instance serves one replay."""

    def choose(self, places: Counts, row_ids: Sequence[int]) -> Choice:
        """For rows that stand at `places`; a row keeps its id while it works at a text."""
        ...

    def observe(self, num_accepted: Counts) -> None:
        """Take how many drafts of each row were accepted in the round that was chosen last."""
        ...


@dataclass(frozen=True, eq=False)
class RoundLog:
    """What a replay came to.

    Attributes:
        num_rows: Rows of every round.
        num_verified: int64 `[rounds]`, B: tokens verified, anchors counted.
        num_slots: int64 `[rounds]`, slots drafted of each row; 0 where nothing was drafted.
        expected_tokens: float64 `[rounds]`, tau of all rows by the survival estimates.
        prompts: int64 `[texts]`, the prompt of each text.
        first, last: int64 `[texts]`, the rounds in which it was worked at.
        tokens, drafts, accepted: int64 `[texts]`: committed, verified, accepted.
        starved: int64 `[texts]`, rounds in which none of its drafts was verified.
        longest_wait: int64 `[texts]`, the longest run of these.
    """

    num_rows: int
    num_verified: Counts
    num_slots: Counts
    expected_tokens: Doubles
    prompts: Counts
    first: Counts
    last: Counts
    tokens: Counts
    drafts: Counts
    accepted: Counts
    starved: Counts
    longest_wait: Counts

    @property
    def rounds(self) -> Counts:
        """Rounds of each text, int64 `[texts]`."""
        return self.last - self.first + 1

    def seconds(self, costs: StepCosts) -> Doubles:
        """Seconds of each round on a machine, float64 `[rounds]`."""
        step_s = np.asarray(costs.seconds)
        block = (len(step_s) - 1) // self.num_rows - 1
        left_out = np.where(self.num_slots > 0, block - self.num_slots, 0)
        draft_s = np.where(self.num_slots > 0, costs.draft_s - left_out * costs.slot_s, 0.0)
        return np.asarray(step_s[self.num_verified] + costs.overhead_s + draft_s, dtype=np.float64)

    def text_seconds(self, costs: StepCosts) -> Doubles:
        """Each text's share of the seconds of its rounds, in which all rows share alike; float64 `[texts]`."""
        until = np.concatenate([[0.0], np.cumsum(self.seconds(costs))])
        return np.asarray((until[self.last + 1] - until[self.first]) / self.num_rows, dtype=np.float64)

    def by_prompt(self, values: Counts | Doubles, num_prompts: int) -> Doubles:
        """Sums of a value of texts over those of each prompt, float64 `[prompts]`."""
        sums = np.bincount(self.prompts, weights=values, minlength=num_prompts)
        return np.asarray(sums, dtype=np.float64)


def replay(traces: FlatTraces, load: Load, schedule: Schedule) -> RoundLog:
    """Work through a load under a schedule."""
    batch = _Batch(traces, load)
    while batch.is_busy:
        choice = schedule.choose(batch.places, batch.row_ids)
        schedule.observe(batch.advance(choice))
    return batch.log()


class _Batch:
    """The rows of a replay, and the books."""

    def __init__(self, traces: FlatTraces, load: Load) -> None:
        self._traces = traces
        self._load = load
        num_texts, num_rows = len(load.prompts), load.num_rows
        self._slots = np.arange(traces.num_slots)
        self._next = num_rows
        self._texts = np.arange(num_rows)  # beyond the queue: texts that do not count
        self.row_ids = list(range(num_rows))
        self.places = load.starts[self._texts % num_texts].copy()
        self._ends = load.ends[self._texts % num_texts].copy()
        self._limits = load.limits[self._texts % num_texts].copy()
        self._waits = np.zeros(num_rows, dtype=np.int64)
        self._rounds: list[tuple[int, int, float]] = []
        self._num_open = num_texts
        # One column more, for what does not count.
        self._sums = np.zeros((4, num_texts + 1), dtype=np.int64)
        self._longest = np.zeros(num_texts + 1, dtype=np.int64)
        self._first = np.zeros(num_texts + 1, dtype=np.int64)
        self._last = np.zeros(num_texts + 1, dtype=np.int64)

    @property
    def is_busy(self) -> bool:
        """Whether a text that counts is not done."""
        return self._num_open > 0

    def advance(self, choice: Choice) -> Counts:
        """Play a round; drafts accepted, int64 `[rows]`."""
        lengths, at = choice.lengths, self.places
        accepted: Counts = np.minimum(self._traces.num_accepted[at], lengths)
        following = np.minimum(at + accepted + 1, self._limits) if self._traces.is_by_position else at + 1
        tokens = following - at if self._traces.is_by_position else accepted + 1
        expected = float(self._traces.survival[at][self._slots < lengths[:, None]].sum()) + len(at)
        self._rounds.append((len(at) + int(lengths.sum()), choice.num_slots, expected))
        self._waits = np.where(lengths > 0, 0, self._waits + 1)
        # Texts that do not count share the last column, where later ones overwrite earlier ones: nobody reads it.
        books = np.minimum(self._texts, len(self._load.prompts))
        self._sums[:, books] += np.stack([tokens, lengths, accepted, lengths == 0])
        self._longest[books] = np.maximum(self._longest[books], self._waits)
        self.places = following
        for row in np.flatnonzero(following >= self._ends).tolist():
            self._take_next(row)
        return accepted

    def _take_next(self, row: int) -> None:
        done, number = int(self._texts[row]), len(self._rounds)
        num_texts = len(self._load.prompts)
        if done < num_texts:
            self._last[done] = number - 1
            self._num_open -= 1
        text, self._next = self._next, self._next + 1
        self._texts[row] = self.row_ids[row] = text
        self.places[row] = self._load.starts[text % num_texts]
        self._ends[row] = self._load.ends[text % num_texts]
        self._limits[row] = self._load.limits[text % num_texts]
        self._waits[row] = 0
        self._first[min(text, num_texts)] = number

    def log(self) -> RoundLog:
        """The books, without the last column."""
        verified, slots, expected = (np.array(column) for column in zip(*self._rounds, strict=True))
        tokens, drafts, accepted, starved = self._sums[:, :-1]
        return RoundLog(
            num_rows=self._load.num_rows,
            num_verified=verified,
            num_slots=slots,
            expected_tokens=expected,
            prompts=self._load.prompts,
            first=self._first[:-1],
            last=self._last[:-1],
            tokens=tokens,
            drafts=drafts,
            accepted=accepted,
            starved=starved,
            longest_wait=self._longest[:-1],
        )
