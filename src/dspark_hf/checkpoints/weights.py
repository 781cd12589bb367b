"""Whether a local folder holds a drafter's weights, told before transformers looks: its errors name no way out."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..errors import CheckpointFormatError
from .detect import to_dspark_config_dict
from .json_files import LARGEST_CONFIG_BYTES, LARGEST_INDEX_BYTES, read_json_object

CONFIG_NAME = "config.json"
INDEX_SUFFIX = ".safetensors.index.json"
_DTYPES = frozenset({"bfloat16", "float16", "float32", "float64"})
# Files that make transformers load something else than the drafter beside them.
_ADAPTER_CONFIG = "adapter_config.json"
_DISTRIBUTED_SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")

# Modules that a drafter computes with; weights of theirs that have no place are part of another computation.
_COMPUTED = ("fc.", "hidden_norm.", "layers.", "norm.", "markov_head.", "confidence_head.", "logit_head.")


def is_hub_id(name: str) -> bool:
    """Whether a name that is no folder can be an id on the Hub: `name` or `organisation/name`."""
    return bool(name) and not Path(name).is_absolute() and not name.startswith((".", "~")) and name.count("/") <= 1


def weights_name(variant: str | None) -> str:
    """File name of unsharded weights."""
    return f"model.{variant}.safetensors" if variant else "model.safetensors"


def index_name(variant: str | None) -> str:
    """File name of the index of sharded weights."""
    return f"model{INDEX_SUFFIX[:-5]}.{variant}.json" if variant else f"model{INDEX_SUFFIX}"


def check_weights_in(folder: Path, subfolder: str = "", variant: str | None = None) -> None:
    """Raise for a folder that is not there, without readable config, or without safetensors.

    Raises:
        CheckpointFormatError: what is missing or broken, and the way out.
    """
    if not folder.is_dir():
        raise CheckpointFormatError(f"{folder} is not a folder; pass a drafter's folder, or its id on the Hub")
    inner = folder / subfolder
    if (inner / _ADAPTER_CONFIG).exists():
        raise CheckpointFormatError(
            f"{inner} holds {_ADAPTER_CONFIG}, and transformers would load an adapter into the drafter; remove it, or "
            "merge the adapter and save the drafter again"
        )
    config = inner / CONFIG_NAME
    if not config.is_file():
        return  # reported where the config is read
    check_config_content(read_json_object(config, LARGEST_CONFIG_BYTES), str(config))
    distributed = sorted(path.name for path in inner.iterdir() if _DISTRIBUTED_SHARD.match(path.name))
    if distributed:
        raise CheckpointFormatError(
            f"{inner} holds a distributed checkpoint ({distributed[0]}), which is not read; save the drafter with "
            "save_pretrained"
        )
    if not weight_files(inner, variant):
        pickles = sorted(path.name for path in inner.glob("*.bin"))
        raise CheckpointFormatError(
            f"{inner} has no weights in safetensors, only {pickles[0]}, and a pickle may run any code; save it again "
            "with save_pretrained(), or pass use_safetensors=False if you trust it"
            if pickles
            else f"{inner} has a config.json and no {weights_name(variant)}; download it again, with its weights"
        )


def check_config_content(content: dict[str, Any], source: str) -> None:
    """Raise for a config of another format, or one that sends transformers to another file.

    Raises:
        CheckpointFormatError: as said.
    """
    if "configuration_files" in content:
        raise CheckpointFormatError(
            f"{source} names other files to be read instead (configuration_files), which no drafter's does; remove "
            "that key, or download the drafter from another source"
        )
    to_dspark_config_dict(content)


def check_dtype(value: object, source: str) -> None:
    """Raise CheckpointFormatError unless a file's dtype is one that a drafter's weights can have, or None."""
    name = str(value).removeprefix("torch.")
    if value is not None and name not in _DTYPES:
        raise CheckpointFormatError(
            f"dtype in {source} must be one of {', '.join(sorted(_DTYPES))}, got {value!r}; correct it, or download "
            "the drafter again"
        )


def check_quantization(value: object, source: str) -> None:
    """Raise CheckpointFormatError unless a file's quantization_config says what it is of, or is None."""
    if value is not None and not (isinstance(value, dict) and isinstance(value.get("quant_method"), str)):
        raise CheckpointFormatError(
            f"quantization_config in {source} must be an object with a quant_method, got {value!r:.100}; remove it, or "
            "save the drafter again"
        )


def weight_files(folder: Path, variant: str | None = None) -> list[Path]:
    """The safetensors files that transformers reads in a folder, in order; none where there are no weights.

    Raises:
        CheckpointFormatError: the index is broken, leads out of the folder, or names a file that is missing.
    """
    whole, index = folder / weights_name(variant), folder / index_name(variant)
    if whole.is_file():
        return [whole]
    if not index.is_file():
        return []
    names = shard_names(read_json_object(index, LARGEST_INDEX_BYTES), str(index))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointFormatError(
            f"{index} names {len(missing)} files that are not there, among them {missing[0]}; download the drafter "
            "again"
        )
    return [folder / name for name in names]


def shard_names(index: dict[str, Any], source: str) -> list[str]:
    """Files that the index of sharded weights names, in order.

    Raises:
        CheckpointFormatError: it is no index, or names anything but safetensors files beside itself.
    """
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not isinstance(index.get("metadata"), dict):
        raise CheckpointFormatError(
            f"{source} has no weight_map from weights to files, or no metadata; download the drafter again"
        )
    check_dtype(index["metadata"].get("dtype"), source)
    names = list(weight_map.values())
    for name in names:
        if not isinstance(name, str) or not _is_plain_file_name(name) or not name.endswith(".safetensors"):
            raise CheckpointFormatError(
                f"{source} names {name!r}, and may only name .safetensors files beside itself; download the drafter "
                "from another source"
            )
    return sorted(set(names))


def _is_plain_file_name(name: str) -> bool:
    # Also what another system takes for a separator or a drive.
    return name == os.path.basename(name) and not set(name) & {"/", "\\", ":", "\0"} and not name.startswith(".")


def check_draft_vocabulary(source: str, files: Iterable[Path]) -> None:
    """Raise where the two stored forms of a draft vocabulary, a mask and offsets, name different tokens.

    Args:
        source: What to call the checkpoint.
        files: Its weights, whose headers were read.

    Raises:
        CheckpointFormatError: as said.
    """
    stored: dict[str, torch.Tensor] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            stored |= {name: file.get_tensor(name) for name in ("t2d", "d2t") if name in file.keys()}  # noqa: SIM118
    if len(stored) < 2:
        return
    mask, offsets = stored["t2d"], stored["d2t"]
    is_flat = mask.ndim == offsets.ndim == 1
    if not is_flat or (offsets + torch.arange(len(offsets))).tolist() != mask.nonzero().flatten().tolist():
        raise CheckpointFormatError(
            f"{source} contradicts itself: t2d marks {int(mask.sum())} tokens, and d2t names {offsets.numel()}, which "
            "are not the same; expected one draft vocabulary. Download it again"
        )


def check_leftovers(name: str, surplus: Iterable[str]) -> None:
    """Raise where stored weights without a place say that the config describes another drafter than the weights.

    Args:
        surplus: Names of those weights.

    Raises:
        CheckpointFormatError: a reduced draft vocabulary, a head or a layer that the config does not know of.
    """
    if "d2t" in surplus:
        raise CheckpointFormatError(
            f"{name} has a reduced draft vocabulary (d2t) that its config.json does not mention; add draft_vocab_size "
            "there, the length of d2t"
        )
    computed = sorted(key for key in surplus if key.startswith(_COMPUTED))
    if computed:
        raise CheckpointFormatError(
            f"{name} holds {len(computed)} weights that a drafter as its config.json describes it does not have, among "
            f"them {computed[:3]}; without them it would draft something else. Expected only weights of the described "
            "layers and heads: correct config.json, or download the drafter again"
        )
