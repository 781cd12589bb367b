"""Whether a throughput profile still holds: measured against predicted seconds of the steps that a generation runs."""

import functools
import logging
import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from statistics import median

from .profile_store import renewal_command
from .throughput import ThroughputProfile

logger = logging.getLogger(__name__)

# A machine that is shared slows down by half now and then; twice as slow for many steps is another machine.
WARN_FACTOR = 2.0
WINDOW_STEPS = 64
MIN_STEPS = 16

# Of so many profiles, the latest used, the steps are remembered from call to call.
MAX_PROFILES = 8


_PAUSED: ContextVar[bool] = ContextVar("dspark_step_residuals_paused", default=False)


@contextmanager
def without_step_residuals() -> Iterator[None]:
    """Hear of no steps inside the block, where the clock runs on while others have their turn."""
    token = _PAUSED.set(True)
    try:
        yield
    finally:
        _PAUSED.reset(token)


class StepResiduals:
    """Running ratios of measured to predicted step seconds, of the last steps only.

    A ratio that is the same at every B leaves the best B as it was, apart from the draft's share; so a profile that is
    off is warned of, once, and never changed.

    Args:
        profile: What predicts.
        warn_factor: Warn once when the median ratio is above this, or below its inverse; > 1.
        window_steps: Steps that count, the latest.
        min_steps: Steps before the first judgement.
    """

    def __init__(
        self,
        profile: ThroughputProfile,
        *,
        warn_factor: float = WARN_FACTOR,
        window_steps: int = WINDOW_STEPS,
        min_steps: int = MIN_STEPS,
    ) -> None:
        if not warn_factor > 1.0:
            raise ValueError(f"warn_factor must be above 1, got {warn_factor!r}; 2 means twice as slow or fast")
        self._profile = profile
        self._warn_factor = warn_factor
        self._min_steps = min_steps
        self._window: deque[tuple[int, float]] = deque(maxlen=window_steps)
        self._has_warned = False

    def observe(self, num_rows: int, num_tokens: int, context: int, measured_s: float) -> None:
        """Take a finished step; arguments as for `ThroughputProfile.step_s`.

        Steps that were not profiled say nothing about the profile and are passed over, and so are times that no clock
        gives. On accelerators `measured_s` must be the device's time, not the host's.
        """
        is_time = math.isfinite(measured_s) and measured_s > 0
        if _PAUSED.get() or not is_time or not self._profile.covers(num_rows, num_tokens):
            return
        self._window.append((num_rows, measured_s / self._profile.step_s(num_rows, num_tokens, context)))
        if self.is_off and not self._has_warned:
            self._has_warned = True
            self._warn()

    @property
    def ratio(self) -> float | None:
        """Median of measured over predicted seconds, latest steps; None before `min_steps` of them."""
        if len(self._window) < self._min_steps:
            return None
        return median(ratio for _, ratio in self._window)

    @property
    def ratios_by_rows(self) -> dict[int, float]:
        """The same for each number of rows among the latest steps, however few."""
        return {n: median(r for m, r in self._window if m == n) for n in sorted({m for m, _ in self._window})}

    @property
    def is_off(self) -> bool:
        """Whether the profile is off by more than `warn_factor`, either way."""
        ratio = self.ratio
        return ratio is not None and not 1.0 / self._warn_factor <= ratio <= self._warn_factor

    def _warn(self) -> None:
        logger.warning(
            "target steps take %.2f times as long as the throughput profile says (median of %d steps); if the machine "
            "is not just busy, renew it with `%s`",
            self.ratio,
            len(self._window),
            renewal_command(self._profile),
        )


@functools.lru_cache(maxsize=MAX_PROFILES)
def residuals_of(profile: ThroughputProfile) -> StepResiduals:
    """Those of a profile in this process: calls are short, and one warning is enough for all of them."""
    return StepResiduals(profile)
