"""A server with continuous batching, event by event: requests arrive, are admitted, share rounds, and leave."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...decoding.types import Confidence
from .bank import Floats32, Ints, RoundBank
from .estimates import Estimates
from .machine import Machine
from .systems import Planner
from .workload import Arrivals, Request, RequestStream

# Columns of the rows that are served.
_ID, _TEXT, _PROMPT, _ANSWER, _TOKENS, _ROUNDS, _DRAFTED, _VERIFIED, _WAITED, _LONGEST_WAIT = range(10)


class Event(NamedTuple):
    """Something that happened.

    Attributes:
        time_s: When.
        kind: `issued`, `admitted`, `started`, `tokens` or `finished`.
        request: Its id.
        first, num_tokens: Of `tokens`: index of the first token delivered, and how many.
    """

    time_s: float
    kind: str
    request: int
    first: int = 0
    num_tokens: int = 0


@dataclass(frozen=True)
class Served:
    """A request that has been answered.

    Attributes:
        request: What was asked for.
        admitted_s, started_s, finished_s: When it got a row, when its prompt was read, when its last token came.
        num_rounds, num_drafted_rounds: It took part in.
        num_verified: Drafts of it that were verified.
        longest_wait: Most drafted rounds in a row without a verified draft of it.
    """

    request: Request
    admitted_s: float
    started_s: float
    finished_s: float
    num_rounds: int
    num_drafted_rounds: int
    num_verified: int
    longest_wait: int

    @property
    def tokens_per_s(self) -> float:
        """Speed that its user sees once it began."""
        return self.request.answer_tokens / (self.finished_s - self.started_s)


class Round(NamedTuple):
    """A round that has ended.

    Attributes:
        ended_s, seconds: When, and how long it took.
        num_rows: That shared it.
        num_slots: Drafted for each; 0: a plain step.
        num_verified, num_accepted, num_tokens: Drafts verified and accepted, and tokens delivered, of all rows.
    """

    ended_s: float
    seconds: float
    num_rows: int
    num_slots: int
    num_verified: int
    num_accepted: int
    num_tokens: int


class RoundView(NamedTuple):
    """A drafted round as a watch of it may see it; first axis: rows."""

    ended_s: float
    ids: Ints
    logits: Floats32
    confidence: Confidence
    lengths: Ints
    num_accepted: Ints


@dataclass(frozen=True, eq=False)
class Run:
    """What a simulation gave.

    Attributes:
        served: Requests in the order in which they ended.
        rounds: All of them.
        issued_s: When each request was issued, by id.
    """

    served: tuple[Served, ...]
    rounds: tuple[Round, ...]
    issued_s: tuple[float, ...]


class Server:
    """One machine, one round at a time.

    Between rounds waiting requests are admitted, first come, first served, while there are rows; their prompts are read
    at once, which holds up the others. A round ends for all rows together. A request ends with its last token; drafts
    behind it are thrown away, as a server learns of an end only when it is there.

    Args:
        machine: What rounds take.
        planner: What they do.
        bank: What they accept.
        estimates: What the confidence head says.
        stream, arrivals: What is asked for, and when.
        max_rows: Most rows at a time.
        on_event, on_round: Called as things happen.
    """

    def __init__(
        self,
        machine: Machine,
        planner: Planner,
        bank: RoundBank,
        estimates: Estimates,
        stream: RequestStream,
        arrivals: Arrivals,
        *,
        max_rows: int,
        on_event: Callable[[Event], None] | None = None,
        on_round: Callable[[RoundView], None] | None = None,
    ) -> None:
        self._machine = machine
        self._planner = planner
        self._bank = bank
        self._estimates = estimates
        self._stream = stream
        self._arrivals = arrivals
        self._max_rows = max_rows
        self._on_event = on_event
        self._on_round = on_round
        self._now_s = 0.0
        self._waiting: deque[Request] = deque()
        self._rows = np.zeros((10, 0), dtype=np.int64)
        self._admitted: dict[int, tuple[Request, float, float]] = {}
        self._served: list[Served] = []
        self._rounds: list[Round] = []
        self._issued_s: list[float] = []

    def run(self, is_over: Callable[["Server"], bool]) -> Run:
        """Serve until `is_over`, which is asked between rounds, or until nothing more can happen."""
        while not is_over(self):
            self._issue()
            self._admit()
            if self._rows.shape[1]:
                self._round()
                continue
            due_s = self._arrivals.due_s()
            if due_s is None:
                break
            self._now_s = max(self._now_s, due_s)
        return Run(tuple(self._served), tuple(self._rounds), tuple(self._issued_s))

    @property
    def now_s(self) -> float:
        """Simulated seconds so far."""
        return self._now_s

    @property
    def num_issued(self) -> int:
        """Requests issued so far."""
        return len(self._issued_s)

    @property
    def served(self) -> list[Served]:
        """Requests answered so far."""
        return self._served

    def _tell(
        self, kind: str, request: int, first: int = 0, num_tokens: int = 0, *, time_s: float | None = None
    ) -> None:
        if self._on_event is not None:
            self._on_event(Event(self._now_s if time_s is None else time_s, kind, request, first, num_tokens))

    def _issue(self) -> None:
        """Take what has arrived by now."""
        while (due_s := self._arrivals.due_s()) is not None and due_s <= self._now_s:
            self._arrivals.take()
            request = self._stream.next(due_s)
            self._issued_s.append(due_s)
            self._waiting.append(request)
            self._tell("issued", request.id, time_s=due_s)

    def _admit(self) -> None:
        """Give rows to those who wait, and read their prompts."""
        free = self._max_rows - self._rows.shape[1]
        admitted = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        if not admitted:
            return
        admitted_s = self._now_s
        for request in admitted:
            self._tell("admitted", request.id)
        self._now_s += self._machine.prefill_token_s * sum(request.prompt_tokens for request in admitted)
        added = np.zeros((10, len(admitted)), dtype=np.int64)
        for place, request in enumerate(admitted):
            added[: _ANSWER + 1, place] = request.id, request.text, request.prompt_tokens, request.answer_tokens
            self._admitted[request.id] = request, admitted_s, self._now_s
            self._tell("started", request.id)
        self._rows = np.concatenate([self._rows, added], axis=1)

    def _round(self) -> None:
        rows, num_rows = self._rows, self._rows.shape[1]
        context = int((rows[_PROMPT] + rows[_TOKENS]).max())
        index = self._bank.index(rows[_TEXT], rows[_ROUNDS], rows[_TOKENS])
        logits, confidence = self._estimates.of(self._bank, index, self._now_s)
        plan = self._planner.plan(rows[_ID], confidence, context)
        num_verified = int(plan.lengths.sum())
        seconds = self._seconds(plan.num_slots, num_rows, num_verified, context)
        num_accepted = np.minimum(self._bank.num_accepted[index], plan.lengths)
        self._planner.observe(plan, num_accepted)
        self._now_s += seconds
        if self._on_round is not None and plan.num_slots:
            self._on_round(RoundView(self._now_s, rows[_ID], logits, confidence, plan.lengths, num_accepted))
        num_tokens = np.minimum(1 + num_accepted, rows[_ANSWER] - rows[_TOKENS])
        total = int(num_tokens.sum())
        self._rounds.append(
            Round(self._now_s, seconds, num_rows, plan.num_slots, num_verified, int(num_accepted.sum()), total)
        )
        self._count(num_tokens, plan.lengths, plan.num_slots > 0)

    def _seconds(self, num_slots: int, num_rows: int, num_verified: int, context: int) -> float:
        """Of a round."""
        if not self._planner.has_drafter:
            return self._machine.plain_s(num_rows, context)
        costs = self._machine.costs(num_rows, context)
        if not num_slots:
            return costs.seconds[num_rows] + costs.overhead_s
        return costs.without_slots(self._machine.block_size - num_slots).round_seconds(num_rows + num_verified)

    def _count(self, num_tokens: Ints, lengths: Ints, is_drafted: bool) -> None:
        """Hand out tokens, and let those who have all of theirs go."""
        rows = self._rows
        if self._on_event is not None:
            for place, request in enumerate(rows[_ID].tolist()):
                self._tell("tokens", request, int(rows[_TOKENS, place]), int(num_tokens[place]))
        rows[_TOKENS] += num_tokens
        rows[_ROUNDS] += 1
        if is_drafted:
            rows[_DRAFTED] += 1
            rows[_VERIFIED] += lengths
            rows[_WAITED] = np.where(lengths > 0, 0, rows[_WAITED] + 1)
            np.maximum(rows[_LONGEST_WAIT], rows[_WAITED], out=rows[_LONGEST_WAIT])
        is_done = rows[_TOKENS] >= rows[_ANSWER]
        if is_done.any():
            for own in rows[:, is_done].T.tolist():
                self._finish(own)
            self._rows = rows[:, ~is_done]

    def _finish(self, own: list[int]) -> None:
        request, admitted_s, started_s = self._admitted.pop(own[_ID])
        counts = own[_ROUNDS], own[_DRAFTED], own[_VERIFIED], own[_LONGEST_WAIT]
        self._served.append(Served(request, admitted_s, started_s, self._now_s, *counts))
        self._tell("finished", request.id)
        self._arrivals.finished(self._now_s)
