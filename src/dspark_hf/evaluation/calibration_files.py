"""What `dspark calibrate` writes: the drafter with its calibration, and the reliability diagram."""

import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..config_rules import check_calibration
from ..configuration_dspark import DSparkConfig
from ..errors import CalibrationError, DSparkError
from ..modeling_dspark import DSparkDraftModel
from .calibration_quality import SlotQuality
from .pictures import save_figure

logger = logging.getLogger(__name__)


# Whoever finds one of these in a folder must take it for a model.
MODEL_FILES = ("config.json", "*.safetensors", "*.bin")


def check_output(source: str, output: Path) -> None:
    """Refuse an output that `write_calibrated` could not use, before anything is decoded.

    Raises:
        CalibrationError: `output` is the drafter's own folder, and its config.json is of another format, which has no
            place for a calibration; or it holds another model.
    """
    if not _is_same(source, output):
        _calibration_there(DSparkDraftModel.from_pretrained(source, dtype="auto"), output)
        return
    config = json.loads((output / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") != "dspark":
        raise CalibrationError(
            f"{output} holds a drafter in another project's format, which has no place for a calibration; name another "
            "output, where it is saved in this package's"
        )


def write_calibrated(source: str, output: Path, calibration: Mapping[str, Any]) -> None:
    """Write a drafter with its calibration; modes that are not fitted now are kept, the output's before the source's.

    Args:
        source: Folder or Hub id of the drafter.
        output: Folder; the drafter's own gets a new config.json and nothing else, another one a whole drafter.

    Raises:
        CalibrationError: as for `check_output`.
        DSparkConfigError: the calibration breaks a rule.
        OSError: the folder cannot be written.
    """
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".calibrated-", dir=output) as name:
        staged = Path(name)
        if _is_same(source, output):
            config = DSparkConfig.from_pretrained(source)
            _set_calibration(config, calibration)
            config.save_pretrained(staged)
        else:
            model: Any = DSparkDraftModel.from_pretrained(source, dtype="auto")
            _set_calibration(model.config, {**_calibration_there(model, output), **calibration})
            model.save_pretrained(staged)
        # The config last: a folder with the new one is whole.
        for path in sorted(staged.iterdir(), key=lambda path: path.name == "config.json"):
            os.replace(path, output / path.name)


def _set_calibration(config: DSparkConfig, calibration: Mapping[str, Any]) -> None:
    config.calibration = {**(config.calibration or {}), **calibration}
    check_calibration(config)


def _calibration_there(drafter: Any, output: Path) -> dict[str, Any]:
    """Of the same drafter in `output`, by mode; none where the folder holds no model.

    Raises:
        CalibrationError: it holds another one.
    """
    if not any(any(output.glob(pattern)) for pattern in MODEL_FILES):
        return {}
    reason = "its weights or its block_size are others"
    try:
        model_type = json.loads((output / "config.json").read_text(encoding="utf-8")).get("model_type")
        if model_type == "dspark":
            there: Any = DSparkDraftModel.from_pretrained(output, dtype="auto")
            if _has_same_weights(drafter, there) and there.config.block_size == drafter.config.block_size:
                return there.config.calibration or {}
        else:
            reason = f"its config.json has model_type {model_type!r}"
    except (OSError, ValueError, AttributeError, DSparkError) as error:
        reason = str(error)
    raise CalibrationError(
        f"output {output} must be empty or hold the drafter that is calibrated, but holds another model ({reason}); "
        "name another output, or empty the folder"
    )


def _has_same_weights(drafter: Any, other: Any) -> bool:
    ours, theirs = drafter.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(
        ours[key].dtype == theirs[key].dtype and torch.equal(ours[key], theirs[key]) for key in ours
    )


def _is_same(source: str, output: Path) -> bool:
    path = Path(source).expanduser()
    return path.is_dir() and output.is_dir() and path.samefile(output)


def plot_reliability(
    modes: Mapping[str, Sequence[SlotQuality]],
    path: Path,
    *,
    overlay: Mapping[int, Mapping[str, Sequence[Sequence[float]]]] | None = None,
) -> bool:
    """Draw predicted against realised survival per mode and slot, before and after; False without matplotlib.

    Args:
        overlay: By slot, `before` and `after`: points of the paper's Figure 6, drawn in grey.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning('no figure without matplotlib: pip install "dspark-hf[eval]"')
        return False
    num_slots = max(len(slots) for slots in modes.values())
    figure = Figure(figsize=(2.6 * num_slots, 2.9 * len(modes)), layout="constrained")
    grid = figure.subplots(len(modes), num_slots, squeeze=False, sharex=True, sharey=True)
    for line, (mode, slots) in zip(grid, modes.items(), strict=True):
        for axes, slot in zip(line, slots, strict=False):
            axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
            for name, curve in ((overlay or {}).get(slot.slot) or {}).items():
                style = ":" if name == "before" else "-"
                axes.plot(*zip(*curve, strict=True), style, color="0.6", linewidth=1, label=f"paper, {name}")
            for name, quality, colour in (("before", slot.before, "tab:orange"), ("after", slot.after, "tab:blue")):
                points = [(one.mean_predicted, one.share_accepted) for one in quality.bins]
                sizes = [4 + 80 * one.num_proposals / slot.num_proposals for one in quality.bins]
                axes.plot(*zip(*points, strict=True), color=colour, linewidth=1)
                label = f"{name}, ECE {quality.ece.value:.3f}"
                axes.scatter(*zip(*points, strict=True), s=sizes, color=colour, label=label)
            axes.set_title(f"{mode}, slot {slot.slot}", fontsize="small")
            axes.legend(fontsize="x-small", loc="upper left")
            axes.grid(alpha=0.3)
        line[0].set_ylabel("share accepted")
    for axes in grid[-1]:
        axes.set_xlabel("predicted survival")
    save_figure(figure, path, dpi=100)
    return True
