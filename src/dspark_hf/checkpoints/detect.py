"""Recognise a drafter's `config.json` by its content and translate it into `DSparkConfig` fields.

Class names do not decide: several projects use the same ones (`DSparkDraftModel` is also SpecForge's).
"""

from collections.abc import Callable
from typing import Any

from ..errors import CheckpointFormatError
from .deepspec import MODEL_TYPES as DEEPSPEC_MODEL_TYPES
from .deepspec import to_dspark as from_deepspec
from .deepspec_eagle3 import to_dspark as from_deepspec_eagle3
from .specforge import is_dspark as is_specforges
from .specforge import to_dspark as from_specforge
from .speculators import to_dspark as from_speculators
from .zlab import to_dspark as from_zlab

_OURS = ("dspark", "dspark_autoregressive")
_SPECULATORS_KEYS = ("speculators_model_type", "speculators_config", "transformer_layer_config")
_READABLE = (
    "this release reads drafters saved by dspark_hf, DeepSpec (Qwen3 and Gemma4, and Eagle3 on Qwen3), "
    "speculators (dspark and dflash), SpecForge (DSpark and DFlash) and z-lab DFlash"
)

Translate = Callable[[dict[str, Any]], dict[str, Any]]


def to_dspark_config_dict(config_dict: dict[str, Any]) -> dict[str, Any]:
    """Translate the dict of a `config.json`; one that is already ours is returned as it is.

    Raises:
        CheckpointFormatError: the file is no drafter's, contradicts itself, lacks a field, or is of a format that this
            release does not read.
    """
    if not isinstance(config_dict, dict):
        raise CheckpointFormatError(f"config.json must hold one JSON object, got a {type(config_dict).__name__}")
    is_speculators = any(key in config_dict for key in _SPECULATORS_KEYS)
    nested = config_dict.get("dflash_config")
    if is_speculators and nested is not None:
        raise _unreadable(config_dict, "both a speculators drafter and one with dflash_config")
    if not config_dict or (config_dict.get("model_type") in _OURS and not is_speculators and nested is None):
        return config_dict
    translate = from_speculators if is_speculators else _translation_of(config_dict)
    return translate(config_dict)


def _translation_of(config: dict[str, Any]) -> Translate:
    if "dflash_config" in config:
        nested = config["dflash_config"]
        if not isinstance(nested, dict):
            raise _unreadable(config, f"a drafter whose dflash_config is {nested!r}, no object")
        return from_specforge if is_specforges(config) else from_zlab
    if "ttt_length" in config:
        return from_deepspec_eagle3
    if config.get("architectures") == ["DSparkDraftModel"] and "num_target_layers" in config and "qk_norm" in config:
        raise _unreadable(config, 'a drafter of this package without its model_type (add "model_type": "dspark")')
    if "block_size" in config and "target_layer_ids" in config and "mask_token_id" in config:
        if config.get("model_type") in DEEPSPEC_MODEL_TYPES:
            return from_deepspec
        raise _unreadable(config, "a DeepSpec drafter of another flavour")
    raise _unreadable(config, "no drafter")


def _unreadable(config: dict[str, Any], found: str) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"config.json describes {found} (model_type {config.get('model_type')!r}, architectures "
        f"{config.get('architectures')}); {_READABLE}. Pass such a folder or repository as the drafter"
    )
