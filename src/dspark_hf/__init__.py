"""DSpark speculative decoding for transformers: `model.generate(**inputs, assistant_model=drafter)`.

Importing this package installs the route (`decoding/route.py`). The pipeline, and where each part lives:

    configuration_dspark   what a drafter is
    modeling_dspark        features and anchor in, hidden states of a block out (parts in model/)
    modeling_autoregressive  baseline drafters, MTP and Eagle3, which draft one token after the other
    decoding/              one round: draft -> calibrate -> schedule -> verify -> accept; the loop and the route
    fitting/               temperatures that make confidences agree with past rounds; what rounds cost on this machine
    training/              answers of a target -> features -> blocks -> losses -> a trained drafter
    evaluation/            plain against speculative generation; drafters against each other
    hub/                   drafters on the Hub: what is fetched, what is pushed, what can go wrong between
    zoo                    a small real target, with or without a Hub
"""

import importlib
import typing

from . import _compat
from ._version import __version__

_compat.check_version()
with _compat.naming_the_version():
    from transformers import AutoConfig, AutoModel

    from .configuration_autoregressive import AutoregressiveConfig
    from .configuration_dspark import DSparkConfig
    from .decoding.candidate_generator import DSparkCandidateGenerator
    from .decoding.report import SpeculationReport, record_speculation
    from .decoding.route import install, uninstall
    from .errors import (
        CalibrationError,
        CheckpointFormatError,
        DSparkConfigError,
        DSparkError,
        HubError,
        IncompatibleTargetError,
        ThroughputProfileError,
        TrainingDataError,
        UnsupportedGenerationError,
        UnsupportedTransformersError,
    )
    from .modeling_autoregressive import AutoregressiveDraftModel
    from .modeling_dspark import DSparkDraftModel

if typing.TYPE_CHECKING:
    from .decoding.drift import watch_drift
    from .evaluation.calibration import calibrate_drafter
    from .evaluation.calibration_request import CalibrationRequest
    from .fitting.proposals import Proposals, record_proposals
    from .fitting.sts import SequentialTemperatureScaling
    from .fitting.throughput import ThroughputProfile
    from .training.recipe import TrainingRequest
    from .training.run import train_drafter
    from .training.settings import DSparkTrainingArguments
    from .training.trainer import DSparkTrainer

__all__ = [
    "AutoregressiveConfig",
    "AutoregressiveDraftModel",
    "CalibrationError",
    "CalibrationRequest",
    "CheckpointFormatError",
    "DSparkCandidateGenerator",
    "DSparkConfig",
    "DSparkConfigError",
    "DSparkDraftModel",
    "DSparkError",
    "DSparkTrainer",
    "DSparkTrainingArguments",
    "HubError",
    "IncompatibleTargetError",
    "Proposals",
    "SequentialTemperatureScaling",
    "SpeculationReport",
    "ThroughputProfile",
    "ThroughputProfileError",
    "TrainingDataError",
    "TrainingRequest",
    "UnsupportedGenerationError",
    "UnsupportedTransformersError",
    "__version__",
    "calibrate_drafter",
    "install",
    "record_proposals",
    "record_speculation",
    "train_drafter",
    "uninstall",
    "watch_drift",
]

# Not needed to generate, or not by every call; transformers' Trainer takes seconds to import.
_ON_DEMAND = {
    "CalibrationRequest": "evaluation.calibration_request",
    "DSparkTrainer": "training.trainer",
    "DSparkTrainingArguments": "training.settings",
    "ThroughputProfile": "fitting.throughput",
    "Proposals": "fitting.proposals",
    "SequentialTemperatureScaling": "fitting.sts",
    "TrainingRequest": "training.recipe",
    "calibrate_drafter": "evaluation.calibration",
    "record_proposals": "fitting.proposals",
    "train_drafter": "training.run",
    "watch_drift": "decoding.drift",
}


def __getattr__(name: str) -> typing.Any:
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_ON_DEMAND[name]}", __name__), name)


AutoConfig.register("dspark", DSparkConfig, exist_ok=True)
AutoModel.register(DSparkConfig, DSparkDraftModel, exist_ok=True)
AutoConfig.register("dspark_autoregressive", AutoregressiveConfig, exist_ok=True)
AutoModel.register(AutoregressiveConfig, AutoregressiveDraftModel, exist_ok=True)
install()
