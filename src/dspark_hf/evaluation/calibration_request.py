"""What `calibrate_drafter` is asked for."""

import math
from dataclasses import dataclass
from pathlib import Path

from .._machine import one_or_more
from ..config_rules import CALIBRATION_MODES
from ..errors import CalibrationError
from ..fitting.sts import MAPS
from .proposals import RecordingSettings


@dataclass(frozen=True)
class CalibrationRequest:
    """What to calibrate, on what.

    Attributes:
        target, drafter: As for `load_target` and `load_drafter`.
        prompts: Sources as for `load_prompt_dataset`, to fit on; a single one may be given without a tuple. Prompts
            that the drafter was trained on mislead: their acceptance is higher than elsewhere.
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
        self._read_lists()
        require(bool(self.prompts), "prompts", self.prompts, "at least one source")
        require(self.maps in MAPS, "maps", self.maps, f"one of {', '.join(MAPS)}")
        known = bool(self.modes) and set(self.modes) <= set(CALIBRATION_MODES)
        require(known, "modes", self.modes, f"some of {', '.join(CALIBRATION_MODES)}")
        require(
            0 < self.temperature < math.inf, "temperature", self.temperature, "above 0; greedy is a mode of its own"
        )
        require(self.top_p is None or 0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        require(self.top_k is None or self.top_k >= 1, "top_k", self.top_k, ">= 1")
        for name in ("num_proposals", "num_held_out_proposals", "max_prompt_tokens", "batch_size"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, ">= 1")
        require(self.max_new_tokens >= 2, "max_new_tokens", self.max_new_tokens, ">= 2, the first needs no draft")
        for name in ("held_out_fraction", "not_trained_fraction"):
            value = getattr(self, name)
            require(value is None or 0 < value < 1, name, value, "inside 0 to 1")

    def _read_lists(self) -> None:
        for name, what in (("prompts", "source"), ("held_out_prompts", "source"), ("modes", "mode")):
            given = getattr(self, name)
            read = one_or_more(given)
            require(read is not None, name, given, f"a {what}, or a list of them")
            object.__setattr__(self, name, read)
        output = one_or_more(self.output)
        require(output is not None and len(output) == 1, "output", self.output, "the path of a folder")
        object.__setattr__(self, "output", Path(self.output))

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


def require(holds: bool, name: str, value: object, rule: str) -> None:
    """Raise CalibrationError unless a value holds its rule."""
    if not holds:
        raise CalibrationError(f"{name} must be {rule}, got {value!r}")
