"""What a round costs on this machine: measured seconds of target steps, drafts and plain steps, and between them.

The paper's `SPS(B)` (section 5, Algorithm 1) is `1 / step_s`: target steps per second when B tokens are verified in one
step. Real curves have stairs, so nothing here is smoothed and nothing is forced to grow.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import ThroughputProfileError
from .fingerprint import Fingerprint

FORMAT_VERSION = 2

# Far above any batch or context; a damaged file must not break interpolation later.
MAX_GRID_POINT = 2**31 - 1


class MeasuredCosts(NamedTuple):
    """What a policy weighs for one round of some rows at some context.

    Attributes:
        step_s: float64 `[max_B + 1]`, seconds of a target step that verifies B tokens, by B.
        draft_s: Seconds of the draft of whole blocks before it, whatever B is.
        slot_s: Of those, seconds of each slot but the first.
    """

    step_s: Tensor
    draft_s: float
    slot_s: float = 0.0


@dataclass(frozen=True)
class ProfileGrid:
    """Where measurements were taken; each ascending.

    Attributes:
        num_rows: Rows R that share a step.
        tokens_per_row: Tokens of each row in a step, the anchor counted; from 1.
        contexts: Tokens of the longest row before its anchor.
    """

    num_rows: tuple[int, ...]
    tokens_per_row: tuple[int, ...]
    contexts: tuple[int, ...]


class RoundTimes(Protocol):
    """What a scheduler asks of a machine: a [`ThroughputProfile`] answers from measurements, a simulated one from a
    formula."""

    @property
    def grid(self) -> ProfileGrid:
        """What is known; fewer rows than its fewest cost what those do."""
        ...

    def step_costs(self, num_rows: int, context: int) -> MeasuredCosts:
        """Step seconds by B, up to a whole block of every row, and draft seconds."""
        ...

    def overhead_s(self, num_rows: int) -> float:
        """Seconds of a round that are neither draft nor target step."""
        ...


@dataclass(frozen=True, eq=False)
class Timings:
    """Repeated measurements of the points of a grid, in seconds: median and quartiles, float64, all of one shape."""

    median_s: Tensor
    q1_s: Tensor
    q3_s: Tensor

    @classmethod
    def of(cls, samples_s: Tensor) -> "Timings":
        """From float64 `[..., repeats]`."""
        q1_s, median_s, q3_s = samples_s.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64), dim=-1)
        return cls(median_s, q1_s, q3_s)


@dataclass(frozen=True)
class CurveShape:
    """How far SPS over B is from a smooth fall, at one number of rows and one context.

    Attributes:
        num_steps: Steps of B between measured points.
        num_rises: Steps after which SPS is higher, noise included.
        num_clear_rises: The same where the quartiles of both points do not overlap.
        largest_jump: Largest factor by which one step of B lengthens the target step.
        jump_at_num_tokens: B before that step.
    """

    num_rows: int
    context: int
    num_steps: int
    num_rises: int
    num_clear_rises: int
    largest_jump: float
    jump_at_num_tokens: int


@dataclass(frozen=True, eq=False)
class ThroughputProfile:
    """Measured costs of one target and drafter on one machine, made by `dspark profile`.

    In the padded layout a step computes `rows * (1 + width)` tokens, the width being the longest draft. B therefore
    means computed tokens here: a schedule of uneven drafts costs what its longest draft would cost in every row.

    Between measured points the seconds are linear in B, in the number of rows (at equal tokens per row) and in the
    context. A context outside the measured ones is taken at the nearest. Rows and tokens outside raise: there the next
    stair is unknown.

    Attributes:
        fingerprint: Of target, drafter and machine.
        target, drafter: Their names, for people; a drafter without one is what `dspark profile` takes by default.
        grid: Where it was measured.
        step: Target steps, `[rows, tokens_per_row, contexts]`.
        draft: Greedy drafts (stages 1 to 3) of whole blocks of all rows, `[rows, contexts]`.
        first_slot: The same of one slot.
        plain: Steps of plain generate() with its dynamic cache, one token a row, `[rows, contexts]`.
        overhead: The rest of a round (acceptance, commit, bookkeeping), `[rows]`, at a short context.
        num_repeats: Measurements per point.
        provenance: Command, versions, device and more, as in other reports.
    """

    fingerprint: Fingerprint
    target: str
    drafter: str | None
    grid: ProfileGrid
    step: Timings
    draft: Timings
    first_slot: Timings
    plain: Timings
    overhead: Timings
    num_repeats: int
    provenance: dict[str, Any]

    # -- queries ------------------------------------------------------------------------------------------------

    def covers(self, num_rows: int, num_tokens: int) -> bool:
        """Whether a step of `num_tokens` tokens (B) of `num_rows` rows lies within what was measured."""
        rows = self.grid.num_rows
        return rows[0] <= num_rows <= rows[-1] and 1 <= num_tokens <= num_rows * self.grid.tokens_per_row[-1]

    def step_s(self, num_rows: int, num_tokens: int, context: int) -> float:
        """Seconds of a target step that computes `num_tokens` tokens (B) for `num_rows` rows.

        Fewer tokens than rows cost what one token a row costs: rows that have ended stay in the step until they are
        taken out.

        Raises:
            ThroughputProfileError: so many rows or tokens were not measured.
        """
        self._check_rows(num_rows)
        if not self.covers(num_rows, num_tokens):
            most = num_rows * self.grid.tokens_per_row[-1]
            raise ThroughputProfileError(
                f"a step of {num_tokens} tokens for {num_rows} rows was not measured: this profile knows 1 to {most} "
                "tokens for them, up to the drafter's block; ask for at most that"
            )
        return float(self._curve(num_rows, context, np.array([num_tokens]))[0])

    def step_costs(self, num_rows: int, context: int) -> MeasuredCosts:
        """Step seconds by B, up to a whole block of every row, and draft seconds.

        Entries below `num_rows` are as in [`step_s`]; entry 0 is never asked for.

        Raises:
            ThroughputProfileError: so many rows were not measured.
        """
        self._check_rows(num_rows)
        num_tokens = np.arange(num_rows * self.grid.tokens_per_row[-1] + 1)
        step_s = torch.from_numpy(self._curve(num_rows, context, num_tokens))
        draft_s = self.draft_s(num_rows, context)
        num_others = self.grid.tokens_per_row[-1] - 2  # slots behind the first
        slot_s = (draft_s - self._at(self.first_slot, num_rows, context)) / num_others if num_others else 0.0
        return MeasuredCosts(step_s, draft_s, max(0.0, slot_s))

    def draft_s(self, num_rows: int, context: int) -> float:
        """Seconds of drafting a block for each of `num_rows` rows.

        Raises:
            ThroughputProfileError: so many rows were not measured.
        """
        return self._at(self.draft, num_rows, context)

    def plain_step_s(self, num_rows: int, context: int) -> float:
        """Seconds of one step of plain generate(), one token for each of `num_rows` rows; raises as `draft_s`.

        For comparison by people, `dspark profile` prints it; policies compare with steps of the drafter's own caches.
        """
        return self._at(self.plain, num_rows, context)

    def overhead_s(self, num_rows: int) -> float:
        """Seconds of a round that are neither draft nor target step; raises as `draft_s`."""
        self._check_rows(num_rows)
        return float(self.overhead.median_s @ _weights(self.grid.num_rows, num_rows))

    def curve_shapes(self) -> tuple[CurveShape, ...]:
        """Rises and jumps of every measured curve."""
        return tuple(self._shape(r, c) for r in range(len(self.grid.num_rows)) for c in range(len(self.grid.contexts)))

    # -- JSON ---------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Everything as dicts and lists, for JSON; `curve_shapes` is for readers, and is not read back."""
        timings = {name: getattr(self, name) for name in TIMING_AXES}
        return {
            "format_version": FORMAT_VERSION,
            "fingerprint": asdict(self.fingerprint),
            "target": self.target,
            "drafter": self.drafter,
            "grid": asdict(self.grid),
            "num_repeats": self.num_repeats,
            **{name: {part: table.tolist() for part, table in vars(value).items()} for name, value in timings.items()},
            "curve_shapes": [asdict(shape) for shape in self.curve_shapes()],
            "provenance": self.provenance,
        }

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "ThroughputProfile":
        """The profile that [`to_dict`] wrote.

        Raises:
            ThroughputProfileError: it is something else, or was changed.
        """
        try:
            if content["format_version"] != FORMAT_VERSION:
                raise ValueError(f"format_version is {content['format_version']!r}, and {FORMAT_VERSION} is read")
            grid = ProfileGrid(**{name: tuple(map(int, points)) for name, points in content["grid"].items()})
            _check_grid(grid)
            return cls(
                fingerprint=Fingerprint.from_dict(content["fingerprint"]),
                target=str(content["target"]),
                drafter=None if content["drafter"] is None else str(content["drafter"]),
                grid=grid,
                num_repeats=int(content["num_repeats"]),
                provenance=dict(content["provenance"]),
                **{name: _timings(content, name, axes, grid) for name, axes in TIMING_AXES.items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
            # The last two: numbers that no int or no tensor can hold.
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ThroughputProfileError(
                f"this is no throughput profile, or a damaged one ({what}); make a new one with `dspark profile`"
            ) from error

    # -- parts --------------------------------------------------------------------------------------------------

    def _check_rows(self, num_rows: int) -> None:
        rows = self.grid.num_rows
        if not rows[0] <= num_rows <= rows[-1]:
            raise ThroughputProfileError(
                f"{num_rows} rows were not measured: this profile knows {rows[0]} to {rows[-1]}; renew it with "
                f"`dspark profile` and --batch-size {num_rows} among the sizes"
            )

    def _curve(self, num_rows: int, context: int, num_tokens: np.ndarray) -> np.ndarray:
        """Step seconds, float64, at each of `num_tokens` (B)."""
        by_tokens = torch.einsum(
            "rtc,r,c->t",
            self.step.median_s,
            _weights(self.grid.num_rows, num_rows),
            _weights(self.grid.contexts, context),
        )
        curve: np.ndarray = np.interp(num_tokens / num_rows, self.grid.tokens_per_row, by_tokens.numpy())
        return curve

    def _at(self, timings: Timings, num_rows: int, context: int) -> float:
        self._check_rows(num_rows)
        by_rows = timings.median_s @ _weights(self.grid.contexts, context)
        return float(by_rows @ _weights(self.grid.num_rows, num_rows))

    def _shape(self, r: int, c: int) -> CurveShape:
        median_s, q1_s, q3_s = (table[r, :, c] for table in (self.step.median_s, self.step.q1_s, self.step.q3_s))
        ratios = median_s[1:] / median_s[:-1]
        jump = int(ratios.argmax())
        num_rows = self.grid.num_rows[r]
        return CurveShape(
            num_rows=num_rows,
            context=self.grid.contexts[c],
            num_steps=len(ratios),
            num_rises=int((ratios < 1).sum()),
            num_clear_rises=int((q3_s[1:] < q1_s[:-1]).sum()),
            largest_jump=float(ratios[jump]),
            jump_at_num_tokens=num_rows * self.grid.tokens_per_row[jump],
        )


# The timings of a profile, and the axes of each.
TIMING_AXES = {
    "step": ("num_rows", "tokens_per_row", "contexts"),
    "draft": ("num_rows", "contexts"),
    "first_slot": ("num_rows", "contexts"),
    "plain": ("num_rows", "contexts"),
    "overhead": ("num_rows",),
}


def _weights(points: Sequence[int], value: float) -> Tensor:
    """Linear interpolation as a product: float64 `[points]`, one or two not zero; the nearest point outside."""
    above = int(np.clip(np.searchsorted(points, value), 1, max(1, len(points) - 1)))
    weights = torch.zeros(len(points), dtype=torch.float64)
    if len(points) == 1:
        weights[0] = 1.0
        return weights
    low, high = points[above - 1], points[above]
    share = min(1.0, max(0.0, (value - low) / (high - low)))
    weights[above - 1], weights[above] = 1.0 - share, share
    return weights


def _check_grid(grid: ProfileGrid) -> None:
    for name, points in asdict(grid).items():
        is_ascending = all(a < b for a, b in zip(points, points[1:], strict=False))
        if not points or not is_ascending or points[0] < 1 or points[-1] > MAX_GRID_POINT:
            raise ValueError(
                f"grid.{name} must be whole numbers from 1 to {MAX_GRID_POINT}, each once, ascending, got "
                f"{str(points)[:100]}"
            )
    if grid.tokens_per_row[0] != 1 or len(grid.tokens_per_row) < 2:
        raise ValueError(f"grid.tokens_per_row must begin with 1 and go on, got {grid.tokens_per_row}")


def _timings(content: dict[str, Any], name: str, axes: tuple[str, ...], grid: ProfileGrid) -> Timings:
    shape = tuple(len(getattr(grid, axis)) for axis in axes)
    tables = {part: torch.tensor(values, dtype=torch.float64) for part, values in content[name].items()}
    for part, table in tables.items():
        if table.shape != shape:
            raise ValueError(f"{name}.{part} has the shape {tuple(table.shape)}, and the grid {shape}")
        if not all(math.isfinite(value) and value > 0 for value in table.flatten().tolist()):
            raise ValueError(f"{name}.{part} must be finite and above 0")
    return Timings(**tables)
