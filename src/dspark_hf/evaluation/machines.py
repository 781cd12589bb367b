"""Machines that schedules are compared on: a measured one, and staircases given by a formula."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..decoding.policies.facts import StepCosts
from ..errors import ThroughputProfileError
from ..fitting.throughput import ThroughputProfile

# Tokens that cost as much as everything else in a step of a staircase.
SCALE = 256


@dataclass(frozen=True, eq=False)
class Machine:
    """Costs of a round for any number of rows.

    Attributes:
        name: For people; of a staircase its formula.
        unit: What time is counted in.
        costs: Costs of a round by the number of rows; raises ThroughputProfileError where that was not measured.
        plain_step_s: Time of a step of plain generation, which has no drafter, by the number of rows; raises likewise.
        max_rows: Most rows; None: any number.
    """

    name: str
    unit: str
    costs: Callable[[int], StepCosts]
    plain_step_s: Callable[[int], float]
    max_rows: int | None = None

    def plain_costs(self, num_rows: int) -> StepCosts:
        """Costs of plain generation: of a round that verifies nothing and has no loop around it."""
        return StepCosts.of([self.plain_step_s(num_rows)] * (num_rows + 1))


def staircase(width: int, num_slots: int, scale: int = SCALE) -> Machine:
    """Step times `1 + w * ceil(B / w) / scale` for B tokens, in units of a step without tokens; drafts are free.

    Args:
        width: w, tokens that a stair is wide; 1 is a straight line.
    """

    def costs(num_rows: int) -> StepCosts:
        return StepCosts.of([1 + width * -(-b // width) / scale for b in range(num_rows * (1 + num_slots) + 1)])

    name = f"1 + B/{scale}" if width == 1 else f"1 + {width}⌈B/{width}⌉/{scale}"
    return Machine(name, "empty steps", costs, lambda num_rows: costs(num_rows).seconds[num_rows])


def measured(profile: ThroughputProfile, num_slots: int, context: int) -> Machine:
    """The machine that a profile was measured on, at one context.

    Raises:
        ThroughputProfileError: it was measured with shorter blocks.
    """
    block = profile.grid.tokens_per_row[-1] - 1
    if block < num_slots:
        raise ThroughputProfileError(
            f"the profile has blocks of {block} drafts, and the traces {num_slots}; profile the drafter of the traces"
        )

    def costs(num_rows: int) -> StepCosts:
        found = profile.step_costs(num_rows, context)
        step_s = found.step_s[: num_rows * (1 + num_slots) + 1].tolist()
        whole = StepCosts.of(step_s, found.draft_s, profile.overhead_s(num_rows), slot_s=found.slot_s)
        return whole.without_slots(block - num_slots)

    return Machine(
        name=f"measured at {context} tokens of context",
        unit="seconds",
        costs=costs,
        plain_step_s=lambda num_rows: profile.plain_step_s(num_rows, context),
        max_rows=profile.grid.num_rows[-1],
    )


def machines_for(
    widths: Sequence[int], profile: ThroughputProfile | None, num_slots: int, context: int
) -> list[Machine]:
    """The measured machine first, where there is one, then a staircase of each width."""
    first = [] if profile is None else [measured(profile, num_slots, context)]
    return [*first, *(staircase(width, num_slots) for width in widths)]
