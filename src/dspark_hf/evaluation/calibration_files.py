"""What `dspark calibrate` writes: the drafter with its calibration, and the reliability diagram."""

import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config_rules import check_calibration
from ..configuration_dspark import DSparkConfig
from ..errors import CalibrationError
from ..modeling_dspark import DSparkDraftModel
from .calibration_quality import SlotQuality

logger = logging.getLogger(__name__)


def check_in_place(source: str, output: Path) -> None:
    """Refuse to put a calibration into a config.json of another format, which has no place for it.

    Raises:
        CalibrationError: `output` is the drafter's own folder, and its config.json is not of this package.
    """
    if not _is_same(source, output):
        return
    config = json.loads((output / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") != "dspark":
        raise CalibrationError(
            f"{output} holds a drafter in another project's format, which has no place for a calibration; name another "
            "output, where it is saved in this package's"
        )


def write_calibrated(source: str, output: Path, calibration: Mapping[str, Any]) -> None:
    """Write a drafter with its calibration; modes that are not fitted now are kept.

    Args:
        source: Folder or Hub id of the drafter.
        output: Folder; the drafter's own gets a new config.json and nothing else, another one a whole drafter.

    Raises:
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
            _set_calibration(model.config, calibration)
            model.save_pretrained(staged)
        # The config last: a folder with the new one is whole.
        for path in sorted(staged.iterdir(), key=lambda path: path.name == "config.json"):
            os.replace(path, output / path.name)


def _set_calibration(config: DSparkConfig, calibration: Mapping[str, Any]) -> None:
    config.calibration = {**(config.calibration or {}), **calibration}
    check_calibration(config)


def _is_same(source: str, output: Path) -> bool:
    path = Path(source).expanduser()
    return path.is_dir() and output.is_dir() and path.samefile(output)


def plot_reliability(modes: Mapping[str, Sequence[SlotQuality]], path: Path) -> bool:
    """Draw predicted against realised survival per mode and slot, before and after; False without matplotlib."""
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
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        figure.savefig(partial, dpi=100, format="png")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return True
