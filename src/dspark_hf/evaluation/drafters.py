"""Several drafters on the same texts of one target: tau with intervals, acceptance, confidence, paired differences."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..fitting.metrics import expected_calibration_error, roc_auc
from ..training.answer_facts import AnswerFacts, answer_facts
from ..training.records import data_files, parse_row, read_rows
from .identity import PairFacts, pair_facts
from .intervals import Estimate, Floats, Sums, bootstrap
from .loading import load_drafter, load_target
from .provenance import Provenance, collect_provenance
from .replay import Replay, ReplayedText, TargetText
from .settings import ComparisonError


@dataclass(frozen=True)
class DrafterScore:
    """One drafter on all texts of one temperature.

    Attributes:
        drafter: Its name.
        temperature: Of the texts.
        tau: By domain, the part of a prompt's id before the slash; and `all`, pooled.
        mean_tau: Mean of the domains' taus.
        conditional_acceptance: Per slot, among rounds whose earlier slots were all accepted.
        confidence_auc: Per slot; empty without a confidence head.
        confidence_ece: Per slot, against the probability of acceptance; likewise.
    """

    drafter: str
    temperature: float
    tau: dict[str, Estimate]
    mean_tau: Estimate
    conditional_acceptance: list[float]
    confidence_auc: list[float]
    confidence_ece: list[float]


@dataclass(frozen=True)
class PairedDifference:
    """tau of `drafter` minus tau of `baseline` on the same prompts, pooled over domains."""

    drafter: str
    baseline: str
    temperature: float
    tau: Estimate


@dataclass(frozen=True)
class TextResult:
    """One drafter on one text: tokens that rounds committed, and the expected number of rounds."""

    drafter: str
    temperature: float
    id: str
    num_tokens: int
    num_rounds: float


@dataclass(frozen=True)
class DraftersReport:
    """All drafters on all texts, each against the last one named, and what every text gave.

    Attributes:
        num_texts: By temperature.
        sources: Files of texts, and how they were made.
        pairs: By drafter, what identifies it and the target.
    """

    target: str
    provenance: Provenance
    num_texts: dict[str, int]
    sources: list[AnswerFacts]
    pairs: dict[str, PairFacts]
    scores: list[DrafterScore]
    differences: list[PairedDifference]
    texts: list[TextResult]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"kind": "evaluation", **asdict(self)}


def evaluate_drafters(
    target_name: str,
    drafters: Sequence[str | None],
    texts: Sequence[Path],
    *,
    dtype: str,
    device: str,
    seed: int,
) -> DraftersReport:
    """Replay drafters on the same texts; the last one is the baseline of the paired differences.

    Args:
        target_name: As for `load_target`.
        drafters: As for `load_drafter`.
        texts: Files or folders of the target's answers, with the columns that `dspark train data` writes.
        dtype, device: As for `load_target`.
        seed: Of resampling.

    Raises:
        ComparisonError: a model cannot be loaded, or there are no texts.
        TrainingDataError: a file cannot be read.
    """
    target, tokenizer = load_target(target_name, dtype, device)
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    by_temperature = load_texts(texts, vocab_size)
    loaded = [load_drafter(name, target, target_name, tokenizer, seed=seed) for name in drafters]
    if any(drafter.kind == "untrained" for drafter in loaded):
        raise ComparisonError(f"no drafter is shipped for target {target_name!r}; name one with --drafter")
    models = [drafter.model for drafter in loaded]
    replayed: dict[tuple[str, float], list[ReplayedText]] = {}
    for temperature, group in by_temperature.items():
        results = Replay(target, group).run_all(models, show_progress=True)
        replayed |= {(drafter.name, temperature): texts for drafter, texts in zip(loaded, results, strict=True)}
    names = list(dict.fromkeys(name for name, _ in replayed))
    return DraftersReport(
        target=target_name,
        provenance=collect_provenance(target.device, target.dtype, seed=seed, n=sum(map(len, by_temperature.values()))),
        num_texts={f"{temperature:g}": len(group) for temperature, group in by_temperature.items()},
        sources=answer_facts(texts),
        pairs={one.name: pair_facts(target_name, target, tokenizer, one.folder) for one in loaded},
        scores=[score(name, temperature, texts, seed=seed) for (name, temperature), texts in replayed.items()],
        differences=[
            paired_difference(
                (name, names[-1]),
                temperature,
                (replayed[name, temperature], replayed[names[-1], temperature]),
                seed=seed,
            )
            for name in names[:-1]
            for temperature in by_temperature
        ],
        texts=[
            TextResult(name, temperature, text.id, text.num_tokens, text.num_rounds)
            for (name, temperature), texts in replayed.items()
            for text in texts
        ],
    )


def load_texts(sources: Sequence[Path], vocab_size: int) -> dict[float, list[TargetText]]:
    """Texts of two answer tokens or more, by temperature.

    Raises:
        ComparisonError: there is none, or a row is not an answer of a target with that vocabulary.
        TrainingDataError: a file cannot be read.
    """
    groups: dict[float, list[TargetText]] = {}
    for path in data_files(list(sources)):
        for number, row in enumerate(read_rows(path), start=1):
            text = _parse_text(row, path, number, vocab_size)
            if text.input_ids.shape[0] >= text.prompt_length + 2:
                groups.setdefault(text.temperature, []).append(text)
    if not groups:
        raise ComparisonError(f"{', '.join(map(str, sources))}: no answer of two tokens or more to replay")
    return dict(sorted(groups.items()))


def _parse_text(row: dict[str, Any], path: Path, number: int, vocab_size: int) -> TargetText:
    try:
        sequence = parse_row(row, f"{path.stem}/{number}", vocab_size)
        temperature = row.get("temperature")
        if "prompt_ids" not in row or not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
            raise ValueError("needs prompt_ids, response_ids and the temperature that the answer was drawn at")
    except ValueError as error:
        raise ComparisonError(f"{path}, row {number}: {error}; write it with `dspark train data`") from error
    return TargetText(sequence.id, sequence.input_ids, len(row["prompt_ids"]), float(temperature))


def score(drafter: str, temperature: float, texts: Sequence[ReplayedText], *, seed: int) -> DrafterScore:
    """Pool what a drafter did on the texts of one temperature."""
    domains: dict[str, list[ReplayedText]] = {}
    for text in texts:
        domains.setdefault(text.id.split("/")[0], []).append(text)
    return DrafterScore(
        drafter=drafter,
        temperature=temperature,
        tau={"all": _tau(texts, seed)} | {name: _tau(part, seed) for name, part in sorted(domains.items())},
        mean_tau=_mean_tau(domains, seed),
        conditional_acceptance=_conditional_acceptance(texts),
        confidence_auc=_confidence(texts, is_auc=True),
        confidence_ece=_confidence(texts, is_auc=False),
    )


def paired_difference(
    names: tuple[str, str],
    temperature: float,
    texts: tuple[Sequence[ReplayedText], Sequence[ReplayedText]],
    *,
    seed: int,
) -> PairedDifference:
    """How much more the first drafter accepts than the second, resampling prompts with both their results."""
    first, second = texts
    assert [text.id for text in first] == [text.id for text in second], "both drafters replay the same texts"
    columns: dict[str, list[float]] = {
        "tokens": [text.num_tokens for text in first],
        "first": [text.num_rounds for text in first],
        "second": [text.num_rounds for text in second],
    }
    estimate = bootstrap(columns, lambda s: s["tokens"] / s["first"] - s["tokens"] / s["second"], seed=seed)
    return PairedDifference(names[0], names[1], temperature, estimate)


def _tau(texts: Sequence[ReplayedText], seed: int) -> Estimate:
    columns: dict[str, list[float]] = {
        "tokens": [text.num_tokens for text in texts],
        "rounds": [text.num_rounds for text in texts],
    }
    return bootstrap(columns, lambda sums: sums["tokens"] / sums["rounds"], seed=seed)


def _mean_tau(domains: Mapping[str, Sequence[ReplayedText]], seed: int) -> Estimate:
    """Mean over domains of the pooled taus; every resample draws from the prompts of all domains."""
    columns: dict[str, list[float]] = {}
    for name in domains:
        for kind in ("tokens", "rounds"):
            columns[f"{name}/{kind}"] = [
                float(getattr(text, f"num_{kind}")) if domain == name else 0.0
                for domain, texts in domains.items()
                for text in texts
            ]

    def statistic(sums: Sums) -> Floats:
        taus = [sums[f"{name}/tokens"] / sums[f"{name}/rounds"] for name in domains]
        mean: Floats = sum(taus) / len(taus)  # type: ignore[assignment]
        return mean

    return bootstrap(columns, statistic, seed=seed)


def _conditional_acceptance(texts: Sequence[ReplayedText]) -> list[float]:
    reached = torch.stack([text.reached for text in texts]).sum(dim=0)
    accepted = torch.stack([text.accepted for text in texts]).sum(dim=0)
    values: list[float] = (accepted / reached.clamp(min=1e-12)).tolist()
    return values


def _confidence(texts: Sequence[ReplayedText], *, is_auc: bool) -> list[float]:
    parts = [(text.confidence, text.acceptance, text.label, text.weight) for text in texts]
    if any(confidence is None for confidence, *_ in parts):
        return []
    predicted, acceptance, label, weight = (torch.cat([*column]) for column in zip(*parts, strict=True))
    slots = range(predicted.shape[1])
    if is_auc:
        return [
            roc_auc(predicted[:, k], weight[:, k] * acceptance[:, k], weight[:, k] * (1 - acceptance[:, k]))
            for k in slots
        ]
    return [expected_calibration_error(predicted[:, k], label[:, k], weight[:, k]) for k in slots]
