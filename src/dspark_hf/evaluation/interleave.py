"""Several generations in turns, one target forward each, so that they can be timed against each other.

The speed of a shared machine drifts within seconds by more than the differences worth knowing. Calls of generate() that
follow one another see different machines; calls that advance side by side, forward by forward, see the same one. Each
way of generating runs on a twin of the target, which shares its weights and nothing else, so that what a generation
leaves on the model for its duration (attention, static cache, hooks) is its own.

Seconds by stage in a way's own report (`.speculation`) run on while others have their turn: read [`Turns`] instead.
"""

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from transformers import PreTrainedModel

from ..fitting.step_residuals import without_step_residuals

Result = TypeVar("Result")


@dataclass(frozen=True)
class Turns(Generic[Result]):
    """What one way of generating took.

    Attributes:
        result: What it returned.
        seconds: Of its turns together; the time of the others is not counted.
        num_forwards: Forwards of its twin; a turn begins with each.
        first_turns_s: Seconds up to the end of its first forward's turn, which is its prompt's.
    """

    result: Result
    seconds: float
    num_forwards: int
    first_turns_s: float


def twin_of(target: PreTrainedModel) -> PreTrainedModel:
    """A model with the same weights, the very tensors, and modules, config and hooks of its own."""
    tensors = [*target.parameters(), *target.buffers()]
    return copy.deepcopy(target, {id(tensor): tensor for tensor in tensors})


def interleave(
    target: PreTrainedModel,
    ways: Mapping[str, Callable[[Any], Result]],
    num_forwards: Mapping[str, int] | None = None,
    twins: Mapping[str, PreTrainedModel] | None = None,
) -> dict[str, Turns[Result]]:
    """Run each way with a twin of the target, in turns: the one that is furthest behind takes the next.

    Args:
        ways: By name: takes its twin, calls its generate() as often as it likes, returns anything. Random numbers are
            drawn from one stream by all, so sampled text depends on who else runs.
        num_forwards: How many forwards each way will need, so that all get through together; of a run before. None:
            as many for each.
        twins: Of [`twin_of`], one for each way, to use again; None makes them.

    Raises:
        ValueError: no ways; other names in `num_forwards` or `twins` than in `ways`; a count below one.
        Exception: whatever a way raises; the others are ended where they stand.
    """
    _check(ways, num_forwards, twins)
    twins = twins or {name: twin_of(target) for name in ways}
    players = [_Player(ways[name], twins[name], (num_forwards or {}).get(name, 1)) for name in ways]
    # One outer block: a way that leaves its own no_grad block must not switch gradients on for the others.
    with torch.no_grad():
        try:
            while waiting := [player for player in players if not player.is_done]:
                min(waiting, key=lambda player: player.progress).take_turn()
        finally:
            for player in players:
                player.end()
    return dict(zip(ways, (player.turns() for player in players), strict=True))


def _check(ways: Mapping[str, Any], *others: Mapping[str, Any] | None) -> None:
    if not ways:
        raise ValueError("there are no ways to interleave; give at least one")
    for other in others:
        if other is not None and set(other) != set(ways):
            raise ValueError(f"names {sorted(other)} and {sorted(ways)} must be the same")
    counts = others[0] or {}
    if any(count < 1 for count in counts.values()):
        raise ValueError(f"num_forwards must be 1 or more for each way, got {dict(counts)}")


class _Player(Generic[Result]):
    """One way as a coroutine that gives its turn away before each forward of its twin."""

    def __init__(self, way: Callable[[Any], Result], twin: PreTrainedModel, num_forwards: int) -> None:
        self._twin = twin
        self._num_expected = num_forwards
        self._num_forwards = 0
        self._seconds = 0.0
        self._first_turns_s: float | None = None
        self._results: list[Result] = []
        self._way = way
        self._parent = getcurrent()
        self._greenlet = greenlet(self._run)
        self._hook = twin.register_forward_pre_hook(self._give_away)

    def _run(self) -> None:
        with without_step_residuals():
            self._results.append(self._way(self._twin))

    @property
    def is_done(self) -> bool:
        return bool(self._greenlet.dead)

    @property
    def progress(self) -> float:
        return self._num_forwards / self._num_expected

    def take_turn(self) -> None:
        """Go on up to the next forward, or to the end."""
        start_s = time.perf_counter()
        self._greenlet.switch()
        if self._twin.device.type == "cuda":
            torch.cuda.synchronize(self._twin.device)
        self._seconds += time.perf_counter() - start_s
        if self._first_turns_s is None and (self._num_forwards > 1 or self.is_done):
            self._first_turns_s = self._seconds

    def _give_away(self, module: Any, inputs: Any) -> None:
        self._num_forwards += 1
        self._parent.switch()

    def end(self) -> None:
        """Unwind what has not ended, so that nothing of it stays."""
        self._hook.remove()
        if not self._greenlet.dead:
            self._greenlet.throw(GreenletExit)

    def turns(self) -> Turns[Result]:
        first_s = self._seconds if self._first_turns_s is None else self._first_turns_s
        return Turns(self._results[0], self._seconds, self._num_forwards, first_s)
