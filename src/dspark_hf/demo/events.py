"""What happens in a race, as plain data that can cross threads and processes."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

# accepted: a draft that the target would have said; rejected: one it would not; own: what the target said itself.
PieceKind = Literal["accepted", "rejected", "own"]


@dataclass(frozen=True)
class Piece:
    """The text of one token, and where it comes from.

    Attributes:
        text: As the token adds to the text before it; may be empty.
        slot: Of a draft, from 1.
        confidence: Of a draft: the drafter's estimate that it is accepted, given that those before it were.
        num_fallen: Of a rejected draft: verified drafts behind it, which fall with it.
    """

    text: str
    kind: PieceKind
    slot: int | None = None
    confidence: float | None = None
    num_fallen: int = 0


@dataclass(frozen=True)
class RowRound:
    """One row's part of a target forward.

    Attributes:
        row: Place in the batch.
        num_new_tokens: Committed.
        num_verified, num_accepted: Drafts.
    """

    row: int
    num_new_tokens: int
    num_verified: int = 0
    num_accepted: int = 0


@dataclass(frozen=True)
class StepDone:
    """A target forward of a lane is over.

    Attributes:
        lane: Its number, from 0.
        rows: Those that took part.
        pieces: Text of a race on one prompt; empty for batches.
        device_s: Seconds that the lane has had the device so far.
        is_prompt: Whether it was the prompt's forward, which is no round.
    """

    lane: int
    rows: tuple[RowRound, ...]
    pieces: tuple[Piece, ...]
    device_s: float
    is_prompt: bool


@dataclass(frozen=True)
class LaneDone:
    """A lane has generated all its text.

    Attributes:
        new_ids: New tokens of each row, an end token included.
        device_s: Seconds that it had the device.
        num_target_forwards: Those of all rows together.
        stage_s: Seconds by stage; None for plain generation.
        reached_per_slot, accepted_per_slot: Drafts by slot, slot 1 first.
    """

    lane: int
    new_ids: tuple[tuple[int, ...], ...]
    device_s: float
    num_target_forwards: int
    stage_s: dict[str, float] | None = None
    reached_per_slot: tuple[int, ...] = ()
    accepted_per_slot: tuple[int, ...] = ()


@dataclass(frozen=True)
class LaneStopped:
    """A lane ended early, since the race was cancelled."""

    lane: int


@dataclass(frozen=True)
class RaceFailed:
    """Nothing more will come; `message` is for the reader."""

    message: str


@dataclass(frozen=True)
class LaneReady:
    """What a lane runs with; `policy` is None for plain generation."""

    lane: int
    policy: str | None
    num_draft_tokens: int


@dataclass(frozen=True)
class TextsCompared:
    """Whether the lanes' texts agree.

    Attributes:
        num_rows, num_same: Rows, and those whose texts are the same token for token.
        is_greedy: When sampling, texts are different draws of one law and are not compared.
        dtype: The target's.
        first_row, position, token_gap: The first row that differs, the number of tokens that both share there, and the
            logits between the two tokens (None where one text ends and the other goes on).
        is_error: Whether a difference cannot be rounding.
    """

    num_rows: int
    num_same: int
    is_greedy: bool
    dtype: str
    first_row: int | None = None
    position: int | None = None
    token_gap: float | None = None
    is_error: bool = False


Event: TypeAlias = LaneReady | StepDone | LaneDone | LaneStopped | RaceFailed | TextsCompared
