"""DSpark speculative decoding for transformers: `model.generate(**inputs, assistant_model=drafter)`.

Importing this package installs the route (`decoding/route.py`). The pipeline, and where each part lives:

    configuration_dspark   what a drafter is
    modeling_dspark        features and anchor in, hidden states of a block out (parts in model/)
    decoding/              one round: draft -> calibrate -> schedule -> verify -> accept; the loop and the route
    zoo                    a small real target, with or without a Hub
"""

from transformers import AutoConfig, AutoModel

from ._version import __version__
from .configuration_dspark import DSparkConfig
from .decoding.candidate_generator import DSparkCandidateGenerator
from .decoding.report import SpeculationReport, record_speculation
from .decoding.route import install, uninstall
from .errors import (
    CheckpointFormatError,
    DSparkConfigError,
    DSparkError,
    IncompatibleTargetError,
    UnsupportedGenerationError,
    UnsupportedTransformersError,
)
from .modeling_dspark import DSparkDraftModel

__all__ = [
    "CheckpointFormatError",
    "DSparkCandidateGenerator",
    "DSparkConfig",
    "DSparkConfigError",
    "DSparkDraftModel",
    "DSparkError",
    "IncompatibleTargetError",
    "SpeculationReport",
    "UnsupportedGenerationError",
    "UnsupportedTransformersError",
    "__version__",
    "install",
    "record_speculation",
    "uninstall",
]

AutoConfig.register("dspark", DSparkConfig, exist_ok=True)
AutoModel.register(DSparkConfig, DSparkDraftModel, exist_ok=True)
install()
