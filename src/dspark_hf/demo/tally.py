"""Events added up: what the page shows at any moment of a race."""

from dataclasses import dataclass, field

from .events import Event, LaneDone, LaneReady, LaneStopped, Piece, RaceFailed, StepDone, TextsCompared


@dataclass
class LaneTally:
    """One lane so far.

    Attributes:
        name: For the reader.
        policy, num_draft_tokens: As in [`LaneReady`].
        num_row_rounds: Rounds of rows; a batch's round counts once for each row.
        num_round_tokens: New tokens that came from rounds, not from the prompt's forward.
        budgets: Drafts verified, by row and round.
        text_after_s: Device seconds until the first text; None before.
    """

    name: str
    is_speculative: bool
    policy: str | None = None
    num_draft_tokens: int = 0
    pieces: list[Piece] = field(default_factory=list)
    num_new_tokens: int = 0
    num_target_forwards: int = 0
    num_row_rounds: int = 0
    num_round_tokens: int = 0
    budgets: dict[int, list[int]] = field(default_factory=dict)
    device_s: float = 0.0
    text_after_s: float | None = None
    is_done: bool = False
    stage_s: dict[str, float] | None = None
    reached_per_slot: tuple[int, ...] = ()
    accepted_per_slot: tuple[int, ...] = ()

    @property
    def tokens_per_s(self) -> float | None:
        """New tokens of all rows divided by device seconds, prompt included; None before the first."""
        return self.num_new_tokens / self.device_s if self.num_new_tokens and self.device_s else None

    @property
    def tau(self) -> float | None:
        """Tokens that a row's round commits, the target's own counted; None before the first, and of plain lanes."""
        return self.num_round_tokens / self.num_row_rounds if self.is_speculative and self.num_row_rounds else None

    @property
    def conditional_acceptance(self) -> list[float | None]:
        """Share accepted of the drafts that reached each slot."""
        counts = zip(self.accepted_per_slot, self.reached_per_slot, strict=True)
        return [accepted / reached if reached else None for accepted, reached in counts]

    def add_step(self, step: StepDone) -> None:
        """Add a target forward."""
        self.num_target_forwards += 1
        self.device_s = step.device_s
        self.pieces.extend(step.pieces)
        if self.text_after_s is None:
            self.text_after_s = step.device_s
        for part in step.rows:
            self.num_new_tokens += part.num_new_tokens
            if not step.is_prompt:
                self.num_row_rounds += 1
                self.num_round_tokens += part.num_new_tokens
                self.budgets.setdefault(part.row, []).append(part.num_verified)

    def end(self, done: LaneDone) -> None:
        """Add what is known at the end; a batch's rows may have committed less than their rounds said."""
        num_new_tokens = sum(map(len, done.new_ids))
        self.num_round_tokens += num_new_tokens - self.num_new_tokens
        self.num_new_tokens = num_new_tokens
        self.num_target_forwards = done.num_target_forwards
        self.device_s = done.device_s
        self.stage_s = done.stage_s
        self.reached_per_slot, self.accepted_per_slot = done.reached_per_slot, done.accepted_per_slot
        self.is_done = True


@dataclass
class RaceTally:
    """A race so far.

    Attributes:
        notice: What is going on, for the reader.
        error: Why there will be nothing more.
    """

    lanes: list[LaneTally]
    num_rows: int = 1
    notice: str = ""
    error: str | None = None
    was_stopped: bool = False
    texts: TextsCompared | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every lane has come to its end."""
        return all(lane.is_done for lane in self.lanes)

    @property
    def speed_ratio(self) -> float | None:
        """Tokens per second of the second lane over the first's, once both are done."""
        first, second = (lane.tokens_per_s for lane in self.lanes)
        return second / first if self.is_complete and first and second else None

    def add(self, event: Event) -> None:
        """Take an event."""
        match event:
            case LaneReady(number, policy, num_draft_tokens):
                self.lanes[number].policy, self.lanes[number].num_draft_tokens = policy, num_draft_tokens
            case StepDone():
                self.lanes[event.lane].add_step(event)
            case LaneDone():
                self.lanes[event.lane].end(event)
            case LaneStopped():
                self.was_stopped = True
            case RaceFailed(message):
                self.error = message
            case TextsCompared():
                self.texts = event
