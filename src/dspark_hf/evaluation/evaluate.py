"""`evaluate_drafters`: replay drafters on texts of the target, or decode prompts with them, and report."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..configuration_dspark import DSparkConfig
from ..decoding.calibrate import calibration_for
from ..hub.numbers import mode_name
from ..modeling_dspark import DSparkDraftModel
from ..prompts import chat_template_of
from ..training.answer_facts import AnswerFacts, answer_facts, prompt_source
from ..training.records import data_files
from .calibration_quality import SlotQuality
from .cuts import CutPlan
from .decoded import decode_drafter, folder_for, load_eval_prompts
from .depths import depth_scores, drafter_facts
from .drafters import MEANING_OF_CUTS, DraftersReport, TextResult, score
from .evaluation_request import DecodingRequest, EvaluationRequest
from .identity import pair_facts
from .loading import LoadedDrafter, load_drafter, load_target
from .proposals import encode_prompts
from .provenance import collect_provenance
from .replay import Replay, ReplayedText, TargetText
from .settings import ComparisonError
from .target_texts import load_texts
from .tau_tables import paired_differences


@dataclass(frozen=True)
class _Evidence:
    """What was measured, by drafter and temperature."""

    texts: dict[tuple[str, float], list[ReplayedText]]
    plans: dict[tuple[str, float], CutPlan]
    sources: list[AnswerFacts]
    reliability: dict[str, dict[str, list[SlotQuality]]] = field(default_factory=dict)


def evaluate_drafters(
    request: EvaluationRequest, *, with_reliability: bool = False, show_progress: bool = False
) -> DraftersReport:
    """Measure drafters on the same texts or prompts; the last one is the baseline of the paired differences.

    Args:
        request: Which, and on what.
        with_reliability: Whether to judge survival estimates too, where prompts are decoded; it takes some seconds.
        show_progress: Whether to show progress bars.

    Raises:
        ComparisonError: a model cannot be loaded, there are no texts, or a drafter cannot be replayed.
        TrainingDataError: a file cannot be read.
        CalibrationError: recorded rounds cannot be used, or no prompt is left.
    """
    decoding = request.decoding
    # What is not there is said before models are loaded.
    files = data_files(list(request.texts)) if decoding is None else []
    prompts = [] if decoding is None else load_eval_prompts(decoding)
    target, tokenizer = load_target(request.target, request.dtype, request.device)
    loaded = _load(request, target, tokenizer)
    if decoding is None:
        texts = load_texts(files, target.config.get_text_config(decoder=True).vocab_size)
        evidence = _replay(request, target, loaded, texts, show_progress)
    else:
        encoded = encode_prompts(tokenizer, prompts, decoding.max_prompt_tokens)
        sources = _prompt_facts(request.target, decoding, tokenizer)
        evidence = _Evidence({}, {}, sources)
        _decode(request, decoding, target, loaded, encoded, evidence, with_reliability, show_progress)
    return _report(request, target, tokenizer, loaded, evidence)


def _load(
    request: EvaluationRequest, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> list[LoadedDrafter]:
    loaded: dict[str, LoadedDrafter] = {}
    for one in request.drafters:
        found = load_drafter(one.source, target, request.target, tokenizer, seed=request.seed)
        if found.kind == "untrained":
            raise ComparisonError(f"no drafter is shipped for target {request.target!r}; name one with --drafter")
        kind = found.model.config.model_type
        if request.decoding is None and kind != DSparkConfig.model_type:
            raise ComparisonError(
                f"drafter {one.source!r} is of kind {kind!r}, whose rounds cannot be replayed on texts; decode prompts "
                "with it (--prompts)"
            )
        found = found if one.name is None else dataclasses.replace(found, name=one.name)
        loaded[found.name] = found  # the same drafter twice is one
    return list(loaded.values())


def _replay(
    request: EvaluationRequest,
    target: PreTrainedModel,
    loaded: Sequence[LoadedDrafter],
    by_temperature: Mapping[float, Sequence[TargetText]],
    show_progress: bool,
) -> _Evidence:
    results: dict[tuple[str, float], list[ReplayedText]] = {}
    plans: dict[tuple[str, float], CutPlan] = {}
    for temperature, group in by_temperature.items():
        found = [_plan(one.model, temperature, request.thresholds) for one in loaded]
        replayed = Replay(target, group).run_all(
            [one.model for one in loaded], plans=found, show_progress=show_progress
        )
        for one, texts, plan in zip(loaded, replayed, found, strict=True):
            results[one.name, temperature], plans[one.name, temperature] = texts, plan
    return _Evidence(results, plans, answer_facts(request.texts))


def _plan(drafter: DSparkDraftModel, temperature: float, thresholds: tuple[float, ...]) -> CutPlan:
    if drafter.confidence_head is None:
        return CutPlan(drafter.config.block_size)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    calibration = calibration_for(drafter.config, GenerationConfig(top_k=0 if temperature else 50, **sampling))
    return CutPlan(drafter.config.block_size, thresholds, calibration)


def _decode(
    request: EvaluationRequest,
    decoding: DecodingRequest,
    target: PreTrainedModel,
    loaded: Sequence[LoadedDrafter],
    prompts: Mapping[str, Sequence[int]],
    evidence: _Evidence,
    with_reliability: bool,
    show_progress: bool,
) -> None:
    """Fill `evidence`."""
    with folder_for(decoding.rounds_folder) as folder:
        for temperature, one in itertools.product(decoding.temperatures, loaded):
            found = decode_drafter(
                target,
                one.model,
                one.name,
                prompts,
                decoding,
                temperature,
                thresholds=request.thresholds,
                folder=folder,
                seed=request.seed,
                show_progress=show_progress,
            )
            evidence.texts[one.name, temperature] = found.texts
            evidence.plans[one.name, temperature] = found.plan
            slots = found.reliability(seed=request.seed) if with_reliability else None
            if slots is not None:
                evidence.reliability.setdefault(one.name, {})[mode_name(temperature)] = slots


def _prompt_facts(target: str, decoding: DecodingRequest, tokenizer: PreTrainedTokenizerBase) -> list[AnswerFacts]:
    return [
        AnswerFacts(
            file=source.name,
            target=target,
            temperatures=list(decoding.temperatures),
            max_new_tokens=decoding.max_new_tokens,
            chat_templates=[chat_template_of(tokenizer)],
            prompt_sources=[source],
            commands=None,
        )
        for source in map(prompt_source, decoding.prompts)
    ]


def _report(
    request: EvaluationRequest,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    loaded: Sequence[LoadedDrafter],
    evidence: _Evidence,
) -> DraftersReport:
    seed = request.seed
    baseline = loaded[-1].name
    temperatures = list(dict.fromkeys(temperature for _, temperature in evidence.texts))
    num_texts = {f"{t:g}": len(evidence.texts[baseline, t]) for t in temperatures}
    facts = {one.name: drafter_facts(one.model, evidence.plans[one.name, temperatures[0]].num_slots) for one in loaded}
    method = "replay" if request.decoding is None else "decoding"
    return DraftersReport(
        target=request.target,
        provenance=collect_provenance(target.device, target.dtype, seed=seed, n=sum(num_texts.values())),
        num_texts=num_texts,
        sources=evidence.sources,
        pairs={one.name: pair_facts(request.target, target, tokenizer, one.folder) for one in loaded},
        scores=[
            score(name, temperature, texts, evidence.plans[name, temperature], seed=seed)
            for (name, temperature), texts in evidence.texts.items()
        ],
        differences=[
            difference
            for one in loaded[:-1]
            for t in temperatures
            for difference in paired_differences(
                (one.name, baseline), t, (evidence.texts[one.name, t], evidence.texts[baseline, t]), seed=seed
            )
        ],
        texts=[
            TextResult(name, temperature, text.id, text.num_tokens, text.num_rounds)
            for (name, temperature), texts in evidence.texts.items()
            for text in texts
        ],
        method=method,
        meaning_of_cuts=MEANING_OF_CUTS[method],
        settings=None if request.decoding is None else _settings(request),
        drafters=facts,
        depths=depth_scores(facts, evidence.texts, seed=seed),
        reliability=evidence.reliability,
    )


def _settings(request: EvaluationRequest) -> dict[str, Any]:
    decoding = asdict(request.decoding) if request.decoding is not None else {}
    return {key: value for key, value in decoding.items() if key != "rounds_folder"}
