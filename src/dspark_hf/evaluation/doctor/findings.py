"""What the checks say: frozen dataclasses, and the report they make up."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..provenance import Provenance
from .evidence import Evidence

Status = Literal["fault", "note", "passed", "not examined"]


class NotExamined(Exception):
    """A check cannot be made; the message says why."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing.

    Attributes:
        what: What was found.
        certainty: How sure that is: `certain` where files or numbers say so, else an interval and the drafts behind it.
        mend: The command or setting that mends it.
        is_fault: Whether the pair is not as it should be; else a note about machine or settings.
        evidence: The interval that decided, if one did.
    """

    what: str
    certainty: str
    mend: str
    is_fault: bool = True
    evidence: Evidence | None = None


@dataclass(frozen=True)
class Outcome:
    """One check.

    Attributes:
        check: Its name.
        status: The worst of its findings; `passed` without one.
        detail: What was looked at, or why it was not.
        findings: Faults and notes.
    """

    check: str
    status: Status
    detail: str
    findings: tuple[Finding, ...] = ()

    @classmethod
    def of(cls, check: str, detail: str, findings: list[Finding]) -> "Outcome":
        """Of a check that was made."""
        status: Status = "passed"
        if findings:
            status = "fault" if any(finding.is_fault for finding in findings) else "note"
        return cls(check, status, detail, tuple(findings))


@dataclass(frozen=True)
class Examination:
    """All checks of a pair.

    Attributes:
        target, drafter: Names.
        outcomes: In the order of the checks.
        measured: What was measured on the way, by subject: acceptance, calibration, speed, memory and so on.
        provenance: Command, versions, device, seed, prompts.
    """

    target: str
    drafter: str
    outcomes: tuple[Outcome, ...]
    measured: dict[str, Any]
    provenance: Provenance

    @property
    def faults(self) -> list[tuple[str, Finding]]:
        """Every fault with the name of its check."""
        return [(one.check, finding) for one in self.outcomes for finding in one.findings if finding.is_fault]

    @property
    def notes(self) -> list[tuple[str, Finding]]:
        """Everything else that was found."""
        return [(one.check, finding) for one in self.outcomes for finding in one.findings if not finding.is_fault]

    @property
    def is_healthy(self) -> bool:
        """Whether no fault was found."""
        return not self.faults

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"is_healthy": self.is_healthy, **asdict(self)}
