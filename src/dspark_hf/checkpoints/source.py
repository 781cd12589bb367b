"""From the name of a drafter to a folder that may be loaded: fetched if need be, and judged before it is read."""

import re
from collections.abc import MutableMapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers import initialization as init

from ..errors import CheckpointFormatError
from ..hub.fetch import HUB_OPTIONS, HubSource
from .headers import StoredTensor, check_stored, read_headers
from .json_files import LARGEST_CONFIG_BYTES, read_json_object
from .specforge import LEGACY_KEYS
from .weights import (
    CONFIG_NAME,
    check_config_content,
    check_draft_vocabulary,
    check_weights_in,
    is_hub_id,
    weight_files,
)

# Besides its own weights a checkpoint may hold copies of the target's embedding and head, and a header.
_SPARE_BYTES = 64 * 2**20
_MOST_BYTES_PER_NUMBER = 8
_MOST_NUMBERS_PER_BYTE = 8  # of quantised weights: one bit each


def checked_folder(model_class: Any, name: str, kwargs: MutableMapping[str, Any]) -> str:
    """The folder from which `model_class.from_pretrained` may load the drafter `name`; nothing is allocated yet.

    Args:
        model_class: `DSparkDraftModel` or a subclass.
        name: Folder or Hub id.
        kwargs: Of `from_pretrained`; what says where on the Hub to look is taken out once that was followed.

    Raises:
        CheckpointFormatError, DSparkConfigError: it is no drafter, or one that may not be loaded.
        HubError: it cannot be fetched.
    """
    folder, subfolder, variant = Path(name), kwargs.get("subfolder") or "", kwargs.get("variant")
    if not folder.is_dir() and is_hub_id(name):

        def largest_weights(there: Path) -> int:
            return _largest_bytes(_skeleton(model_class, there, "", kwargs))

        folder = _hub_source(name, kwargs).fetch(variant, largest_weights)
        _forget_hub(kwargs)
        subfolder = ""
    check_weights_in(folder, subfolder, variant)
    if not (folder / subfolder / CONFIG_NAME).is_file():
        return str(folder)  # the config's own error says more
    skeleton = _skeleton(model_class, folder, subfolder, kwargs)
    files = weight_files(folder / subfolder, variant)
    stored = read_headers(map(str, files))
    if getattr(skeleton.config, "quantization_config", None) is not None:
        _check_quantised(name, skeleton, files)
    else:
        check_stored(name, skeleton.state_dict(), _by_our_names(stored, model_class.base_model_prefix))
    check_draft_vocabulary(name, files)
    return str(folder)


def checked_config(name: str, kwargs: MutableMapping[str, Any]) -> str:
    """The folder or file whose config `get_config_dict(name, **kwargs)` may read: fetched if need be, bounded, whole.

    Raises:
        CheckpointFormatError, HubError: as for [`checked_folder`].
    """
    path = Path(name)
    if path.is_dir():
        path = path / (kwargs.get("subfolder") or "") / CONFIG_NAME
    elif not path.is_file() and is_hub_id(name):
        config = _hub_source(name, kwargs).fetch_config()
        _forget_hub(kwargs)
        return str(config.parent)
    if path.is_file():
        check_config_content(read_json_object(path, LARGEST_CONFIG_BYTES), str(path))
    return name


def _hub_source(name: str, kwargs: MutableMapping[str, Any]) -> HubSource:
    options = {key: kwargs[key] for key in HUB_OPTIONS if kwargs.get(key) is not None}
    return HubSource(name, kwargs.get("revision"), kwargs.get("subfolder") or "", options)


def _forget_hub(kwargs: MutableMapping[str, Any]) -> None:
    for key in ("revision", "subfolder", "force_download"):
        kwargs.pop(key, None)


def _skeleton(model_class: Any, folder: Path, subfolder: str, kwargs: MutableMapping[str, Any]) -> Any:
    """The drafter with shapes and without numbers."""
    config = kwargs.get("config")
    if not isinstance(config, PreTrainedConfig):
        config = model_class.config_class.of_folder(Path(config or folder), subfolder, kwargs)
    no_init = getattr(init, "no_init_weights", nullcontext)  # only saves time
    with torch.device("meta"), no_init():
        return model_class(config)


def _largest_bytes(skeleton: Any) -> int:
    """More than the weights of any such drafter take on disk."""
    config = skeleton.config
    num_numbers = _num_numbers(skeleton) + 2 * config.vocab_size * config.hidden_size
    return _SPARE_BYTES + _MOST_BYTES_PER_NUMBER * num_numbers


def _check_quantised(name: str, skeleton: Any, files: list[Path]) -> None:
    """Names and shapes of quantised weights are their quantiser's; the size bounds what may be allocated."""
    num_bytes = sum(file.stat().st_size for file in files)
    if _num_numbers(skeleton) > _MOST_NUMBERS_PER_BYTE * num_bytes:
        raise CheckpointFormatError(
            f"{name} has {num_bytes} bytes of weights, and its config.json describes a drafter of "
            f"{_num_numbers(skeleton)} numbers; correct it, or download the drafter again"
        )


def _num_numbers(skeleton: Any) -> int:
    weights: dict[str, Tensor] = skeleton.state_dict()
    return sum(weight.numel() for weight in weights.values())


def _by_our_names(stored: dict[str, StoredTensor], prefix: str) -> dict[str, StoredTensor]:
    """As transformers will name them: without the model's prefix, heads outside of early files' container."""
    named = {}
    for name, tensor in stored.items():
        name = name.removeprefix(f"{prefix}.")
        for pattern, ours in LEGACY_KEYS.items():
            name = re.sub(pattern, ours, name)
        named[name] = tensor
    return named
