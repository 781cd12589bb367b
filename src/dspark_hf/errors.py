"""The errors this package raises on purpose.

    DSparkError
    ├── DSparkConfigError        (ValueError)    a drafter's configuration breaks a rule
    ├── CheckpointFormatError    (ValueError)    a folder is not a drafter we can read
    │   └── OtherDrafterError                    the folder is a drafter of another class
    ├── IncompatibleTargetError  (ValueError)    drafter and target do not belong together
    ├── CalibrationError         (ValueError)    proposals that no calibration can be fitted on
    ├── TrainingDataError        (ValueError)    answers, features or settings that no drafter can be trained from
    ├── ThroughputProfileError   (ValueError)    a throughput profile is damaged, stale, foreign, or asked for too much
    ├── HubError                 (OSError)       the Hub refused, failed, or delivered something broken
    ├── ReportError              (ValueError)    a report or a card that cannot be read, or is of another drafter
    ├── UnsupportedGenerationError (ValueError)  generate() was asked for something speculation cannot do
    └── UnsupportedTransformersError (ImportError) this transformers release cannot host the route

Every message names the value, the rule and the way out. Each class is also the built-in error that a
caller of transformers would expect, so existing `except ValueError` clauses keep working.
"""


class DSparkError(Exception):
    """Base of every error raised on purpose by dspark_hf."""


class DSparkConfigError(DSparkError, ValueError):
    """A field of `DSparkConfig` has a value that no drafter can have."""


class CheckpointFormatError(DSparkError, ValueError):
    """A checkpoint folder is not a drafter, or is one of a format that this release does not read."""


class OtherDrafterError(CheckpointFormatError):
    """A checkpoint is a drafter, of a kind that another class than the one asked for loads.

    Attributes:
        model_type: Of its config.
    """

    def __init__(self, model_type: str, message: str) -> None:
        super().__init__(message)
        self.model_type = model_type


class IncompatibleTargetError(DSparkError, ValueError):
    """Drafter and target differ in something they must share (hidden size, vocabulary, depth)."""


class CalibrationError(DSparkError, ValueError):
    """Recorded proposals, or a setting, that no calibration can be fitted with, or a file that cannot be written."""


class TrainingDataError(DSparkError, ValueError):
    """Training data, a feature cache or a training setting that cannot be used, or a file that cannot be written."""


class ThroughputProfileError(DSparkError, ValueError):
    """A throughput profile is damaged, of another machine, model or version, or was asked beyond what it measured."""


class HubError(DSparkError, OSError):
    """A push or a pull that the Hub refused, that failed on the way, or that delivered something broken."""


class ReportError(DSparkError, ValueError):
    """A report is damaged or of another drafter, or a card would replace a text that is not ours."""


class UnsupportedGenerationError(DSparkError, ValueError):
    """A generate() argument that cannot be combined with a drafter."""


class UnsupportedTransformersError(DSparkError, ImportError):
    """The installed transformers lacks a method or parameter that the route needs."""
