"""Machines to simulate on: measured profiles, and formulas."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from ...decoding.policies.facts import StepCosts
from ...decoding.scheduler import COSTS_EVERY_TOKENS
from ...fitting.profile_store import load_profile
from ...fitting.throughput import MeasuredCosts, ProfileGrid, RoundTimes
from ..settings import ComparisonError
from .paper import fitted_round

FORMULA_MACHINES = ("accelerator", "staircase")

# Seconds of a step beside what its tokens cost: a scale only, no ratio depends on it.
BASE_S = 0.02
# Of that, what drafting the first slot takes, and each further one. The paper gives no draft time of its production
# models; these are near its 0.2 ms a serial step (Figure 4) in a round of 20 ms.
FIRST_SLOT_SHARE = 0.05
SLOT_SHARE = 0.01
# The staircase: tokens of a step that cost the same, and tokens that cost as much as the rest of a step.
STAIR_TOKENS = 64
STAIRCASE_TOKENS_PER_BASE = 256.0
MAX_ROWS = 512


@dataclass(frozen=True)
class FormulaTimes:
    """Step seconds `base_s * (1 + w * ceil(B / w) / tokens_per_base)` with `w = stair_tokens`, whatever the context.

    Attributes:
        base_s: Seconds of a step beside its tokens.
        tokens_per_base: Tokens that cost as much as that.
        block_size: Most drafts of a row.
        stair_tokens: 1: a straight line.
        first_slot_s, slot_s: Seconds of drafting the first slot of every row, and each further one.
        max_rows: Most rows.
    """

    base_s: float
    tokens_per_base: float
    block_size: int
    stair_tokens: int = 1
    first_slot_s: float = 0.0
    slot_s: float = 0.0
    max_rows: int = MAX_ROWS

    @cached_property
    def grid(self) -> ProfileGrid:
        """Rows 1 to `max_rows`, one anchor and `block_size` drafts each."""
        return ProfileGrid((1, self.max_rows), tuple(range(1, self.block_size + 2)), (1,))

    def step_costs(self, num_rows: int, context: int) -> MeasuredCosts:
        """As of a profile; the context costs nothing."""
        num_tokens = torch.arange(num_rows * (1 + self.block_size) + 1, dtype=torch.float64)
        stairs = (num_tokens / self.stair_tokens).ceil() * self.stair_tokens
        draft_s = self.first_slot_s + (self.block_size - 1) * self.slot_s
        return MeasuredCosts(self.base_s * (1 + stairs / self.tokens_per_base), draft_s, self.slot_s)

    def overhead_s(self, num_rows: int) -> float:
        """Nothing: it is part of `base_s`."""
        return 0.0


@dataclass(frozen=True, eq=False)
class Machine:
    """A machine with a name.

    Attributes:
        description: Formula or source, for readers.
        times: What rounds take.
        prefill_token_s: Seconds that a token of a prompt holds up all rows when its request is admitted.
        origin: Provenance of a measured profile.
        plain_step_s: Seconds of a step of plain generation by rows and tokens of context; None: those of a round that
            drafts nothing.
    """

    name: str
    description: str
    times: RoundTimes
    prefill_token_s: float = 0.0
    origin: dict[str, object] | None = None
    plain_step_s: Callable[[int, int], float] | None = None
    _known: dict[tuple[int, int], StepCosts] = field(default_factory=dict)
    _known_plain: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def max_rows(self) -> int:
        """Most rows of a step."""
        return self.times.grid.num_rows[-1]

    @property
    def block_size(self) -> int:
        """Most drafts of a row."""
        return self.times.grid.tokens_per_row[-1] - 1

    def costs(self, num_rows: int, context: int) -> StepCosts:
        """Seconds of a round of so many rows at so many tokens of the longest, whole blocks drafted."""
        bucket = context // COSTS_EVERY_TOKENS
        key = num_rows, bucket
        if key not in self._known:
            rows = max(num_rows, self.times.grid.num_rows[0])
            measured = self.times.step_costs(rows, bucket * COSTS_EVERY_TOKENS)
            self._known[key] = StepCosts.of(
                measured.step_s.tolist(), measured.draft_s, self.times.overhead_s(rows), slot_s=measured.slot_s
            )
        return self._known[key]

    def plain_s(self, num_rows: int, context: int) -> float:
        """Seconds of a step of plain generation, without a drafter and what its rounds need beside it."""
        bucket = context // COSTS_EVERY_TOKENS
        key = num_rows, bucket
        if key not in self._known_plain:
            if self.plain_step_s is None:
                costs = self.costs(num_rows, context)
                self._known_plain[key] = costs.seconds[num_rows] + costs.overhead_s
            else:
                rows = max(num_rows, self.times.grid.num_rows[0])
                self._known_plain[key] = self.plain_step_s(rows, bucket * COSTS_EVERY_TOKENS)
        return self._known_plain[key]


def machine_of(name: str, block_size: int) -> Machine:
    """A machine by name: one of `FORMULA_MACHINES`, or the path of what `dspark profile` wrote.

    Args:
        name: Formula or file.
        block_size: Drafts of a round on a formula's machine; a profile knows its own.

    Raises:
        ComparisonError: neither.
        ThroughputProfileError: the file holds no profile.
    """
    if name == "accelerator":
        return accelerator(block_size)
    if name == "staircase":
        return staircase(block_size)
    path = Path(name)
    if not path.is_file():
        raise ComparisonError(
            f"machine must be one of {', '.join(FORMULA_MACHINES)} or the file of a profile, got {name!r}; write one "
            "with `dspark profile --json FILE`"
        )
    profile = load_profile(path)
    own = profile.fingerprint
    threads = "" if own.num_threads is None else f", {own.num_threads} threads"
    most = profile.grid.num_rows[-1]
    longest = profile.step_costs(most, profile.grid.contexts[0]).step_s
    return Machine(
        name=f"measured {path.stem}",
        description=f"profile of {profile.target} on {own.device}{threads}, {own.dtype}; {most} rows at most",
        times=profile,
        prefill_token_s=float(longest[-1]) / (len(longest) - 1),
        origin=profile.provenance,
        plain_step_s=profile.plain_step_s,
    )


def accelerator(block_size: int) -> Machine:
    """A large accelerator: rounds as the paper's MTP-1 curve implies them (Figure 8, V4-Flash).

    MTP-1 verifies two tokens of each request, so its curve gives seconds of a round over B = 2 * requests up to a
    factor, accepted tokens per round. They lie on a straight line, whose slope is taken over. Prompts are filled in
    elsewhere: whatever they cost there is in the curve already.
    """
    line = fitted_round("V4-Flash")
    times = FormulaTimes(
        base_s=BASE_S * (1 - FIRST_SLOT_SHARE),
        tokens_per_base=line.tokens_per_base * (1 - FIRST_SLOT_SHARE),
        block_size=block_size,
        first_slot_s=BASE_S * FIRST_SLOT_SHARE,
        slot_s=BASE_S * SLOT_SHARE,
    )
    return Machine(
        "accelerator", f"{_formula(times)}; slope from the paper's MTP-1 curve of V4-Flash (Figure 8)", times
    )


def staircase(block_size: int) -> Machine:
    """A machine whose steps take tiles of tokens."""
    times = FormulaTimes(
        base_s=BASE_S,
        tokens_per_base=STAIRCASE_TOKENS_PER_BASE,
        block_size=block_size,
        stair_tokens=STAIR_TOKENS,
        first_slot_s=BASE_S * FIRST_SLOT_SHARE,
        slot_s=BASE_S * SLOT_SHARE,
    )
    return Machine("staircase", _formula(times), times)


def _formula(times: FormulaTimes) -> str:
    tokens = "B" if times.stair_tokens == 1 else f"{times.stair_tokens} ceil(B / {times.stair_tokens})"
    draft_s = times.first_slot_s + (times.block_size - 1) * times.slot_s
    assert math.isfinite(draft_s)
    return (
        f"step = {1000 * times.base_s:g} ms * (1 + {tokens} / {times.tokens_per_base:.0f}), draft of a block "
        f"{1000 * draft_s:g} ms, one slot {1000 * times.first_slot_s:g} ms"
    )
