"""Stage 2: raw confidence logits to conditional acceptance `c_k` and prefix survival `a_k`."""

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ..configuration_dspark import DSparkConfig
from .types import Confidence

logger = logging.getLogger(__name__)

# generate()'s arguments that shape both laws, with the value at which each does nothing.
_NEUTRAL_WHEN_SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
_NEUTRAL = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0}


@dataclass(frozen=True)
class SlotCalibration:
    """An affine map of each slot's confidence logit: `scale_k * logit + shift_k`.

    Attributes:
        scale: float32 `[slots]`, all positive; `1 / T_k` of sequential temperature scaling.
        shift: float32 `[slots]`; 0 without a Platt map.
    """

    scale: Tensor
    shift: Tensor

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "SlotCalibration":
        """From one mode's entry of `DSparkConfig.calibration`; its Platt maps, if any, stand for the temperatures."""
        if entry.get("platt") is not None:
            scale, shift = zip(*entry["platt"], strict=True)
            return cls(torch.tensor(scale, dtype=torch.float32), torch.tensor(shift, dtype=torch.float32))
        temperatures = torch.tensor(entry["temperatures"], dtype=torch.float32)
        return cls(1.0 / temperatures, torch.zeros_like(temperatures))

    def to(self, device: torch.device) -> "SlotCalibration":
        """The same on another device."""
        return SlotCalibration(self.scale.to(device), self.shift.to(device))


def calibrate(confidence_logits: Tensor | None, calibration: SlotCalibration | None = None) -> Confidence:
    """`c_k = sigmoid(logit_k / T_k)` and `a_k = c_1 * ... * c_k` (paper, section 5).

    The temperature divides the conditional's logit, not the product's, so that `a_k` never rises with k.

    Args:
        confidence_logits: float32 `[rows, slots]`, or None for a drafter without a confidence head.
        calibration: Of at least as many slots, on the same device; None: the logits as they are.
    """
    if confidence_logits is None:
        return Confidence(conditional=None, survival=None)
    if calibration is not None:
        num_slots = confidence_logits.shape[-1]
        confidence_logits = confidence_logits * calibration.scale[:num_slots] + calibration.shift[:num_slots]
    conditional = torch.sigmoid(confidence_logits)
    return Confidence(conditional=conditional, survival=conditional.cumprod(dim=-1))


def calibration_for(config: DSparkConfig, generation_config: GenerationConfig) -> SlotCalibration | None:
    """The drafter's calibration for a call's mode, greedy or sampled; None if it has none.

    Warns once per pair of settings when the call samples under others than the calibration was fitted for: it is
    applied all the same, since output does not depend on it.
    """
    mode = mode_of(generation_config)
    entry = (config.calibration or {}).get(mode)
    if entry is None:
        return None
    used, fitted = law_settings(generation_config), entry["settings"]
    differing = tuple((name, fitted[name], used.get(name)) for name in sorted(fitted) if used.get(name) != fitted[name])
    if differing:
        _warn_of_settings(mode, differing)
    return SlotCalibration.of(entry)


def accepted_shares_for(config: DSparkConfig, generation_config: GenerationConfig) -> list[float] | None:
    """Share of rounds in which each slot was accepted when the drafter was calibrated, for a call's mode."""
    entry = (config.calibration or {}).get(mode_of(generation_config), {})
    shares: list[float] | None = entry.get("share_accepted")
    return shares


def mode_of(generation_config: GenerationConfig) -> str:
    """The mode of a call."""
    return mode_name(bool(generation_config.do_sample))


def mode_name(is_sampled: bool) -> str:
    """`greedy` or `sampled`, the keys of `DSparkConfig.calibration`."""
    return "sampled" if is_sampled else "greedy"


def law_settings(generation_config: GenerationConfig) -> dict[str, float]:
    """What shapes the laws of a call, defaults filled in; of greedy calls without what they do not read."""
    neutral = _NEUTRAL | (_NEUTRAL_WHEN_SAMPLING if generation_config.do_sample else {})
    found = {name: getattr(generation_config, name, None) for name in neutral}
    return {name: neutral[name] if value is None else value for name, value in found.items()}


@functools.cache
def _warn_of_settings(mode: str, differing: tuple[tuple[str, float, float], ...]) -> None:
    """Once per pair of settings: a loop over prompts would repeat it at each call."""
    parts = ", ".join(f"{name} {used} instead of {fitted}" for name, fitted, used in differing)
    logger.warning(
        "the drafter's %s confidence was calibrated under other settings than this call's (%s), so estimates may be "
        "off; output is unaffected. `dspark calibrate` fits it for the settings you use",
        mode,
        parts,
    )
