"""Lanes take turns on the device: one at a time, and the one that has had it least goes on.

So both texts grow as they would side by side, while neither slows the other down, and each lane's seconds are its own.
"""

import threading
import time
from collections.abc import Callable

# Seconds by which a lane may be ahead before another goes on. Short enough to look like a race; long enough that what
# a change of lanes costs (threads that spin down, cold caches) does not show in the speeds.
SLICE_S = 0.15


class RaceStopped(Exception):
    """Raised inside a lane whose race was cancelled or has failed elsewhere; no error of anybody's."""


class Turns:
    """Who has the device.

    Args:
        is_cancelled: Asked at each change between rounds.
        first: The lane that begins.
        clock: Seconds.
    """

    def __init__(
        self,
        num_lanes: int,
        is_cancelled: Callable[[], bool],
        *,
        first: int = 0,
        slice_s: float = SLICE_S,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._condition = threading.Condition()
        self._is_cancelled = is_cancelled
        self._has_failed = False
        self._slice_s = slice_s
        self._clock = clock
        self._used_s = [0.0] * num_lanes
        self._waiting = set(range(num_lanes))  # lanes that have not ended
        self._running = first
        self._since_s: float | None = None

    def begin(self, lane: int) -> None:
        """Wait for the lane's first turn.

        Raises:
            RaceStopped: the race is over before it came.
        """
        with self._condition:
            self._await(lane)

    def mark(self, lane: int) -> float:
        """Seconds that the lane, which is running, has had the device."""
        with self._condition:
            self._book(lane)
            return self._used_s[lane]

    def pass_on(self, lane: int) -> bool:
        """Let another lane run, if it is behind, and wait for the next turn; True when another ran.

        Raises:
            RaceStopped: the race is over.
        """
        with self._condition:
            self._book(lane)
            self._refuse_if_over()
            others = self._waiting - {lane}
            behind = min(others, key=self._used_s.__getitem__, default=None)
            if behind is None or self._used_s[lane] < self._used_s[behind] + self._slice_s:
                return False
            self._hand_to(behind)
            self._await(lane)
            return True

    def end(self, lane: int) -> float:
        """Leave the race, give the device to another lane, and return the seconds that this one has had it."""
        with self._condition:
            self._waiting.discard(lane)
            if self._running == lane:
                self._book(lane)
                self._since_s = None
                if self._waiting:
                    self._hand_to(min(self._waiting, key=self._used_s.__getitem__))
            return self._used_s[lane]

    def fail(self) -> None:
        """End the race: every lane that gets its turn stops."""
        with self._condition:
            self._has_failed = True

    def _await(self, lane: int) -> None:
        self._condition.wait_for(lambda: self._running == lane)
        self._refuse_if_over()
        self._since_s = self._clock()

    def _hand_to(self, lane: int) -> None:
        self._running, self._since_s = lane, None
        self._condition.notify_all()

    def _book(self, lane: int) -> None:
        if self._since_s is not None:
            now_s = self._clock()
            self._used_s[lane] += now_s - self._since_s
            self._since_s = now_s

    def _refuse_if_over(self) -> None:
        if self._has_failed or self._is_cancelled():
            raise RaceStopped
