"""What the confidence head says in a simulated round: as recorded, or wrong by a known factor."""

from typing import Protocol

import torch

from ...decoding.calibrate import SlotCalibration, calibrate
from ...decoding.types import Confidence
from .bank import Floats32, Ints, RoundBank


class Estimates(Protocol):
    """Where a round's confidences come from."""

    def of(self, bank: RoundBank, index: Ints, now_s: float) -> tuple[Floats32, Confidence]:
        """Logits before calibration, float32 `[rows, slots]`, and confidences as policies see them."""
        ...


class RecordedEstimates:
    """As they were recorded."""

    def of(self, bank: RoundBank, index: Ints, now_s: float) -> tuple[Floats32, Confidence]:
        conditional, survival = torch.from_numpy(bank.conditional[index]), torch.from_numpy(bank.survival[index])
        return bank.logits[index], Confidence(conditional, survival)


class DriftingEstimates:
    """From `drift_s` on, the odds of every `c_k` are multiplied by `odds_factor`, until a calibration mends that.

    Attributes:
        calibration: What stands between the head and policies; may be replaced between rounds.
    """

    def __init__(self, odds_factor: float, drift_s: float) -> None:
        self._shift = float(torch.tensor(odds_factor, dtype=torch.float64).log())
        self._drift_s = drift_s
        self.calibration: SlotCalibration | None = None

    def of(self, bank: RoundBank, index: Ints, now_s: float) -> tuple[Floats32, Confidence]:
        logits = bank.logits[index]
        if now_s >= self._drift_s:
            logits = logits + self._shift
        return logits, calibrate(torch.from_numpy(logits), self.calibration)
