"""Target and drafter by name or folder; what cannot be loaded ends in one readable line."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from .. import zoo
from .._machine import LOADABLE_DTYPES
from ..configuration_dspark import DSparkConfig
from ..decoding.target_refusals import refuse_target
from ..errors import DSparkError
from ..modeling_dspark import DSparkDraftModel
from .identity import checkpoint_folder
from .results import DrafterKind
from .settings import ComparisonError

logger = logging.getLogger(__name__)

# Seconds the Hub has to say whether it knows a name.
HUB_TIMEOUT_S = 5.0

_Model = TypeVar("_Model", bound=PreTrainedModel)


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter ready to use, what to call it, and where it comes from.

    Attributes:
        folder: That its weights were read from; None for untrained ones.
    """

    model: DSparkDraftModel
    name: str
    kind: DrafterKind
    folder: Path | None = None


def load_target(name: str, dtype: str, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Target, in eval mode, and tokenizer.

    Args:
        name: As for `zoo.resolve`.
        dtype: One of `LOADABLE_DTYPES`; `auto` is the checkpoint's.
        device: A torch device, or `auto`: CUDA where there is one, else the CPU.

    Raises:
        ComparisonError: nothing can be loaded under that name, or an argument is unknown.
        ZooError: as for `zoo.resolve`.
    """
    if dtype not in LOADABLE_DTYPES:
        raise ComparisonError(f"dtype must be one of {', '.join(LOADABLE_DTYPES)}, got {dtype!r}")
    placed_on = _device(device)
    source = _target_source(name)
    with _readable_errors(f"the tokenizer of target {name!r}"):
        tokenizer = zoo.load_tokenizer(source)
    with _readable_errors(f"target {name!r}"):
        target = zoo.load_target(source, dtype)
    return _placed(target, placed_on), tokenizer


def load_as_stored(drafter_name: str, target_name: str | None) -> tuple[DSparkDraftModel, PreTrainedModel | None]:
    """A drafter, and the target if one is named, in the dtypes of their checkpoints, on the CPU.

    Raises:
        ComparisonError: nothing can be loaded under one of the names.
        CheckpointFormatError, DSparkConfigError: the folder holds no drafter that can be read.
        ZooError: as for `zoo.resolve`.
    """
    drafter = _placed(_from_pretrained(drafter_name, "auto"), torch.device("cpu"))
    if target_name is None:
        return drafter, None
    source = _target_source(target_name)
    with _readable_errors(f"target {target_name!r}"):
        return drafter, _placed(zoo.load_target(source, "auto"), torch.device("cpu"))


def load_drafter(
    name: str | None,
    target: PreTrainedModel,
    target_name: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    must_fit: bool = True,
) -> LoadedDrafter:
    """The named drafter; without a name the bundled one of this target, else an untrained one.

    Args:
        must_fit: Whether one that was made for another target is refused.

    Raises:
        ComparisonError: nothing can be loaded under that name, or weights are missing.
        CheckpointFormatError, DSparkConfigError: the folder holds no drafter that can be read.
        IncompatibleTargetError: it was made for another target.
    """
    kind: DrafterKind = "given"
    folder = bundled_drafter(target_name, target.config) if name is None else None
    if folder is not None:
        name, kind = str(folder), "bundled"
    if name is None:
        return LoadedDrafter(untrained_drafter(target, tokenizer, seed), "untrained", "untrained")
    drafter = _placed(_from_pretrained(name, target.dtype), target.device)
    if must_fit:
        refuse_target(target, drafter)
    read_from = folder or checkpoint_folder(name, getattr(drafter.config, "_commit_hash", None))
    return LoadedDrafter(drafter, name if folder is None else f"bundled/{folder.name}", kind, read_from)


def bundled_drafter(target_name: str, target_config: PreTrainedConfig) -> Path | None:
    """Folder of the drafter shipped for a zoo target, or None.

    It is told by the zoo's name or the Hub id of the target, and must have the target's sizes.
    """
    folder = zoo.bundled_drafter(target_name)
    if folder is None:
        return None
    try:
        ours = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    theirs = target_config.get_text_config(decoder=True)
    pairs = {
        "hidden_size": theirs.hidden_size,
        "vocab_size": theirs.vocab_size,
        "num_target_layers": theirs.num_hidden_layers,
    }
    return folder if all(ours.get(key) == value for key, value in pairs.items()) else None


def untrained_drafter(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int) -> DSparkDraftModel:
    """A drafter with random weights: right output, no speed-up; the caller's random state is left as it was."""
    config = DSparkConfig.from_target(target.config, tokenizer=tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = DSparkDraftModel(config)
    return _placed(drafter, target.device, target.dtype)


def _target_source(name: str) -> str:
    """What `from_pretrained` is to load for a target's name."""
    folder = zoo.resolve(name)
    return _available(name, "target") if folder == name else folder


def _from_pretrained(name: str, dtype: torch.dtype | str) -> DSparkDraftModel:
    source = _available(name, "drafter")
    with _readable_errors(f"drafter {name!r}"), _without_load_report():
        loaded: Any = DSparkDraftModel.from_pretrained(source, dtype=dtype, output_loading_info=True)
    model: DSparkDraftModel
    model, info = loaded
    if surplus := sorted(info["unexpected_keys"]):
        logger.warning("drafter %s: %d weights have no place in it, ignored: %s", name, len(surplus), surplus[:3])
    return model


def _placed(model: _Model, device: torch.device, dtype: torch.dtype | None = None) -> _Model:
    """The model, in eval mode, on a device and, when one is given, in another dtype."""
    move: Any = model.to  # mypy takes transformers' wrapper of it for an unbound function
    move(device=device, dtype=dtype)
    return model.eval()


def _available(name: str, role: str) -> str:
    """What `from_pretrained` is to load: a model folder with `~` expanded, or a Hub id that answers.

    transformers would ask the Hub for a folder that is not there, and an absent Hub for a minute.

    Raises:
        ComparisonError: neither; the message says which of them the name looks like.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ComparisonError(f"{role} folder {name!r} has no config.json; pass a model's folder")
        return str(path)
    looks_like_path = name.startswith(("/", ".", "~")) or name.count("/") > 1 or "\\" in name
    if looks_like_path or not name or path.exists():
        raise ComparisonError(f"{role} {name!r} is not a folder; pass an existing folder or a Hub id (owner/name)")
    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # whatever is wrong with the Hub or the name, the way out is one
        raise ComparisonError(
            f"{role} {name!r} is not a folder, and the Hub did not deliver it "
            f"({_first_line(error)}); pass an existing folder or a Hub id (owner/name)"
        ) from error
    return name


@contextmanager
def _readable_errors(what: str) -> Iterator[None]:
    """Turn the many-line messages of what cannot be loaded into one line; ours pass."""
    try:
        yield
    except DSparkError:
        raise
    except Exception as error:  # damaged weights, wrong shapes and foreign classes each have their own kind
        raise ComparisonError(
            f"cannot load {what}: {_first_line(error)} (--debug shows all); pass another folder or Hub id"
        ) from error


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Silence the table that transformers logs about weights; the caller looks at them itself."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ComparisonError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ComparisonError(f"device {device!r} was asked for, and torch sees no CUDA device; use cpu")
    return chosen
