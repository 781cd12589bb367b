"""What speculation did: counts and seconds per stage, for one generate() call or for all inside a `with` block."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from transformers.generation.utils import GenerateDecoderOnlyOutput

from .._compat import shared_by_copies
from .._version import __version__


@dataclass
class SpeculationReport:
    """Counts of one or several speculative generate() calls.

    A round is one draft and the target forward that verifies it, or that forward alone where a policy leaves drafting
    out. Accepted length (tau) counts the token that the
    target itself adds (the bonus token), so it lies between 1 and gamma + 1.

    Attributes:
        num_calls: generate() calls, each of `num_return_sequences` counted.
        num_rounds: Rounds, summed over calls.
        num_target_forwards: Rounds plus prefill forwards.
        num_new_tokens: Tokens added to the sequences.
        num_drafted: Draft tokens drawn.
        num_verified: Draft tokens that went through a target forward.
        num_accepted: Draft tokens accepted, also where a stop then cut them off (bonus tokens not counted).
        verified_per_slot, accepted_per_slot: The same by slot, slot 1 first.
        reached_per_slot: Verified drafts whose predecessors were all accepted, by slot.
        num_unusable_rounds: Rounds whose draft was cut at a slot that held NaN or infinity.
        prefill_s, draft_s, verify_s, accept_s: Seconds in the prompt's forward, stages 1 to 3, stage 4 and stage 5.
        other_s: Seconds in stop checks, streaming and bookkeeping. On accelerators all of these are host times.
    """

    num_calls: int = 0
    num_rounds: int = 0
    num_target_forwards: int = 0
    num_new_tokens: int = 0
    num_drafted: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    verified_per_slot: list[int] = field(default_factory=list)
    accepted_per_slot: list[int] = field(default_factory=list)
    reached_per_slot: list[int] = field(default_factory=list)
    num_unusable_rounds: int = 0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    accept_s: float = 0.0
    other_s: float = 0.0

    @property
    def tau(self) -> float:
        """Accepted length: mean number of tokens that a round commits, bonus token counted; NaN without a round.

        Tokens behind a stop do not count. The first token of a call comes with the prompt's forward, not from a round.
        """
        return (self.num_new_tokens - self.num_calls) / self.num_rounds if self.num_rounds else float("nan")

    @property
    def total_s(self) -> float:
        """Seconds in all stages."""
        return self.prefill_s + self.draft_s + self.verify_s + self.accept_s + self.other_s

    @property
    def conditional_acceptance(self) -> list[float]:
        """Share of drafts accepted in each slot, among those whose predecessors were all accepted; NaN if none."""
        counts = zip(self.accepted_per_slot, self.reached_per_slot, strict=True)
        return [accepted / reached if reached else float("nan") for accepted, reached in counts]

    def count_round(self, num_drafted: int, num_verified: int, num_accepted: int) -> None:
        """Add one row's round."""
        self.num_rounds += 1
        self.num_target_forwards += 1
        self.num_drafted += num_drafted
        self.num_verified += num_verified
        self.num_accepted += num_accepted
        self._grow(num_drafted)
        for slot in range(num_verified):
            self.verified_per_slot[slot] += 1
            self.reached_per_slot[slot] += slot <= num_accepted
        for slot in range(num_accepted):
            self.accepted_per_slot[slot] += 1

    def merge(self, other: "SpeculationReport") -> None:
        """Add another report's counts and seconds to this one."""
        self._grow(len(other.verified_per_slot))
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if isinstance(mine, list):
                for slot, count in enumerate(value):
                    mine[slot] += count
            else:
                setattr(self, name, mine + value)

    def _grow(self, num_slots: int) -> None:
        for counts in (self.verified_per_slot, self.accepted_per_slot, self.reached_per_slot):
            counts.extend([0] * (num_slots - len(counts)))


@dataclass
class GenerateDSparkOutput(GenerateDecoderOnlyOutput):
    """The usual output of generate() with reports of what speculation did.

    Attributes:
        speculation: Of the whole call.
        speculation_by_row: Of each row; seconds, and forwards that rows shared, are in `speculation` only.
    """

    speculation: SpeculationReport | None = None
    speculation_by_row: tuple[SpeculationReport, ...] | None = None


# Of all copies of a release, so that a block hears of drafters loaded with `trust_remote_code=True` too.
_ACTIVE_REPORTS: ContextVar[tuple[SpeculationReport, ...]] = shared_by_copies(
    f"reports of {__version__}", lambda: ContextVar("dspark_reports", default=())
)


@contextmanager
def record_speculation() -> Iterator[SpeculationReport]:
    """Collect what speculation does inside the block, also where only tensors or pipeline outputs come back.

    Counts every speculative generate() call of this thread (or asyncio task) that ends inside the block. Blocks nest.

    Example:
        ```python
        with record_speculation() as report:
            model.generate(**inputs, assistant_model=drafter, max_new_tokens=64)
        print(report.tau, report.num_target_forwards)
        ```
    """
    report = SpeculationReport()
    token = _ACTIVE_REPORTS.set((*_ACTIVE_REPORTS.get(), report))
    try:
        yield report
    finally:
        _ACTIVE_REPORTS.reset(token)


def publish(report: SpeculationReport) -> None:
    """Add a finished call's report to the active `record_speculation()` blocks."""
    for active in _ACTIVE_REPORTS.get():
        active.merge(report)


class StageClock:
    """Adds the seconds since the last mark to one of a report's stages."""

    def __init__(self, report: SpeculationReport) -> None:
        self._report = report
        self._last_s = time.perf_counter()

    def mark(self, stage: str) -> float:
        """Book the time since the previous mark under `stage` (a field name such as `draft_s`); returns its seconds."""
        now_s = time.perf_counter()
        seconds, self._last_s = now_s - self._last_s, now_s
        setattr(self._report, stage, getattr(self._report, stage) + seconds)
        return seconds
