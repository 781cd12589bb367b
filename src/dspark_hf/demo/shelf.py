"""Target and drafters by name, kept between races; what may be loaded, and how large."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from huggingface_hub import HfApi
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import zoo
from ..evaluation.loading import HUB_TIMEOUT_S, load_drafter, load_target, untrained_drafter
from ..evaluation.settings import ComparisonError
from ..modeling_dspark import DSparkDraftModel

# Drafter names that need no download: the one shipped for the target, and one with random weights.
BUNDLED = "bundled"
UNTRAINED = "untrained"

Role: TypeAlias = Literal["target", "drafter"]

DEFAULT_TARGET = "smollm2-135m-instruct"

# What a Space loads unless it says otherwise, besides the drafters that need no download.
SPACE_TARGETS = (DEFAULT_TARGET,)
SPACE_MAX_GB = 4.0

# A target may be stored in either, and a limit must not be got round by the other.
_WEIGHT_SUFFIXES = (".safetensors", ".bin")

# Drafters kept at once; the target is one.
MAX_DRAFTERS = 4

TARGETS_VARIABLE = "DSPARK_DEMO_TARGETS"
DRAFTERS_VARIABLE = "DSPARK_DEMO_DRAFTERS"
MAX_GB_VARIABLE = "DSPARK_DEMO_MAX_GB"


@dataclass(frozen=True)
class Limits:
    """What may be loaded.

    Attributes:
        targets, drafters: Names; None: any, folders included. The bundled drafter and an untrained one always may.
        max_gb: Largest checkpoint, 10^9 bytes of weights; None: any.
    """

    targets: tuple[str, ...] | None = None
    drafters: tuple[str, ...] | None = None
    max_gb: float | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Limits":
        """None on a machine of one's own; on a Space (`SPACE_ID` is set) lists of names and a size.

        `DSPARK_DEMO_TARGETS` and `DSPARK_DEMO_DRAFTERS`, names parted by commas, and `DSPARK_DEMO_MAX_GB` replace the
        Space's own and hold anywhere.

        Raises:
            ComparisonError: the size is no number above 0.
        """
        is_space = "SPACE_ID" in environment
        targets = _names(environment.get(TARGETS_VARIABLE)) or (SPACE_TARGETS if is_space else None)
        drafters = _names(environment.get(DRAFTERS_VARIABLE)) or (() if is_space else None)
        max_gb = SPACE_MAX_GB if is_space else None
        if asked := environment.get(MAX_GB_VARIABLE):
            max_gb = _positive(asked)
        return cls(targets, drafters, max_gb)

    def names(self, role: Role) -> tuple[str, ...] | None:
        """What may be loaded as `role`; None: anything."""
        if role == "target":
            return self.targets
        return None if self.drafters is None else (BUNDLED, UNTRAINED, *self.drafters)

    def check(self, name: str, role: Role) -> None:
        """Raise ComparisonError for what may not be loaded as `role`; asks the Hub for a size at most."""
        names = self.names(role)
        if names is not None and name not in names:
            raise ComparisonError(f"{role} {name!r} may not be loaded here; choose one of {', '.join(names)}")
        if self.max_gb is None:
            return
        size_gb = _size_gb(name, role)
        if size_gb > self.max_gb:
            raise ComparisonError(
                f"{role} {name!r} has {size_gb:.1f} GB of weights, and at most {self.max_gb:g} GB may be loaded here; "
                "choose a smaller one"
            )


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ComparisonError(f"{MAX_GB_VARIABLE} must be a number of gigabytes above 0, got {text!r}")
    return value


def _size_gb(name: str, role: Role) -> float:
    source = Path(zoo.resolve(name)).expanduser()
    if source.is_dir():
        return sum(file.stat().st_size for file in source.iterdir() if file.suffix in _WEIGHT_SUFFIXES) / 1e9
    try:
        info = HfApi().model_info(name, files_metadata=True, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # whatever is wrong with the Hub or the name, the way out is one
        raise ComparisonError(
            f"the Hub did not tell the size of {role} {name!r}; try again, or choose another"
        ) from error
    files = [file for file in info.siblings or () if file.rfilename.endswith(_WEIGHT_SUFFIXES)]
    return sum(file.size or 0 for file in files) / 1e9


class Shelf:
    """Loads what races need, and keeps one target with a few drafters. Used by one race at a time.

    Args:
        dtype, device: As for `evaluation.loading.load_target`.
    """

    def __init__(self, dtype: str = "bfloat16", device: str = "auto", limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._dtype = dtype
        self._device = device
        self._target: tuple[str, PreTrainedModel, PreTrainedTokenizerBase] | None = None
        self._drafters: OrderedDict[str, DSparkDraftModel] = OrderedDict()

    def target(self, name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The named target and its tokenizer; another one leaves memory first.

        Raises:
            ComparisonError, ZooError: it may not, or cannot, be loaded.
        """
        if self._target is None or self._target[0] != name:
            self.limits.check(name, "target")
            self._target = None
            self._drafters.clear()
            self._target = (name, *load_target(name, self._dtype, self._device))
        return self._target[1], self._target[2]

    def holds(self, drafter: str | None, target: str) -> bool:
        """Whether a race with these would load nothing."""
        has_target = self._target is not None and self._target[0] == target
        return has_target and (drafter is None or drafter in self._drafters)

    def drafter(self, name: str, target_name: str) -> DSparkDraftModel:
        """The named drafter for a target.

        Args:
            name: `bundled`, `untrained`, a folder or a Hub id.

        Raises:
            ComparisonError: it may not, or cannot, be loaded.
            CheckpointFormatError, DSparkConfigError: it cannot be read.
            IncompatibleTargetError: it is another target's.
        """
        target, tokenizer = self.target(target_name)
        if name not in self._drafters:
            self._drafters[name] = self._load(name, target_name, target, tokenizer)
            if len(self._drafters) > MAX_DRAFTERS:
                self._drafters.popitem(last=False)
        self._drafters.move_to_end(name)
        return self._drafters[name]

    def _load(
        self, name: str, target_name: str, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> DSparkDraftModel:
        if name == UNTRAINED:
            return untrained_drafter(target, tokenizer, seed=0)
        if name != BUNDLED:
            self.limits.check(name, "drafter")
            return load_drafter(name, target, target_name, tokenizer, seed=0).model
        loaded = load_drafter(None, target, target_name, tokenizer, seed=0)
        if loaded.kind != "bundled":
            raise ComparisonError(
                f"no drafter is shipped for target {target_name!r}; give a drafter's Hub id or folder, or "
                f"{UNTRAINED!r} for one with random weights"
            )
        return loaded.model
