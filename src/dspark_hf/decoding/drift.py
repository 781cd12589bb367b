"""Watching whether survival estimates still agree with outcomes: traffic or the target may have changed since the fit.

Greedy and sampled rounds follow different laws, and a drafter has a calibration for each: a watch follows one mode.
Opt-in, since it keeps state across generate() calls:

    with watch_drift(drafter) as watch:
        ...  # any number of generate() calls
    print(watch.check())
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config_rules import CALIBRATION_MODES
from ..errors import CalibrationError
from ..modeling_dspark import DSparkDraftModel
from .calibrate import mode_name
from .observers import EndedRounds, observe_rounds

logger = logging.getLogger(__name__)

NUM_PARTS = 10  # of the window; the oldest leaves at once


@dataclass(frozen=True)
class SlotDrift:
    """Predicted against realised survival of one slot over the window.

    Attributes:
        slot: From 1.
        num_rounds: Rounds in which the target saw it.
        predicted: Mean `a_k`.
        realised: Share of them in which drafts 1..k were all accepted.
        standard_error: Of `realised` if the predictions were right and rounds independent.
    """

    slot: int
    num_rounds: int
    predicted: float
    realised: float
    standard_error: float

    @property
    def gap(self) -> float:
        """How much too high the prediction is."""
        return self.predicted - self.realised


class _Part:
    """Sums over some rounds; those of predictions stay on the device until they are asked for."""

    def __init__(self, num_slots: int) -> None:
        self.num_rounds = 0
        self.num_verified = [0] * num_slots
        self.num_accepted = [0] * num_slots
        self.sums: Tensor | None = None  # float32 [2, slots]: a_k, a_k (1 - a_k)


class DriftWatch:
    """Sums over recent rounds, and one warning when predictions and outcomes part.

    A round costs a few additions on tensors of `[rows, slots]`, and no read from the device but one per `check_every`
    rounds.

    Args:
        num_slots: gamma of the drafter.
        mode: `greedy` or `sampled`, whose rounds count; None: that of the first round.
        window_rounds: Rounds that count; older ones are forgotten a tenth at a time.
        bound: Largest mean gap of a slot that is no drift.
        min_rounds: Rounds that a slot needs before it is judged.
        num_standard_errors: A gap must be larger than so many, too.
        check_every: Rounds between checks.

    Raises:
        CalibrationError: a number is out of range.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        mode: str | None = None,
        window_rounds: int = 2000,
        bound: float = 0.1,
        min_rounds: int = 200,
        num_standard_errors: float = 4.0,
        check_every: int = 200,
    ) -> None:
        if num_slots < 1 or check_every < 1 or not 1 <= min_rounds <= window_rounds:
            raise CalibrationError(
                "num_slots and check_every must be >= 1, and min_rounds 1 to window_rounds, got "
                f"{num_slots}, {check_every}, {min_rounds} and {window_rounds}; leave them out for the defaults"
            )
        if mode is not None and mode not in CALIBRATION_MODES:
            raise CalibrationError(
                f"mode must be one of {', '.join(CALIBRATION_MODES)}, got {mode!r}; leave it out for that of the first "
                "round"
            )
        self.mode = mode
        self._chooses_mode = mode is None
        self._num_slots = num_slots
        self._bound = bound
        self._min_rounds = min_rounds
        self._num_standard_errors = num_standard_errors
        self._check_every = check_every
        self._part_rounds = max(1, window_rounds // NUM_PARTS)
        self._parts: deque[_Part] = deque([_Part(num_slots)], maxlen=NUM_PARTS)
        self._since_check = 0
        self._ended: deque[EndedRounds] = deque()
        self._num_ended = 0
        self._window_rounds = window_rounds
        self.has_warned = False

    @property
    def rounds(self) -> list[EndedRounds]:
        """The rounds of the window, oldest first: what a refit may use."""
        return list(self._ended)

    def __call__(self, ended: EndedRounds) -> None:
        """As an observer of rounds."""
        if ended.survival is None or not self._counts(mode_name(ended.is_sampled)):
            return
        self._ended.append(ended)
        self._num_ended += len(ended.rows)
        while self._num_ended - len(self._ended[0].rows) >= self._window_rounds:
            self._num_ended -= len(self._ended.popleft().rows)
        self.observe(ended.survival, ended.num_verified, ended.num_accepted)

    def _counts(self, mode: str) -> bool:
        """Whether rounds of a mode are watched; says once that those of another are not, unless that was asked for."""
        self.mode = self.mode or mode
        if mode != self.mode and self._chooses_mode:
            self._chooses_mode = False
            logger.warning(
                "this drift watch follows %s rounds, as its first was one; %s ones are left out: watch them with "
                "mode=%r too",
                self.mode,
                mode,
                mode,
            )
        return mode == self.mode

    def observe(self, survival: Tensor, num_verified: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Add rounds that are over.

        Args:
            survival: float32 `[rows, slots]`, as predicted before the target saw the drafts.
            num_verified, num_accepted: Of each row.
        """
        part = self._parts[-1]
        if part.num_rounds >= self._part_rounds:
            part = _Part(self._num_slots)
            self._parts.append(part)
        part.num_rounds += len(num_verified)
        slots = torch.arange(survival.shape[1])
        is_verified = (slots < torch.tensor(num_verified)[:, None]).to(survival.device, non_blocking=True)
        values = torch.stack([survival, survival * (1 - survival)])
        sums = torch.where(is_verified, values, 0.0).sum(dim=1)
        sums = torch.nn.functional.pad(sums, (0, self._num_slots - sums.shape[1]))
        part.sums = sums if part.sums is None else part.sums + sums
        for verified, accepted in zip(num_verified, num_accepted, strict=True):
            for k in range(verified):
                part.num_verified[k] += 1
            for k in range(accepted):
                part.num_accepted[k] += 1
        self._since_check += len(num_verified)
        if self._since_check >= self._check_every and not self.has_warned:
            self._since_check = 0
            self._warn(self.check())

    def check(self) -> list[SlotDrift]:
        """Every slot that was verified in the window; reads from the device."""
        parts = [part for part in self._parts if part.sums is not None]
        if not parts:
            return []
        sums = torch.stack([part.sums.cpu() for part in parts if part.sums is not None]).sum(dim=0).tolist()
        found = []
        for k in range(self._num_slots):
            verified = sum(part.num_verified[k] for part in parts)
            accepted = sum(part.num_accepted[k] for part in parts)
            if verified:
                error = (max(sums[1][k], 0.0) ** 0.5) / verified
                found.append(SlotDrift(k + 1, verified, sums[0][k] / verified, accepted / verified, error))
        return found

    def has_drifted(self, slot: SlotDrift) -> bool:
        """Whether a slot is past the bound, on enough rounds, by more than chance."""
        gap = abs(slot.gap)
        is_large = gap > self._bound and gap > self._num_standard_errors * slot.standard_error
        return slot.num_rounds >= self._min_rounds and is_large

    def _warn(self, slots: list[SlotDrift]) -> None:
        """Once per watch."""
        worst = max((slot for slot in slots if self.has_drifted(slot)), key=lambda slot: abs(slot.gap), default=None)
        if worst is None or self.has_warned:
            return
        self.has_warned = True
        logger.warning(
            "the drafter's confidence has drifted: over the last %d rounds drafts 1 to %d were all accepted in %.0f %% "
            "where %.0f %% was predicted; output is unaffected, policies decide worse. Fit it again with `dspark "
            "calibrate`, or from these rounds with dspark_hf.fitting.refit",
            worst.num_rounds,
            worst.slot,
            100 * worst.realised,
            100 * worst.predicted,
        )


@contextmanager
def watch_drift(drafter: DSparkDraftModel, *, mode: str | None = None) -> Iterator[DriftWatch]:
    """Watch the generate() calls of this thread (or asyncio task) inside the block, under the default bounds.

    Args:
        mode: `greedy` or `sampled`, whose rounds count; None: that of the first round. Blocks nest, one for each.

    Raises:
        CalibrationError: there is no such mode.
    """
    watch = DriftWatch(drafter.config.block_size, mode=mode)

    def of_this_drafter(ended: EndedRounds) -> None:
        if ended.drafter is drafter:
            watch(ended)

    with observe_rounds(of_this_drafter):
        yield watch
