"""What a bench gives: numbers of every cell, Eq. 1 against them, advice, and where all of it comes from."""

from dataclasses import asdict, dataclass
from typing import Any

from ..identity import PairFacts
from ..provenance import Provenance
from .advice import DepthAdvice, GammaAdvice
from .latency import LatencySplit
from .memory import Memory
from .pooling import WayNumbers
from .settings import BenchSettings, Cell
from .ways import LeftOut, WayFacts


@dataclass(frozen=True)
class ProfileFacts:
    """The throughput profile behind predictions and advice.

    Attributes:
        num_rows, contexts: At which it was measured.
        date_utc: When.
        is_found: Whether it lay in the user's cache before; else this bench measured it.
    """

    num_rows: tuple[int, ...]
    contexts: tuple[int, ...]
    date_utc: str | None
    is_found: bool


@dataclass(frozen=True)
class CellReport:
    """One point.

    Attributes:
        prompt_ids: Of all batches, in order.
        num_planned, num_done: Runs of all ways on one batch; none are planned where plain generation fails.
        ways: Numbers of those that ran.
        memory: By way.
        latency: Eq. 1 against the measurement, where a profile is at hand; on the CPU only.
    """

    cell: Cell
    prompt_ids: tuple[str, ...]
    num_planned: int
    num_done: int
    ways: tuple[WayNumbers, ...]
    memory: dict[str, Memory]
    latency: tuple[LatencySplit, ...]


@dataclass(frozen=True)
class BenchReport:
    """A bench.

    Attributes:
        target: Its name.
        pairs: By drafter, what identifies it and the target.
        ways, left_out: That ran, and that did not.
        profiles: By drafter; one without is not among them.
        gamma: Advice by drafter and number of rows.
        depth: Advice by drafter.
        sessions: Provenance of each run that added measurements.
        notes: What a reader has to know besides.
    """

    target: str
    settings: BenchSettings
    pairs: dict[str, PairFacts]
    ways: tuple[WayFacts, ...]
    left_out: tuple[LeftOut, ...]
    cells: tuple[CellReport, ...]
    profiles: dict[str, ProfileFacts]
    gamma: tuple[GammaAdvice, ...]
    depth: tuple[DepthAdvice, ...]
    notes: tuple[str, ...]
    provenance: Provenance
    sessions: tuple[dict[str, Any], ...]

    @property
    def is_complete(self) -> bool:
        """Whether every planned run was done."""
        return all(cell.num_done == cell.num_planned for cell in self.cells)

    @property
    def num_errors(self) -> int:
        """Texts that differ from plain generation's where rounding cannot be the reason: a bug."""
        return sum(way.num_errors or 0 for cell in self.cells for way in cell.ways)

    def cell(self, name: str) -> CellReport | None:
        """A cell by its name."""
        return next((cell for cell in self.cells if cell.cell.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        """Everything as dicts and lists, for JSON."""
        content = asdict(self)
        for cell, report in zip(content["cells"], self.cells, strict=True):
            for way, numbers in zip(cell["ways"], report.ways, strict=True):
                way["conditional_acceptance"] = numbers.conditional_acceptance
            for split, told in zip(cell["latency"], report.latency, strict=True):
                split["residual_s"] = told.residual_s
        return {"kind": "bench", "is_complete": self.is_complete, **content}
