"""`calibrate_drafter`: decode prompts, fit the confidence head's calibration, judge it on other prompts, write it."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..config_rules import CALIBRATION_MODES
from ..decoding.calibrate import law_settings
from ..errors import CalibrationError
from ..fitting.proposals import Proposals
from ..fitting.sts import MAPS, FittedCalibration, SequentialTemperatureScaling
from ..modeling_dspark import DSparkDraftModel
from ..prompts import encode_prompt
from ..training.locks import alone_with
from ..training.records import is_held_out
from ..training.response_prompts import load_prompt_dataset
from .calibration_files import check_output, plot_reliability, write_calibrated
from .calibration_quality import SlotQuality, slot_qualities
from .loading import bundled_drafter, load_drafter, load_target
from .proposals import RecordingSettings, record_to_file
from .provenance import Provenance, collect_provenance, write_json

logger = logging.getLogger(__name__)

# Everything but the drafter itself lies in this folder of the output.
WORK_FOLDER = "calibration"
PARTS = ("fit", "held-out")


@dataclass(frozen=True)
class CalibrationRequest:
    """What to calibrate, on what.

    Attributes:
        target, drafter: As for `load_target` and `load_drafter`.
        prompts: Sources as for `load_prompt_dataset`, to fit on. Prompts that the drafter was trained on mislead:
            their acceptance is higher than elsewhere.
        not_trained_fraction: Of `prompts` take only those that training with this `held_out_fraction` left out; None:
            all.
        output: Folder of the calibrated drafter; its own folder to calibrate it in place.
        held_out_prompts: Sources to judge the fit on; empty: a part of `prompts` is kept for that.
        held_out_fraction: That part, of the prompts.
        modes: Of `greedy` and `sampled`.
        temperature, top_p, top_k: Of sampled decoding.
        num_proposals: Rounds to decode, per mode.
        num_held_out_proposals: The same of `held_out_prompts`; None: as many.
        max_new_tokens: Most new tokens of a prompt.
        max_prompt_tokens: Longer prompts are left out.
        batch_size: Prompts decoded together.
        maps: As for [`SequentialTemperatureScaling`].
        dtype, device: As for `load_target`.
        seed: Of the order of prompts, sampling, splitting and resampling.

    Raises:
        CalibrationError: a value breaks its rule.
    """

    target: str
    drafter: str | None
    prompts: tuple[str, ...]
    output: Path
    held_out_prompts: tuple[str, ...] = ()
    held_out_fraction: float = 0.3
    not_trained_fraction: float | None = None
    modes: tuple[str, ...] = CALIBRATION_MODES
    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    num_proposals: int = 20_000
    num_held_out_proposals: int | None = None
    max_new_tokens: int = 192
    max_prompt_tokens: int = 1024
    batch_size: int = 16
    maps: str = "auto"
    dtype: str = "bfloat16"
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        _require(bool(self.prompts), "prompts", self.prompts, "at least one source")
        _require(self.maps in MAPS, "maps", self.maps, f"one of {', '.join(MAPS)}")
        known = bool(self.modes) and set(self.modes) <= set(CALIBRATION_MODES)
        _require(known, "modes", self.modes, f"some of {', '.join(CALIBRATION_MODES)}")
        _require(
            0 < self.temperature < math.inf, "temperature", self.temperature, "above 0; greedy is a mode of its own"
        )
        _require(self.top_p is None or 0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(self.top_k is None or self.top_k >= 1, "top_k", self.top_k, ">= 1")
        for name in ("num_proposals", "num_held_out_proposals", "max_prompt_tokens", "batch_size"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, value, ">= 1")
        _require(self.max_new_tokens >= 2, "max_new_tokens", self.max_new_tokens, ">= 2, the first needs no draft")
        for name in ("held_out_fraction", "not_trained_fraction"):
            value = getattr(self, name)
            _require(value is None or 0 < value < 1, name, value, "inside 0 to 1")

    @property
    def sources(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Of the prompts to fit on and to judge on."""
        return self.prompts, self.held_out_prompts

    @property
    def numbers(self) -> tuple[int, int]:
        """Rounds to decode of each."""
        return self.num_proposals, self.num_held_out_proposals or self.num_proposals

    def recording(self, mode: str) -> RecordingSettings:
        """How one mode decodes."""
        is_sampled = mode == "sampled"
        return RecordingSettings(
            temperature=self.temperature if is_sampled else 0.0,
            top_p=self.top_p if is_sampled else None,
            top_k=self.top_k if is_sampled else None,
            max_new_tokens=self.max_new_tokens,
            batch_size=self.batch_size,
            seed=self.seed,
        )


@dataclass(frozen=True)
class ModeReport:
    """One mode's fit.

    Attributes:
        num_fitted, num_held_out: Rounds fitted on and judged on.
        num_fitted_prompts, num_held_out_prompts: Prompts they come from.
        settings: What shaped both laws.
        temperatures, platt, slots_left_as_they_are: As in [`FittedCalibration`].
        slots: Quality on the held-out rounds.
        mean_ece_before, mean_ece_after, mean_ece_floor: Means over slots.
        is_written: False where a slot became worse by more than chance, so that the drafter stays as it was.
    """

    num_fitted: int
    num_held_out: int
    num_fitted_prompts: int
    num_held_out_prompts: int
    settings: dict[str, float]
    temperatures: list[float]
    platt: list[tuple[float, float]] | None
    slots_left_as_they_are: list[int]
    slots: list[SlotQuality]
    mean_ece_before: float
    mean_ece_after: float
    mean_ece_floor: float
    is_written: bool

    def entry(self) -> dict[str, Any]:
        """For `DSparkConfig.calibration`."""
        return {
            "temperatures": [round(t, 6) for t in self.temperatures],
            "platt": None if self.platt is None else [[round(a, 6), round(b, 6)] for a, b in self.platt],
            "settings": self.settings,
            "num_proposals": self.num_fitted,
            "ece_before": round(self.mean_ece_before, 6),
            "ece_after": round(self.mean_ece_after, 6),
        }


@dataclass(frozen=True)
class CalibrationReport:
    """What was fitted, how good it is, and where it comes from."""

    target: str
    drafter: str
    output: str
    modes: dict[str, ModeReport]
    provenance: Provenance

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def calibrate_drafter(request: CalibrationRequest, *, show_progress: bool = False) -> CalibrationReport:
    """Fit a drafter's calibration to what the target accepts in real decoding, and write the drafter with it.

    Proposals are kept in the output's folder `calibration`, so the same request goes on where an interrupted one
    stopped; report.json and reliability.png lie there too.

    Raises:
        CalibrationError: proposals or settings no calibration can be fitted with, or the output cannot be used.
        TrainingDataError: prompts cannot be read, or another run writes the output.
        ComparisonError, ZooError: as for `load_target` and `load_drafter`.
    """
    output = request.output.expanduser()
    work = output / WORK_FOLDER
    with alone_with(work / ".lock", output):
        prompts = [load_prompt_dataset(list(sources)) if sources else [] for sources in request.sources]
        if request.not_trained_fraction is not None:
            prompts[0] = [prompt for prompt in prompts[0] if is_held_out(prompt.id, request.not_trained_fraction)]
            _require(bool(prompts[0]), "prompts", request.prompts, "some that training left out; their ids decide")
        target, tokenizer = load_target(request.target, request.dtype, request.device)
        drafter, name, source = _load(request, target, tokenizer)
        check_output(source, output)
        encoded = [_encode(tokenizer, part, request.max_prompt_tokens) for part in prompts]
        _refuse_shared(*encoded)
        modes = {}
        for mode in request.modes:
            recording = request.recording(mode)
            parts = [
                record_to_file(
                    target,
                    drafter,
                    part,
                    work / f"proposals-{mode}-{kind}.jsonl",
                    recording,
                    num_proposals=num_proposals,
                    show_progress=show_progress,
                )
                for kind, part, num_proposals in zip(PARTS, encoded, request.numbers, strict=True)
                if part
            ]
            if len(parts) == 1:
                parts = [*parts[0].split(request.held_out_fraction, seed=request.seed)]
            settings = law_settings(recording.generation_config(target))
            modes[mode] = fit_mode(parts[0], parts[1], settings, maps=request.maps, seed=request.seed)
        num_held_out = sum(found.num_held_out for found in modes.values())
        provenance = collect_provenance(target.device, target.dtype, seed=request.seed, n=num_held_out)
        report = CalibrationReport(request.target, name, output.name, modes, provenance)
        write_json(work / "report.json", report.to_dict())
        plot_reliability({mode: found.slots for mode, found in modes.items()}, work / "reliability.png")
        write_calibrated(source, output, {mode: found.entry() for mode, found in modes.items() if found.is_written})
    return report


def _refuse_shared(fitting: Mapping[str, tuple[int, ...]], held_out: Mapping[str, tuple[int, ...]]) -> None:
    shared = set(fitting.values()) & set(held_out.values())
    if shared:
        raise CalibrationError(
            f"{len(shared)} prompts are both among those to fit on and among the held-out ones; take them out of one"
        )


def fit_mode(
    proposals: Proposals, held_out: Proposals, settings: dict[str, float], *, maps: str, seed: int
) -> ModeReport:
    """Fit on one part and judge on the other.

    Raises:
        CalibrationError: as for [`SequentialTemperatureScaling.fit`].
    """
    fitted: FittedCalibration = SequentialTemperatureScaling(maps=maps).fit(proposals, held_out)
    slots = slot_qualities(held_out, fitted.slot_calibration, seed=seed)
    worse = [slot.slot for slot in slots if slot.is_worse]
    if worse:
        logger.warning("slots %s are further from the outcomes than before; this mode is not written", worse)

    def mean(value: Callable[[SlotQuality], float | None]) -> float:
        return sum(value(slot) or 0.0 for slot in slots) / len(slots)

    return ModeReport(
        num_fitted=len(proposals),
        num_held_out=len(held_out),
        num_fitted_prompts=proposals.num_prompts,
        num_held_out_prompts=held_out.num_prompts,
        settings=settings,
        temperatures=list(fitted.temperatures),
        platt=None if fitted.platt is None else list(fitted.platt),
        slots_left_as_they_are=list(fitted.slots_left_as_they_are),
        slots=slots,
        mean_ece_before=mean(lambda slot: slot.before.ece.value),
        mean_ece_after=mean(lambda slot: slot.after.ece.value),
        mean_ece_floor=mean(lambda slot: slot.ece_floor),
        is_written=not worse,
    )


def _load(
    request: CalibrationRequest, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[DSparkDraftModel, str, str]:
    """The drafter, what to call it, and its folder or Hub id."""
    loaded = load_drafter(request.drafter, target, request.target, tokenizer, seed=request.seed)
    if loaded.kind == "untrained":
        raise CalibrationError(f"no drafter is shipped for target {request.target!r}; name one with --drafter")
    if not loaded.model.config.enable_confidence_head:
        raise CalibrationError(f"drafter {loaded.name} has no confidence head, so there is nothing to calibrate")
    folder = bundled_drafter(request.target, target.config) if request.drafter is None else None
    source = request.drafter if folder is None else str(folder)
    assert source is not None, "a drafter that is not named is the bundled one"
    return loaded.model, loaded.name, str(Path(source).expanduser()) if Path(source).expanduser().is_dir() else source


def _encode(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Any], max_prompt_tokens: int
) -> dict[str, tuple[int, ...]]:
    """Token ids by id, of prompts with text that are short enough.

    Raises:
        CalibrationError: none is left of some.
    """
    encoded = {p.id: tuple(encode_prompt(tokenizer, p)[0].tolist()) for p in prompts if p.messages}
    kept = {name: ids for name, ids in encoded.items() if 0 < len(ids) <= max_prompt_tokens}
    if prompts and not kept:
        raise CalibrationError(
            f"none of {len(prompts)} prompts has text and at most {max_prompt_tokens} tokens; raise max_prompt_tokens, "
            "or name other prompts"
        )
    if len(kept) < len(prompts):
        logger.warning(
            "left out: %d prompts without text, or longer than %d tokens", len(prompts) - len(kept), max_prompt_tokens
        )
    return kept


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise CalibrationError(f"{name} must be {rule}, got {value!r}")
