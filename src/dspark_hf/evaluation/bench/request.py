"""What a bench is asked for, and the models that it loads for it."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...checkpoints.digest import checkpoint_facts
from ...fitting.fingerprint import Fingerprint
from ...fitting.measuring import DEFAULT_NUM_REPEATS
from ...prompts import Prompt
from ...training.feature_cache import target_fingerprint
from ..loading import LoadedDrafter, load_drafter, load_target
from ..settings import ComparisonError
from .settings import BenchSettings

DEFAULT_DRAFTER = "drafter"
_POLICY_SETTINGS = ("verification_policy", "confidence_threshold", "min_drafts_every")


@dataclass(frozen=True)
class BenchRequest:
    """What is measured on which models.

    Attributes:
        target: As for `load_target`.
        drafters: Name and folder or Hub id of each; no folder: the drafter shipped for the target, else an untrained
            one. Ways and tables go by the name.
        sibling: Folder or Hub id of a smaller model of the target's family, for assisted generation.
        prompts: Of the main table, and for the sweeps.
        output: Folder of measurements and reports; made if need be.
        swept: Names of the drafters that run in the sweeps; None: the first.
        profile_repeats: Measurements per point of a throughput profile, where none is at hand.

    Raises:
        ComparisonError: a value breaks its rule.
    """

    target: str
    prompts: tuple[Prompt, ...]
    output: Path
    settings: BenchSettings
    drafters: tuple[tuple[str, str | None], ...] = ((DEFAULT_DRAFTER, None),)
    sibling: str | None = None
    swept: tuple[str, ...] | None = None
    dtype: str = "bfloat16"
    device: str = "auto"
    profile_repeats: int = DEFAULT_NUM_REPEATS

    def __post_init__(self) -> None:
        names = [name for name, _ in self.drafters]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ComparisonError(f"two drafters are called {twice[0]!r}; give each a name of its own: NAME=FOLDER")
        for name in names:
            if not name or not name.isprintable() or "," in name:
                raise ComparisonError(f"a drafter's name must be printable and without commas, got {name!r}")
        for name in self.swept or ():
            if name not in names:
                raise ComparisonError(f"swept must be among the drafters' names {', '.join(names)}, got {name!r}")
        if self.profile_repeats < 1:
            raise ComparisonError(f"profile_repeats must be >= 1, got {self.profile_repeats}")

    @property
    def swept_names(self) -> tuple[str, ...]:
        """Drafters that run in the sweeps."""
        return tuple(name for name, _ in self.drafters[:1]) if self.swept is None else self.swept


def parse_drafters(options: Sequence[str]) -> tuple[tuple[str, str | None], ...]:
    """`NAME=FOLDER` or a folder, which is then called by its last part.

    Raises:
        ComparisonError: a name or a folder is missing.
    """
    drafters: list[tuple[str, str | None]] = []
    for option in options:
        name, separator, source = option.partition("=")
        if not separator:
            name, source = Path(option).name, option
        if not name or not source:
            raise ComparisonError(f"drafter must be NAME=FOLDER, a folder or a Hub id, got {option!r}")
        drafters.append((name, source))
    return tuple(drafters) or ((DEFAULT_DRAFTER, None),)


@dataclass(frozen=True)
class BenchModels:
    """Loaded models, in eval mode, on one device."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafters: dict[str, LoadedDrafter]
    sibling: PreTrainedModel | None


def load_models(request: BenchRequest) -> BenchModels:
    """Everything that a request names.

    Raises:
        ComparisonError, CheckpointFormatError, DSparkConfigError, IncompatibleTargetError, ZooError: as for
            `load_target` and `load_drafter`.
    """
    target, tokenizer = load_target(request.target, request.dtype, request.device)
    drafters = {
        name: load_drafter(source, target, request.target, tokenizer, seed=request.settings.seed)
        for name, source in request.drafters
    }
    sibling = None
    if request.sibling is not None:
        sibling, _ = load_target(request.sibling, request.dtype, str(target.device))
    return BenchModels(target, tokenizer, drafters, sibling)


def identity_of(request: BenchRequest, models: BenchModels, encoded: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """All that measurements depend on, for [`CellStore`]."""
    any_drafter = next(iter(models.drafters.values())).model
    own = Fingerprint.of(models.target, any_drafter)
    sibling = models.sibling
    return {
        "target": {"name": request.target, "fingerprint": target_fingerprint(models.target), "dtype": own.dtype},
        "machine": {"device": own.device, "num_threads": own.num_threads, "versions": own.versions},
        "drafters": {name: _identity_of_drafter(one) for name, one in models.drafters.items()},
        "sibling": None if sibling is None else {"name": request.sibling, "fingerprint": target_fingerprint(sibling)},
        "swept": list(request.swept_names),
        "settings": asdict(request.settings),
        "prompts": {
            "number": len(encoded),
            "sha256": _digest(encoded),
        },
    }


def _identity_of_drafter(drafter: LoadedDrafter) -> dict[str, Any]:
    """Its weights, and the settings in its config that rounds depend on and that the checkpoint's digest leaves out."""
    config = drafter.model.config
    calibration = getattr(config, "calibration", None)
    return {
        "sha256": "untrained" if drafter.folder is None else checkpoint_facts(drafter.folder).sha256,
        "calibration": calibration and _digest(calibration),
        **{name: getattr(config, name, None) for name in _POLICY_SETTINGS},
    }


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
