"""What a comparison gives: frozen dataclasses, units in the names, and how prompts are pooled."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..decoding.report import SpeculationReport
from .agreement import FirstDifference
from .identity import PairFacts
from .intervals import Estimate, Floats, Sums, bootstrap
from .provenance import Provenance
from .settings import ComparisonSettings

DrafterKind = Literal["given", "bundled", "untrained"]


class ComparisonInterrupted(KeyboardInterrupt):
    """Ctrl-C during a comparison; `report` has the prompts measured before, None if none was."""

    def __init__(self, report: "ComparisonReport | None") -> None:
        super().__init__()
        self.report = report


@dataclass(frozen=True)
class GenerationTiming:
    """One generate() call: new tokens, an end-of-text token included, and its wall seconds."""

    num_new_tokens: int
    latency_s: float


@dataclass(frozen=True)
class RunPair:
    """One prompt through both paths once.

    Attributes:
        ran_first: It alternates, so that neither path always finds warmer caches.
        speculation: The DSpark call's own counts and seconds.
    """

    ran_first: Literal["plain", "dspark"]
    plain: GenerationTiming
    dspark: GenerationTiming
    speculation: SpeculationReport


@dataclass(frozen=True)
class PromptResult:
    """All repeats of one prompt.

    Attributes:
        is_identical: Whether both texts agree in every repeat; None when sampling.
        difference: Where they part, in the first repeat in which they do.
    """

    prompt_id: str
    num_prompt_tokens: int
    runs: tuple[RunPair, ...]
    is_identical: bool | None
    difference: FirstDifference | None


@dataclass(frozen=True)
class SlotAcceptance:
    """What became of the drafts in one slot.

    Attributes:
        slot: From 1.
        num_reached: Verified drafts whose predecessors were all accepted.
        num_accepted: Of those, accepted ones.
        conditional_acceptance: Their ratio; None where no draft got that far.
    """

    slot: int
    num_reached: int
    num_accepted: int
    conditional_acceptance: float | None


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of all DSpark calls in one stage, and their share of the calls' wall time."""

    stage: str
    seconds: float
    share: float


@dataclass(frozen=True)
class DomainNumbers:
    """Pooled numbers of the prompts of one domain, the part of a prompt's id before the slash."""

    speed_ratio: Estimate
    tau: Estimate


@dataclass(frozen=True)
class ComparisonReport:
    """A comparison: pooled numbers, every prompt's own, and where they come from.

    Tokens per second is new tokens divided by wall seconds of the whole generate() call, prompt
    included; pooled over calls, it is the sum of the one divided by the sum of the other.

    Attributes:
        target, drafter: Names.
        drafter_kind: `untrained` ones draft noise, so that no speed-up can be expected.
        policy, num_draft_tokens: In force, whether set by the settings or by the drafter.
        num_planned: Prompts asked for; more than `prompts` holds after an interrupt.
        plain_tokens_per_s, dspark_tokens_per_s: Pooled over prompts and repeats.
        speed_ratio: `dspark_tokens_per_s / plain_tokens_per_s`.
        tau: Tokens per round: accepted drafts plus the target's own token.
        target_forwards_saved_percent: Against one per token, which plain generation needs.
        slots: Acceptance by draft slot, slot 1 first.
        stages: Where the DSpark calls spent their time; `other` is the rest of their wall time.
        num_identical: Prompts with the same text on both paths; None when sampling.
        domains: Speed and tau of each, if there are several and they have several prompts.
        pair: What identifies drafter and target; None where the caller did not say.
    """

    target: str
    drafter: str
    drafter_kind: DrafterKind
    settings: ComparisonSettings
    policy: str
    num_draft_tokens: int
    num_planned: int
    plain_num_new_tokens: int
    plain_latency_s: float
    plain_tokens_per_s: float
    dspark_num_new_tokens: int
    dspark_latency_s: float
    dspark_tokens_per_s: float
    dspark_num_target_forwards: int
    speed_ratio: Estimate
    tau: Estimate
    target_forwards_saved_percent: Estimate
    slots: tuple[SlotAcceptance, ...]
    stages: tuple[StageSeconds, ...]
    num_identical: int | None
    domains: dict[str, DomainNumbers]
    prompts: tuple[PromptResult, ...]
    provenance: Provenance
    pair: PairFacts | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every planned prompt was measured."""
        return len(self.prompts) == self.num_planned

    @property
    def losslessness_errors(self) -> tuple[PromptResult, ...]:
        """Prompts whose texts part where they must not: a bug."""
        return tuple(p for p in self.prompts if p.difference is not None and p.difference.is_error)

    def to_dict(self) -> dict[str, Any]:
        """Everything as dicts and lists, for JSON."""
        return {"kind": "speed", "is_complete": self.is_complete, **asdict(self)}


def pooled_numbers(prompts: tuple[PromptResult, ...], *, is_greedy: bool, seed: int) -> dict[str, Any]:
    """The fields of `ComparisonReport` that follow from the prompts' results (at least one)."""
    rows = [_summands(prompt) for prompt in prompts]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    sums = {name: sum(column) for name, column in columns.items()}
    merged = SpeculationReport()
    for prompt in prompts:
        for run in prompt.runs:
            merged.merge(run.speculation)
    return {
        "plain_num_new_tokens": int(sums["plain_tokens"]),
        "plain_latency_s": sums["plain_s"],
        "plain_tokens_per_s": sums["plain_tokens"] / sums["plain_s"],
        "dspark_num_new_tokens": int(sums["dspark_tokens"]),
        "dspark_latency_s": sums["dspark_s"],
        "dspark_tokens_per_s": sums["dspark_tokens"] / sums["dspark_s"],
        "dspark_num_target_forwards": merged.num_target_forwards,
        "speed_ratio": bootstrap(columns, _speed_ratio, seed=seed),
        "tau": bootstrap(columns, _tau, seed=seed),
        "target_forwards_saved_percent": bootstrap(columns, _forwards_saved_percent, seed=seed),
        "slots": _slots(merged),
        "stages": _stages(merged, sums["dspark_s"]),
        "num_identical": sum(bool(p.is_identical) for p in prompts) if is_greedy else None,
        "domains": _domains(prompts, seed),
    }


def domain_of(prompt_id: str) -> str:
    """The part of a prompt's id before the slash: the data set that it comes from."""
    return prompt_id.split("/")[0]


def _domains(prompts: tuple[PromptResult, ...], seed: int) -> dict[str, DomainNumbers]:
    parts: dict[str, list[dict[str, float]]] = {}
    for prompt in prompts:
        parts.setdefault(domain_of(prompt.prompt_id), []).append(_summands(prompt))
    if len(parts) < 2 or len(parts) == len(prompts):  # ids that name no data set are each their own
        return {}
    columns = {domain: {name: [row[name] for row in rows] for name in rows[0]} for domain, rows in parts.items()}
    return {
        domain: DomainNumbers(bootstrap(each, _speed_ratio, seed=seed), bootstrap(each, _tau, seed=seed))
        for domain, each in sorted(columns.items())
    }


def _summands(prompt: PromptResult) -> dict[str, float]:
    """What a prompt adds to each sum over prompts."""
    runs = prompt.runs
    return {
        "plain_tokens": sum(run.plain.num_new_tokens for run in runs),
        "plain_s": sum(run.plain.latency_s for run in runs),
        "dspark_tokens": sum(run.dspark.num_new_tokens for run in runs),
        "dspark_s": sum(run.dspark.latency_s for run in runs),
        "rounds": sum(run.speculation.num_rounds for run in runs),
        "committed": sum(run.speculation.num_new_tokens - run.speculation.num_calls for run in runs),
        "forwards": sum(run.speculation.num_target_forwards for run in runs),
    }


def _speed_ratio(sums: Sums) -> Floats:
    plain = sums["plain_tokens"] / sums["plain_s"]
    return (sums["dspark_tokens"] / sums["dspark_s"]) / plain


def _tau(sums: Sums) -> Floats:
    return sums["committed"] / sums["rounds"]


def _forwards_saved_percent(sums: Sums) -> Floats:
    return 100 * (1 - sums["forwards"] / sums["dspark_tokens"])


def _slots(merged: SpeculationReport) -> tuple[SlotAcceptance, ...]:
    counts = zip(merged.reached_per_slot, merged.accepted_per_slot, strict=True)
    return tuple(
        SlotAcceptance(slot, reached, accepted, accepted / reached if reached else None)
        for slot, (reached, accepted) in enumerate(counts, start=1)
    )


def _stages(merged: SpeculationReport, wall_s: float) -> tuple[StageSeconds, ...]:
    seconds = {
        "prefill": merged.prefill_s,
        "draft": merged.draft_s,
        "verify": merged.verify_s,
        "accept": merged.accept_s,
    }
    # Not merged.other_s alone: generate() also works before and after the loop.
    seconds["other"] = wall_s - sum(seconds.values())
    return tuple(StageSeconds(stage, value, value / wall_s) for stage, value in seconds.items())
