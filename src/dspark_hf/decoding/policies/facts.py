"""What a verification policy may know besides confidences, and the interface of all policies."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from ..types import Confidence, DraftBlock


@dataclass(frozen=True, eq=False)
class StepCosts:
    """Seconds of a round by the number of verified tokens B, for the present number of rows and context.

    A round that verifies B tokens, of which tau are kept on average, gives `tau / round_s(B)` tokens a second. The
    draft is paid for by then, but it is part of the round: leaving it out would make verification look dearer than
    it is and stop too early. With `draft_s = overhead_s = 0` this is the paper's `Theta = tau * SPS(B)` (section 5).

    Attributes:
        step_s: float `[max_B + 1]`, seconds of one target step over B tokens, anchors counted: `B = sum_r (1 + ell_r)`
            over the rows that have not ended. Entry 0 is never read, nor those beyond live rows * (1 + slots).
            float64, or float32 where a device has nothing better.
        draft_s: Seconds of one draft of the present rows.
        slot_s: Of those, seconds of each slot but the first.
        overhead_s: Seconds of a round that are neither, drafted or not.
        row_s: Seconds that a plain step takes longer for each row, on average.
    """

    step_s: Tensor
    draft_s: float = 0.0
    overhead_s: float = 0.0
    slot_s: float = 0.0
    row_s: float = 0.0

    @classmethod
    def of(
        cls,
        step_s: Sequence[float],
        draft_s: float = 0.0,
        overhead_s: float = 0.0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float64,
        slot_s: float = 0.0,
        row_s: float = 0.0,
    ) -> "StepCosts":
        """Costs from numbers on the host, which nobody then has to read back from the device."""
        costs = cls(torch.tensor(step_s, dtype=dtype, device=device), draft_s, overhead_s, slot_s, row_s)
        costs.__dict__["seconds"] = tuple(step_s)  # as the cached property would
        return costs

    def without_slots(self, num_left_out: int) -> "StepCosts":
        """The same where so many slots at the end of the block are not drafted."""
        if not num_left_out:
            return self
        costs = replace(self, draft_s=self.draft_s - num_left_out * self.slot_s)
        costs.__dict__["seconds"] = self.seconds
        return costs

    def round_seconds(self, num_tokens: int) -> float:
        """Seconds of a drafted round that verifies B = `num_tokens`, on the host."""
        return self.seconds[min(num_tokens, len(self.seconds) - 1)] + self.draft_s + self.overhead_s

    @property
    def sps(self) -> Tensor:
        """Target steps per second by B, `1 / step_s`, float `[max_B + 1]`: draft and overhead left out."""
        return 1.0 / self.step_s

    @cached_property
    def round_s(self) -> Tensor:
        """Seconds of a drafted round by B, float `[max_B + 1]`."""
        return self.step_s + (self.draft_s + self.overhead_s)

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """`step_s` on the host; one read from the device unless made by [`of`]."""
        return tuple(self.step_s.tolist())

    @cached_property
    def smooth_round_s(self) -> Tensor:
        """Lower convex envelope of `round_s` from B = 1 on, float `[max_B + 1]`.

        A staircase becomes the line through the far ends of its steps, where each step is best used.
        """
        envelope = list(self.seconds)
        for (left, low), (right, high) in pairwise(_lower_hull(self.seconds)):
            for b in range(left, right):
                envelope[b] = low + (high - low) * (b - left) / (right - left)
        return self.step_s.new_tensor(envelope) + (self.draft_s + self.overhead_s)

    @cached_property
    def step_ends(self) -> Tensor:
        """The last B before the step time next rises, for each B; int64 `[max_B + 1]`."""
        ends = list(range(len(self.seconds)))
        for b in reversed(range(len(ends) - 1)):
            if self.seconds[b + 1] <= self.seconds[b]:
                ends[b] = ends[b + 1]
        return torch.tensor(ends, device=self.step_s.device)


def _lower_hull(seconds: Sequence[float]) -> list[tuple[int, float]]:
    """Corners `(B, seconds)` of the lower convex hull from B = 1 on."""
    hull: list[tuple[int, float]] = []
    for b, value in enumerate(seconds[1:], start=1):
        while len(hull) >= 2:
            (left, low), (middle, between) = hull[-2:]
            if (between - low) * (b - left) < (value - low) * (middle - left):
                break
            hull.pop()
        hull.append((b, value))
    return hull


@dataclass(frozen=True, eq=False)
class RoundFacts:
    """What a policy may know of a round besides confidences.

    Attributes:
        num_slots: Drafts of each row in this block.
        row_ids: The rows of this generate() call that the tensors speak of, in their order; a row keeps its id.
        is_live: bool `[rows]`; a row that has ended verifies nothing and does not count in B.
        room: int64 `[rows]`, most drafts that max_length leaves room for.
        num_usable: int64 `[rows]`, slots before the first with broken numbers. Known slot by slot, as confidences
            are: slot k is judged by tokens before it.
        costs: None where no throughput profile is at hand.
        weights: float `[rows]`, what a token of each row is worth, 1 on average over the live ones, from past rounds
            only; None: all the same.
    """

    num_slots: int
    row_ids: tuple[int, ...]
    is_live: Tensor
    room: Tensor
    num_usable: Tensor
    costs: StepCosts | None = None
    weights: Tensor | None = None

    @classmethod
    def of(
        cls,
        block: DraftBlock,
        *,
        row_ids: tuple[int, ...] | None = None,
        is_live: Tensor | None = None,
        room: Tensor | None = None,
        costs: StepCosts | None = None,
        weights: Tensor | None = None,
    ) -> "RoundFacts":
        """Facts about `block`; by default all rows are live and there is room for every draft."""
        num_rows, num_slots = block.tokens.shape
        usable = block.num_usable
        return cls(
            num_slots=num_slots,
            row_ids=tuple(range(num_rows)) if row_ids is None else row_ids,
            is_live=torch.ones_like(usable, dtype=torch.bool) if is_live is None else is_live,
            room=torch.full_like(usable, num_slots) if room is None else room,
            num_usable=usable,
            costs=costs,
            weights=weights,
        )

    @cached_property
    def limits(self) -> Tensor:
        """Most drafts of each row that can be verified, int64 `[rows]`."""
        return torch.minimum(self.known_limits, self.num_usable)

    @cached_property
    def known_limits(self) -> Tensor:
        """The same before anything was drafted: without `num_usable`."""
        return self.room.clamp(min=0, max=self.num_slots) * self.is_live

    @cached_property
    def num_live(self) -> Tensor:
        """B of a plain step, int64 scalar."""
        return self.is_live.sum()


class VerificationPolicy(Protocol):
    """Chooses `ell`, the drafts of each row that are verified. One instance serves one generate() call.

    Attributes:
        needs_confidence: The drafter must have a confidence head.
        needs_costs: `facts.costs` must be given.
    """

    name: str
    needs_confidence: bool
    needs_costs: bool

    def lengths(self, confidence: Confidence, facts: RoundFacts) -> Tensor:
        """Drafts to verify, int64 `[rows]`, each 0 to `num_slots`; [`schedule`] cuts at what can be verified."""
        ...

    def observe(self, confidence: Confidence, lengths: Tensor, num_accepted: Tensor, facts: RoundFacts) -> None:
        """Take what a drafted round came to; later rounds may depend on it.

        Args:
            confidence: Of that round, as given to [`lengths`].
            lengths: int64 `[rows]`, drafts verified.
            num_accepted: int64 `[rows]`, drafts kept, bonus token not counted.
            facts: Of that round.
        """
        ...
