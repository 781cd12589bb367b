"""Measuring a throughput profile: which points, in which order, how often. What is timed stands behind `Bench`."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from ..errors import ThroughputProfileError
from .throughput import TIMING_AXES, ProfileGrid, Timings

DEFAULT_NUM_ROWS = (1, 2, 4, 8, 16, 32)
DEFAULT_CONTEXTS = (64, 512)
DEFAULT_NUM_REPEATS = 5


class Bench(Protocol):
    """Runs and times one thing at a time, for the number of rows last opened; warm before the first."""

    def open(self, num_rows: int) -> None:
        """Make ready for `num_rows` rows and warm up; nothing of this is counted."""
        ...

    def step_s(self, tokens_per_row: int, context: int) -> float:
        """Seconds of a target step of `tokens_per_row` tokens for each row."""
        ...

    def draft_s(self, context: int, num_slots: int | None = None) -> float:
        """Seconds of drafting `num_slots` slots for every row; None: the whole block."""
        ...

    def plain_step_s(self, context: int) -> float:
        """Seconds of a step of plain generate()."""
        ...

    def overhead_s(self) -> float:
        """Seconds of a round that are neither draft nor target step."""
        ...


@dataclass(frozen=True)
class ProfilePlan:
    """What is to be measured.

    Attributes:
        num_rows, contexts: See `ProfileGrid`; in any order, duplicates are measured once.
        num_repeats: Measurements per point.
        seed: Of their order.

    Raises:
        ThroughputProfileError: a value breaks its rule.
    """

    num_rows: tuple[int, ...] = DEFAULT_NUM_ROWS
    contexts: tuple[int, ...] = DEFAULT_CONTEXTS
    num_repeats: int = DEFAULT_NUM_REPEATS
    seed: int = 0

    def __post_init__(self) -> None:
        for name, option in (("num_rows", "--batch-size"), ("contexts", "--context")):
            points = tuple(sorted(set(getattr(self, name))))
            if not points or points[0] < 1:
                raise ThroughputProfileError(
                    f"{name} ({option}) must be one or more whole numbers >= 1, got {list(points)}"
                )
            object.__setattr__(self, name, points)
        if self.num_repeats < 1:
            raise ThroughputProfileError(
                f"num_repeats must be >= 1, got {self.num_repeats}; quartiles mean little below 5"
            )

    def grid(self, block_size: int) -> ProfileGrid:
        """Its points, with every number of tokens per row that a block of `block_size` drafts can give."""
        return ProfileGrid(self.num_rows, tuple(range(1, block_size + 2)), self.contexts)


class Measured(NamedTuple):
    """The timings of a `ThroughputProfile`."""

    step: Timings
    draft: Timings
    first_slot: Timings
    plain: Timings
    overhead: Timings


def measure(bench: Bench, plan: ProfilePlan, grid: ProfileGrid, on_measured: Callable[[], object]) -> Measured:
    """Time every point of a grid `plan.num_repeats` times.

    Each repeat visits the numbers of rows in a new random order, and at each of them all points in a new random order:
    a machine that grows slower meanwhile widens the quartiles and bends no curve.

    Args:
        on_measured: Called after each of the `num_measurements` measurements.
    """
    order = random.Random(plan.seed)
    shapes = {kind: [len(getattr(grid, axis)) for axis in axes] for kind, axes in TIMING_AXES.items()}
    samples = {kind: torch.full((*shape, plan.num_repeats), torch.nan).double() for kind, shape in shapes.items()}
    for repeat in range(plan.num_repeats):
        for r in order.sample(range(len(grid.num_rows)), len(grid.num_rows)):
            bench.open(grid.num_rows[r])
            points = list(_points(grid))
            for kind, index in order.sample(points, len(points)):
                samples[kind][(r, *index, repeat)] = _time(bench, grid, kind, index)
                on_measured()
    assert not any(table.isnan().any() for table in samples.values()), "every point was measured"
    return Measured(**{kind: Timings.of(table) for kind, table in samples.items()})


def num_measurements(plan: ProfilePlan, grid: ProfileGrid) -> int:
    """How many measurements [`measure`] takes."""
    return plan.num_repeats * len(grid.num_rows) * sum(1 for _ in _points(grid))


def _points(grid: ProfileGrid) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What is measured at one number of rows: its kind, and its place in that kind's table behind the rows."""
    for c in range(len(grid.contexts)):
        yield from (("step", (t, c)) for t in range(len(grid.tokens_per_row)))
        yield "draft", (c,)
        yield "first_slot", (c,)
        yield "plain", (c,)
    yield "overhead", ()


def _time(bench: Bench, grid: ProfileGrid, kind: str, index: tuple[int, ...]) -> float:
    if kind == "overhead":
        return bench.overhead_s()
    context = grid.contexts[index[-1]]
    if kind == "step":
        return bench.step_s(grid.tokens_per_row[index[0]], context)
    if kind == "plain":
        return bench.plain_step_s(context)
    return bench.draft_s(context, 1 if kind == "first_slot" else None)
