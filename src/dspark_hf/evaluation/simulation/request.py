"""What a simulation is asked for."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from ..settings import ComparisonError
from .machine import FORMULA_MACHINES
from .systems import MTP, PLAIN, System
from .workload import LengthLaw

DEFAULT_SYSTEMS = (PLAIN, MTP, "fixed-2", "fixed-3", "full", "prefix", "smoothed", "block", "lagged")
# Shares of the throughput of plain steps at full batch, at which requests arrive.
DEFAULT_LOADS = (0.6, 1.0, 1.4)


@dataclass(frozen=True)
class SimulationRequest:
    """Machines, traffic and systems.

    Attributes:
        output: Folder of the report and its figures; it is made.
        machines: `accelerator`, `staircase`, or files that `dspark profile` wrote.
        traces: What `dspark traces` wrote; None: a drafter with the acceptance that the paper shows (Figure 2).
        mtp_traces: Of an MTP-1 drafter on the same prompts; None: `mtp-1` is the first slot of the drafter.
        systems: See `System.named`.
        concurrency: Users of closed loops; None: from 1 up to what the machine can take, 256 at most.
        loads: Poisson arrivals, as shares of the throughput of plain steps at full batch.
        lengths: Of prompts and answers.
        max_rows: Most rows of the server; None: as many as the machine, or the largest closed loop.
        prefill_token_ms: Milliseconds that a token of a prompt holds up all rows; None: the machine's own.
        min_drafts_every: The floor whose effect on fairness is shown.
        odds_factor: Drift: what all odds of acceptance estimates are multiplied by.
        num_requests: Least requests that a run measures.
        study_rounds: Length of the studies over time, in rounds that verify no draft.
        num_seeds: Runs of each point.
        seed: The first of them.

    Raises:
        ComparisonError: a value breaks its rule.
    """

    output: Path
    machines: tuple[str, ...] = FORMULA_MACHINES
    traces: Path | None = None
    mtp_traces: Path | None = None
    systems: tuple[str, ...] = DEFAULT_SYSTEMS
    concurrency: tuple[int, ...] | None = None
    loads: tuple[float, ...] = DEFAULT_LOADS
    lengths: LengthLaw = field(default_factory=LengthLaw)
    max_rows: int | None = None
    prefill_token_ms: float | None = None
    min_drafts_every: int = 4
    odds_factor: float = 4.0
    num_requests: int = 24
    study_rounds: int = 500
    num_seeds: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.systems:
            System.named(name)
        for name, holds, rule in (
            ("machines", bool(self.machines), "one or more"),
            ("systems", bool(self.systems) and len(set(self.systems)) == len(self.systems), "one or more, each once"),
            ("concurrency", self.concurrency is None or min(self.concurrency, default=0) >= 1, "whole numbers >= 1"),
            (
                "loads",
                all(0 < load < 100 for load in self.loads),
                "inside 0 to 100; 1 is all that plain can do",
            ),
            ("max_rows", self.max_rows is None or self.max_rows >= 1, ">= 1"),
            ("prefill_token_ms", self.prefill_token_ms is None or 0 <= self.prefill_token_ms < 1e6, ">= 0"),
            ("min_drafts_every", self.min_drafts_every >= 1, ">= 1"),
            ("odds_factor", 0 < self.odds_factor < 1e6, "above 0"),
            ("num_requests", self.num_requests >= 2, ">= 2"),
            ("study_rounds", self.study_rounds >= 40, ">= 40"),
            ("num_seeds", self.num_seeds >= 1, ">= 1; intervals need 2"),
            ("seed", 0 <= self.seed < 2**31, "0 to 2**31 - 1"),
        ):
            if not holds:
                raise ComparisonError(f"{name} must be {rule}, got {getattr(self, name)!r}")

    def smoke(self) -> "SimulationRequest":
        """The same, small: a few seconds, and numbers that mean little."""
        return replace(
            self,
            machines=self.machines[:1],
            systems=tuple(name for name in self.systems if name in (PLAIN, MTP, "full", "prefix")) or self.systems[:2],
            concurrency=self.concurrency or (1, 8, 32),
            loads=self.loads[:1],
            num_requests=8,
            study_rounds=120,
            num_seeds=2,
        )
