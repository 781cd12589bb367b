"""`calibrate_drafter`: decode prompts, fit the confidence head's calibration, judge it on other prompts, write it."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..decoding.calibrate import law_settings
from ..errors import CalibrationError
from ..fitting.proposals import Proposals
from ..fitting.sts import FittedCalibration, SequentialTemperatureScaling
from ..training.locks import alone_with
from ..training.records import is_held_out
from ..training.response_prompts import load_prompt_dataset
from .calibration_files import check_output, plot_reliability, write_calibrated
from .calibration_quality import SlotQuality, slot_qualities
from .calibration_request import CalibrationRequest, require
from .identity import PairFacts, pair_facts
from .loading import LoadedDrafter, bundled_drafter, load_drafter, load_target
from .proposals import encode_prompts, record_to_file
from .provenance import Provenance, collect_provenance, write_report
from .report_files import keep_report

# Everything but the drafter itself lies in this folder of the output.
WORK_FOLDER = "calibration"
PARTS = ("fit", "held-out")

HELD_OUT_USE = (
    "held-out rounds also decide which slots keep their map, so the numbers after calibration lean a little to the good"
)


@dataclass(frozen=True)
class ModeReport:
    """One mode's fit.

    Attributes:
        num_fitted, num_held_out: Rounds fitted on and judged on.
        num_fitted_prompts, num_held_out_prompts: Prompts they come from.
        settings: What shaped both laws.
        temperatures, platt, slots_left_as_they_are, slots_not_fitted: As in [`FittedCalibration`].
        slots: Quality on the held-out rounds, which also decided which slots keep their map.
        mean_ece_before, mean_ece_after, mean_ece_floor: Means over slots.
        slots_worse: Slots, counted from 1, that are further from the outcomes than before, by more than chance.
        is_written: Whether there is none; otherwise the drafter stays as it was.
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
    slots_worse: list[int]
    is_written: bool
    slots_not_fitted: list[int] = field(default_factory=list)

    def entry(self) -> dict[str, Any]:
        """For `DSparkConfig.calibration`."""
        return {
            "temperatures": [round(t, 6) for t in self.temperatures],
            "platt": None if self.platt is None else [[round(a, 6), round(b, 6)] for a, b in self.platt],
            "settings": self.settings,
            "num_proposals": self.num_fitted,
            "ece_before": round(self.mean_ece_before, 6),
            "ece_after": round(self.mean_ece_after, 6),
            "share_accepted": [round(slot.share_accepted, 6) for slot in self.slots],
        }


@dataclass(frozen=True)
class CalibrationReport:
    """What was fitted, how good it is, and where it comes from.

    Attributes:
        modes: Every mode asked for, written or not.
        pair: What identifies drafter and target.
        held_out_use: What held-out rounds served for besides judging.
    """

    target: str
    drafter: str
    output: str
    modes: dict[str, ModeReport]
    provenance: Provenance
    pair: PairFacts
    held_out_use: str = HELD_OUT_USE

    @property
    def written_modes(self) -> list[str]:
        """Those whose fit the drafter got."""
        return [mode for mode, found in self.modes.items() if found.is_written]

    @property
    def why_not_written(self) -> str:
        """The other modes, each with its reason; empty if there is none."""
        return "; ".join(
            f"{mode}, since calibrated slots {found.slots_worse} are further from the outcomes than before, by more "
            "than chance"
            for mode, found in self.modes.items()
            if not found.is_written
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"kind": "calibration", **asdict(self)}


def calibrate_drafter(request: CalibrationRequest, *, show_progress: bool = False) -> CalibrationReport:
    """Fit a drafter's calibration to what the target accepts in real decoding, and write the drafter with it.

    Proposals are kept in the output's folder `calibration`, so the same request goes on where an interrupted one
    stopped; report.json and reliability.png lie there too. What is written of them is kept in `reports` as well, a file
    for each mode, for the drafter's card. No drafter is written where no mode's fit is good enough.

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
            require(bool(prompts[0]), "prompts", request.prompts, "some that training left out; their ids decide")
        target, tokenizer = load_target(request.target, request.dtype, request.device)
        loaded, source = _load(request, target, tokenizer)
        drafter = loaded.model
        check_output(source, output)
        encoded = [encode_prompts(tokenizer, part, request.max_prompt_tokens) for part in prompts]
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
        pair = pair_facts(request.target, target, tokenizer, loaded.folder)
        report = CalibrationReport(request.target, loaded.name, output.name, modes, provenance, pair)
        write_report(work / "report.json", report.to_dict())
        plot_reliability({mode: found.slots for mode, found in modes.items()}, work / "reliability.png")
        if report.written_modes:
            write_calibrated(source, output, {mode: modes[mode].entry() for mode in report.written_modes})
            _keep_for_card(report, output)
    return report


def _keep_for_card(report: CalibrationReport, output: Path) -> None:
    """One report a mode, since modes can be calibrated one by one."""
    for mode in report.written_modes:
        found = report.modes[mode]
        figure = keep_report(output, f"calibration-{mode}", report.to_dict() | {"modes": {mode: asdict(found)}})
        plot_reliability({mode: found.slots}, figure)


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
        slots_worse=worse,
        is_written=not worse,
        slots_not_fitted=list(fitted.slots_not_fitted),
    )


def _load(
    request: CalibrationRequest, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[LoadedDrafter, str]:
    """The drafter, and its folder or Hub id."""
    loaded = load_drafter(request.drafter, target, request.target, tokenizer, seed=request.seed)
    if loaded.kind == "untrained":
        raise CalibrationError(f"no drafter is shipped for target {request.target!r}; name one with --drafter")
    if not loaded.model.config.enable_confidence_head:
        raise CalibrationError(f"drafter {loaded.name} has no confidence head, so there is nothing to calibrate")
    folder = bundled_drafter(request.target, target.config) if request.drafter is None else None
    source = request.drafter if folder is None else str(folder)
    assert source is not None, "a drafter that is not named is the bundled one"
    return loaded, str(Path(source).expanduser()) if Path(source).expanduser().is_dir() else source
