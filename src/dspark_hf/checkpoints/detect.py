"""Recognise a drafter's `config.json` by its content and translate it into `DSparkConfig` fields.

Class names do not decide: several projects use the same ones (`DSparkDraftModel` is also SpecForge's).
"""

from typing import Any

from ..errors import CheckpointFormatError

# Keys that DeepSpec writes and that say nothing about the drafter's computation.
_DEEPSPEC_TRAINING_KEYS = frozenset(
    {
        "architectures",
        "max_window_layers",
        "model_type",
        "num_anchors",
        "use_cache",
        "use_sliding_window",
    }
)


def to_dspark_config_dict(config_dict: dict[str, Any]) -> dict[str, Any]:
    """Translate the dict of a `config.json`; one that is already ours is returned as it is.

    Raises:
        CheckpointFormatError: the file is no drafter's, or of a format that this release does not read.
    """
    if not isinstance(config_dict, dict):
        raise CheckpointFormatError(f"config.json must hold one JSON object, got a {type(config_dict).__name__}")
    if not config_dict or config_dict.get("model_type") == "dspark":
        return config_dict
    found = _name_format(config_dict)
    if found == "DeepSpec":
        return _from_deepspec(config_dict)
    raise CheckpointFormatError(
        f"config.json describes {found} (model_type {config_dict.get('model_type')!r}, architectures "
        f"{config_dict.get('architectures')}); this release reads drafters saved by dspark_hf and Qwen3-flavoured "
        "ones saved by DeepSpec. Pass such a folder or repository as the drafter"
    )


def _name_format(config: dict[str, Any]) -> str:
    if "speculators_model_type" in config or "speculators_config" in config:
        return "a speculators drafter"
    if "dflash_config" in config:
        projector = config["dflash_config"].get("projector_type") if isinstance(config["dflash_config"], dict) else None
        return "a SpecForge drafter" if projector == "dspark" else "a z-lab DFlash drafter (fill-in layout)"
    if "ttt_length" in config:
        return "an Eagle3 drafter"
    if config.get("architectures") == ["DSparkDraftModel"] and "num_target_layers" in config and "qk_norm" in config:
        return 'a drafter of this package without its model_type (add "model_type": "dspark")'
    if "block_size" in config and "target_layer_ids" in config and "mask_token_id" in config:
        return "DeepSpec" if config.get("model_type") == "qwen3" else "a DeepSpec drafter of another flavour"
    return "no drafter"


def _from_deepspec(config: dict[str, Any]) -> dict[str, Any]:
    """DeepSpec's Qwen3 flavour: flat keys, anchor-first, also for its DFlash baseline (rank 0)."""
    if "num_target_layers" not in config:
        raise CheckpointFormatError(
            "config.json of a DeepSpec drafter lacks num_target_layers, so it cannot be matched with a target; "
            "add the number of the target's decoder layers"
        )
    translated = {key: value for key, value in config.items() if key not in _DEEPSPEC_TRAINING_KEYS}
    translated |= {"model_type": "dspark", "draft_layout": "anchor_first", "qk_norm": True}
    if not config.get("markov_rank"):
        # The baseline without a sequential head leaves these two out.
        translated.setdefault("markov_rank", 0)
        translated.setdefault("markov_head_type", "vanilla")
        translated.setdefault("confidence_head_with_markov", False)
    return translated
