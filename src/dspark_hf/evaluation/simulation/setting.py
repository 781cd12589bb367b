"""A machine, recorded rounds and traffic, ready to run any system on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..settings import ComparisonError
from ..synthetic_traces import synthetic_traces
from ..traces import load_traces
from .bank import RoundBank, same_texts
from .estimates import Estimates, RecordedEstimates
from .machine import Machine, machine_of
from .paper import conditional_acceptance
from .request import SimulationRequest
from .server import Event, RoundView, Run, Server
from .systems import System, bank_for
from .workload import Arrivals, ClosedLoop, LengthLaw, PoissonArrivals, RequestStream, TrafficMix

# Synthetic texts: blocks of the paper's production drafter (DSpark-5), and how alike rounds that follow each other are.
SYNTHETIC_SLOTS = 5
SYNTHETIC_PERSISTENCE = 0.5
SYNTHETIC_TEXTS, SYNTHETIC_ROUNDS, SYNTHETIC_PROMPT_TOKENS = 64, 40, 256
SYNTHETIC_ANSWER_TOKENS = 64, 257  # evenly from the first to the last but one

MANY_USERS = (1, 8, 25, 50, 100, 200)
MAX_POISSON_ROWS = 64


@dataclass(frozen=True, eq=False)
class Setting:
    """What all systems have in common.

    Attributes:
        machine: What rounds take.
        drafts: Rounds of the drafter.
        mtp: Of an MTP-1 drafter, on the same texts; None: the drafter's first slot.
        lengths: Of prompts and answers.
        max_rows: Most rows of the server.
    """

    machine: Machine
    drafts: RoundBank
    max_rows: int
    mtp: RoundBank | None = None
    lengths: LengthLaw = field(default_factory=LengthLaw)

    def server(
        self,
        system: System,
        arrivals: Arrivals,
        *,
        seed: int,
        mix: TrafficMix | None = None,
        estimates: Estimates | None = None,
        on_event: Callable[[Event], None] | None = None,
        on_round: Callable[[RoundView], None] | None = None,
    ) -> Server:
        """A server of one system; requests of a seed are the same for all."""
        bank = bank_for(system, self.drafts, self.mtp)
        return Server(
            self.machine,
            system.planner(self.machine, bank.num_slots),
            bank,
            estimates or RecordedEstimates(),
            RequestStream(self.drafts, mix or TrafficMix.even(self.drafts), self.lengths, seed),
            arrivals,
            max_rows=self.max_rows,
            on_event=on_event,
            on_round=on_round,
        )

    def closed(self, system: System, concurrency: int, *, seed: int, first: int, count: int) -> Run:
        """Users who ask again at once, until `count` requests behind the `first` have ended; see `measure`."""
        return self.server(system, ClosedLoop(concurrency), seed=seed).run(_until(first, count))

    def open(self, system: System, rate_per_s: float, *, seed: int, first: int, count: int) -> Run:
        """The same with Poisson arrivals."""
        return self.server(system, PoissonArrivals(rate_per_s, seed), seed=seed).run(_until(first, count))

    def plain_capacity(self) -> float:
        """Tokens a second of plain steps with all rows busy, by formula: prompts, then steps at the mean context."""
        prompt, answer = self.mean_tokens()
        step_s = self.machine.plain_s(self.max_rows, round(prompt + answer / 2))
        return 1 / (step_s / self.max_rows + self.machine.prefill_token_s * prompt / answer)

    def mean_tokens(self) -> tuple[float, float]:
        """Of prompts and answers."""
        if self.lengths.kind != "traces":
            return self.lengths.prompt_tokens, self.lengths.answer_tokens
        return float(self.drafts.prompt_tokens.mean()), float(self.drafts.answer_tokens.mean())


def _until(first: int, count: int) -> Callable[[Server], bool]:
    """Whether requests `first` to `first + count - 1` have ended, and another has been issued."""
    num_seen, num_ended = 0, 0

    def is_over(server: Server) -> bool:
        nonlocal num_seen, num_ended
        for one in server.served[num_seen:]:
            num_ended += first <= one.request.id < first + count
        num_seen = len(server.served)
        return num_ended == count and server.num_issued > first + count

    return is_over


def banks_of(request: SimulationRequest) -> tuple[RoundBank, RoundBank | None, dict[str, object]]:
    """Rounds of the drafter and of MTP-1, and where they come from.

    Raises:
        ComparisonError: a file holds no traces, or the two are of different prompts.
    """
    if request.traces is None:
        if request.mtp_traces is not None:
            raise ComparisonError(
                f"mtp_traces {str(request.mtp_traces)!r} need traces of the drafter on the same prompts; give both"
            )
        traces = synthetic_traces(
            conditional_acceptance(SYNTHETIC_SLOTS),
            num_prompts=SYNTHETIC_TEXTS,
            num_rounds=SYNTHETIC_ROUNDS,
            persistence=SYNTHETIC_PERSISTENCE,
            prompt_length=SYNTHETIC_PROMPT_TOKENS,
            seed=request.seed,
        )
        drafts = RoundBank.of(traces)
        # Texts of equal rounds would keep users of a closed loop in step.
        tokens = np.random.default_rng(request.seed).integers(*SYNTHETIC_ANSWER_TOKENS, len(drafts.domains))
        drafts = replace(drafts, answer_tokens=tokens)
        origin = {"persistence": SYNTHETIC_PERSISTENCE, "answer_tokens_from_to": list(SYNTHETIC_ANSWER_TOKENS)}
        return drafts, None, {**traces.source, **origin}
    traces = load_traces(request.traces)
    drafts = RoundBank.of(traces)
    mtp = None if request.mtp_traces is None else same_texts(drafts, RoundBank.of(load_traces(request.mtp_traces)))
    return drafts, mtp, {"file": request.traces.name, "mode": traces.mode, **traces.source}


def setting_of(
    name: str, drafts: RoundBank, mtp: RoundBank | None, request: SimulationRequest
) -> tuple[Setting, tuple[int, ...]]:
    """The setting of a machine's name, and the closed loops to run on it.

    Raises:
        ComparisonError: the machine has too few rows or slots for what is asked.
    """
    machine = machine_of(name, drafts.num_slots)
    if request.prefill_token_ms is not None:
        machine = replace(machine, prefill_token_s=request.prefill_token_ms / 1000)
    if drafts.num_slots > machine.block_size:
        raise ComparisonError(
            f"{machine.name} knows rounds of up to {machine.block_size} drafts, and traces have {drafts.num_slots}; "
            "profile the drafter that the traces are of"
        )
    loops = tuple(sorted(set(request.concurrency or _usual_loops(machine.max_rows))))
    if request.concurrency is None and request.max_rows is not None:
        loops = tuple(users for users in loops if users <= request.max_rows) or (request.max_rows,)
    max_rows = request.max_rows or min(loops[-1], machine.max_rows)
    if max_rows > machine.max_rows:
        raise ComparisonError(f"{machine.name} knows up to {machine.max_rows} rows, and max_rows is {max_rows}")
    return Setting(machine, drafts, max_rows, mtp, request.lengths), loops


def _usual_loops(max_rows: int) -> Sequence[int]:
    if max_rows >= MANY_USERS[-1]:
        return MANY_USERS
    return [2**n for n in range(max_rows.bit_length()) if 2**n <= max_rows]
