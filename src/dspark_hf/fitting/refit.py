"""A new calibration from rounds that are over, for a drafter whose confidence has drifted."""

import copy
from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig

from ..config_rules import CALIBRATION_MODES, check_calibration
from ..configuration_dspark import DSparkConfig
from ..decoding.calibrate import law_settings, mode_name, mode_of
from ..decoding.observers import EndedRounds
from ..errors import CalibrationError
from .proposals import Proposals, proposals_of
from .sts import FittedCalibration, SequentialTemperatureScaling

HELD_OUT_FRACTION = 0.3


def fit_past(proposals: Proposals, *, seed: int = 0) -> FittedCalibration:
    """What [`refit`] fits: maps of the better kind, and none where one is worse on a held-out part of the texts.

    Raises:
        CalibrationError: as for `SequentialTemperatureScaling.fit`.
    """
    return SequentialTemperatureScaling(maps="auto").fit(*proposals.split(HELD_OUT_FRACTION, seed=seed))


def refit(
    config: DSparkConfig, rounds: Sequence[EndedRounds], generation_config: GenerationConfig, *, seed: int = 0
) -> FittedCalibration:
    """Fit one mode again and put it into a drafter's config; generate() calls that start later use it.

    Only rounds that are over count, so no decision about a draft depends on the draft itself. A slot whose new
    map is worse than none on a held-out part of the texts gets none.

    Args:
        config: The drafter's; its `calibration` gets a new entry for the mode.
        rounds: Of that drafter and of the mode of `generation_config`, e.g. `DriftWatch.rounds`.
        generation_config: What they were decoded under.
        seed: Of the held-out part.

    Raises:
        CalibrationError: rounds of another mode or of more slots than the drafter's; or as for
            `SequentialTemperatureScaling.fit`.
        DSparkConfigError: the config could not be loaded with the new entry. It is unchanged whenever one is raised.
    """
    mode = mode_of(generation_config)
    assert mode in CALIBRATION_MODES, "modes are the keys of a calibration"
    others = [ended for ended in rounds if mode_name(ended.is_sampled) != mode]
    if others:
        raise CalibrationError(
            f"rounds must all be {mode}, as generation_config is, and {len(others)} of {len(rounds)} entries are not; "
            f"record them with watch_drift(drafter, mode={mode!r}), or leave those out"
        )
    proposals = proposals_of(rounds)
    if proposals.num_slots > config.block_size:
        raise CalibrationError(
            f"rounds may have at most the drafter's block_size {config.block_size} slots, got {proposals.num_slots}; "
            "pass the config of the drafter that made them"
        )
    fitted = fit_past(proposals, seed=seed)
    num_missing = config.block_size - proposals.num_slots  # slots that no round drafted
    entry: dict[str, Any] = {
        "temperatures": [*fitted.temperatures, *[1.0] * num_missing],
        "platt": None if fitted.platt is None else [*map(list, fitted.platt), *[[1.0, 0.0]] * num_missing],
        "settings": law_settings(generation_config),
        "num_proposals": len(proposals),
    }
    checked = copy.copy(config)
    checked.calibration = {**(config.calibration or {}), mode: entry}
    check_calibration(checked)
    config.calibration = checked.calibration
    return fitted
