"""What one way did with one batch."""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


class Round(NamedTuple):
    """A round of a drafter.

    Attributes:
        num_rows: Rows that took part.
        width: Longest verified draft among them.
        num_slots: Slots drafted for each row; 0: none.
        context: Tokens of the longest row before its anchor.
        num_flat: Tokens of all rows, where they ran as one stream; None: as a grid, each row as wide as the longest.
    """

    num_rows: int
    width: int
    num_slots: int
    context: int
    num_flat: int | None = None


@dataclass(frozen=True)
class Stages:
    """Seconds by stage, waiting for others not counted; `outside` is what generate() does before and after rounds.

    Host times: on an accelerator the device lags behind, and its seconds land in whichever stage waits for it.
    """

    prefill_s: float
    draft_s: float
    verify_s: float
    accept_s: float
    other_s: float
    outside_s: float


@dataclass(frozen=True)
class Speculation:
    """What a drafter of ours did, summed over rows; fields as in `SpeculationReport`."""

    num_rounds: int
    num_drafted: int
    num_verified: int
    num_accepted: int
    reached_per_slot: tuple[int, ...]
    accepted_per_slot: tuple[int, ...]
    stages: Stages
    rounds: tuple[Round, ...]


@dataclass(frozen=True)
class Difference:
    """Where a greedy text parts from that of plain generation; see `FirstDifference`."""

    row: int
    position: int
    token_gap: float | None
    is_error: bool


@dataclass(frozen=True)
class WayRun:
    """One generate() call.

    Attributes:
        num_rows: Of the batch.
        num_new_tokens: Of all rows, up to the first end token of each, which counts.
        latency_s: Seconds in which the call had the device.
        first_token_s: Of these, until the forward that gives the first token was over.
        num_forwards: Of the target.
        speculation: None for what is no drafter of ours.
        num_identical: Rows whose text is that of plain generation; None where texts are sampled.
        differences: Of the others.
    """

    num_rows: int
    num_new_tokens: int
    latency_s: float
    first_token_s: float
    num_forwards: int
    speculation: Speculation | None = None
    num_identical: int | None = None
    differences: tuple[Difference, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "WayRun":
        """What `to_dict` gave, read from JSON."""
        fields = dict(content)
        if (spoken := fields["speculation"]) is not None:
            told = dict(spoken)
            told["stages"] = Stages(**told["stages"])
            told["rounds"] = tuple(Round(*numbers) for numbers in told["rounds"])
            for name in ("reached_per_slot", "accepted_per_slot"):
                told[name] = tuple(told[name])
            fields["speculation"] = Speculation(**told)
        fields["differences"] = tuple(Difference(**one) for one in fields["differences"])
        return cls(**fields)
