"""`dspark traces`: models by name, texts or prompts from files, traces into a file."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..config_rules import CALIBRATION_MODES
from ..decoding.calibrate import calibration_for, law_settings, mode_of
from ..prompts import encode_prompt
from ..training.response_prompts import load_prompt_dataset
from .loading import LoadedDrafter, load_drafter, load_target
from .proposals import RecordingSettings
from .provenance import check_can_write, collect_provenance
from .settings import ComparisonError
from .target_texts import load_texts
from .trace_recording import record_positions, record_rounds
from .traces import AcceptanceTraces, PromptTrace, save_traces


@dataclass(frozen=True)
class TraceRequest:
    """What is recorded; either texts or prompts.

    Attributes:
        target, drafter: As for `load_target` and `load_drafter`.
        output: File of the traces.
        texts: Files or folders of the target's answers, as `dspark train data` writes them: a draft at every token.
        prompts: Sources as for `load_prompt_dataset`: decoded with the drafter, policy `full`, round by round.
        mode: `greedy` or `sampled`.
        temperature: Of sampling; of texts, those drawn at it are taken.
        max_per_domain: Most texts or prompts of each domain, the first of them; None: all.
        num_rounds: Of prompts: rounds after which decoding stops.
        max_new_tokens, max_prompt_tokens, batch_size: Of prompts.
        dtype, device: As for `load_target`.
        seed: Of sampling and of the order of prompts.

    Raises:
        ComparisonError: a value breaks its rule.
    """

    target: str
    drafter: str | None
    output: Path
    texts: tuple[Path, ...] = ()
    prompts: tuple[str, ...] = ()
    mode: str = "greedy"
    temperature: float = 1.0
    max_per_domain: int | None = None
    num_rounds: int = 20_000
    max_new_tokens: int = 192
    max_prompt_tokens: int = 1024
    batch_size: int = 16
    dtype: str = "bfloat16"
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        given = {"texts": self.texts, "prompts": self.prompts}
        _require(bool(self.texts) != bool(self.prompts), "texts and prompts", given, "one of the two, and not both")
        _require(self.mode in CALIBRATION_MODES, "mode", self.mode, f"one of {', '.join(CALIBRATION_MODES)}")
        _require(0 < self.temperature < float("inf"), "temperature", self.temperature, "above 0; greedy is a mode")
        for name in ("max_per_domain", "num_rounds", "max_prompt_tokens", "batch_size"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, value, ">= 1")
        _require(self.max_new_tokens >= 2, "max_new_tokens", self.max_new_tokens, ">= 2, the first needs no draft")

    @property
    def recording(self) -> RecordingSettings:
        """How prompts are decoded."""
        return RecordingSettings(
            temperature=self.temperature if self.mode == "sampled" else 0.0,
            top_p=None,
            top_k=None,
            max_new_tokens=self.max_new_tokens,
            batch_size=self.batch_size,
            seed=self.seed,
        )


def record_traces(request: TraceRequest, *, show_progress: bool = False) -> AcceptanceTraces:
    """Record what a request asks for, and write it.

    With prompts, an interrupted call leaves its rounds beside the output, and the same request goes on there.

    Raises:
        ComparisonError: models or texts cannot be had, or nothing could be recorded.
        CalibrationError: rounds of another request lie beside the output.
        TrainingDataError: texts or prompts cannot be read.
        OSError: the output cannot be written.
    """
    check_can_write(request.output)
    target, tokenizer = load_target(request.target, request.dtype, request.device)
    loaded = load_drafter(request.drafter, target, request.target, tokenizer, seed=request.seed)
    if loaded.kind == "untrained":
        raise ComparisonError(f"no drafter is shipped for target {request.target!r}; name one with --drafter")
    settings = _law(request, target)
    calibration = calibration_for(loaded.model.config, settings)
    if request.texts:
        prompts = record_positions(
            target,
            loaded.model,
            _texts(request, target),
            calibration,
            seed=request.seed,
            show_progress=show_progress,
        )
    else:
        prompts = record_rounds(
            target,
            loaded.model,
            _encoded(request, tokenizer),
            rounds_file(request.output),
            request.recording,
            calibration,
            num_rounds=request.num_rounds,
            show_progress=show_progress,
        )
    if not prompts:
        raise ComparisonError("no whole round was recorded; allow more new tokens, or take longer texts")
    source = _source(request, loaded, target, settings, prompts)
    traces = AcceptanceTraces(prompts, mode_of(settings), calibration, source)
    save_traces(request.output, traces)
    rounds_file(request.output).unlink(missing_ok=True)
    return traces


def rounds_file(output: Path) -> Path:
    """Where rounds are kept until all are decoded."""
    return output.with_name(f"{output.name}.rounds")


def _law(request: TraceRequest, target: PreTrainedModel) -> GenerationConfig:
    """What shapes both laws: of texts the temperature alone, as `dspark eval` takes them."""
    if request.prompts:
        return request.recording.generation_config(target)
    if request.mode == "greedy":
        return GenerationConfig(do_sample=False)
    return GenerationConfig(do_sample=True, temperature=request.temperature, top_k=0)


def _texts(request: TraceRequest, target: PreTrainedModel) -> list[Any]:
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    by_temperature = load_texts(request.texts, vocab_size)
    wanted = request.recording.temperature
    if wanted not in by_temperature:
        found = ", ".join(f"{temperature:g}" for temperature in by_temperature)
        raise ComparisonError(
            f"no text at temperature {wanted:g} (0 is greedy), but at {found}; name other texts, or another mode or "
            "temperature"
        )
    return _first_of_each(by_temperature[wanted], request.max_per_domain)


def _encoded(request: TraceRequest, tokenizer: PreTrainedTokenizerBase) -> dict[str, tuple[int, ...]]:
    prompts = [prompt for prompt in load_prompt_dataset(list(request.prompts)) if prompt.messages]
    encoded = {p.id: tuple(encode_prompt(tokenizer, p)[0].tolist()) for p in prompts}
    kept = [p for p in prompts if 0 < len(encoded[p.id]) <= request.max_prompt_tokens]
    if not kept:
        raise ComparisonError(
            f"none of {len(prompts)} prompts has at most {request.max_prompt_tokens} tokens; raise max_prompt_tokens"
        )
    return {p.id: encoded[p.id] for p in _first_of_each(kept, request.max_per_domain)}


def _first_of_each(items: Sequence[Any], most: int | None) -> list[Any]:
    """At most so many of each domain, told by what stands before the slash of an id."""
    counts: dict[str, int] = {}
    kept = []
    for item in items:
        domain = item.id.split("/")[0]
        counts[domain] = counts.get(domain, 0) + 1
        if most is None or counts[domain] <= most:
            kept.append(item)
    return kept


def _source(
    request: TraceRequest,
    loaded: LoadedDrafter,
    target: PreTrainedModel,
    settings: GenerationConfig,
    prompts: Sequence[PromptTrace],
) -> dict[str, Any]:
    provenance = collect_provenance(target.device, target.dtype, seed=request.seed, n=len(prompts))
    return {
        "target": request.target,
        "drafter": loaded.name,
        "law": law_settings(settings),
        "from": "texts" if request.texts else "decoding",
        "provenance": asdict(provenance),
    }


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise ComparisonError(f"{name} must be {rule}, got {value!r}")
