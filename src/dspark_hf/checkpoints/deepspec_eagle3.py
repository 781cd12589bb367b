"""DeepSpec's `config.json` of an Eagle3 drafter: flat keys, no block size, no mask token, head and embedding stored."""

from typing import Any

from .fields import agreed, backbone_fields, require_keys, unexpected

MODEL_TYPES = ("qwen3",)
_WHAT = "a DeepSpec Eagle3 drafter"
_OWN = ("ttt_length", "target_layer_ids", "num_target_layers")


def to_dspark(config: dict[str, Any]) -> dict[str, Any]:
    """`AutoregressiveConfig` fields of a DeepSpec Eagle3 drafter.

    Raises:
        CheckpointFormatError: a key is missing, or describes layers that are not supported.
    """
    require_keys(config, _OWN, _WHAT)
    if config.get("model_type") not in MODEL_TYPES:
        raise unexpected(_WHAT, "model_type", config.get("model_type"), f"one of {MODEL_TYPES}")
    depths = {"num_hidden_layers": config.get("draft_num_hidden_layers")}
    num_layers = agreed(_WHAT, "num_hidden_layers", config, depths)
    if num_layers != 1:
        raise unexpected(_WHAT, "num_hidden_layers", num_layers, "1")
    return {
        **backbone_fields(config, _WHAT),
        "model_type": "dspark_autoregressive",
        "drafter_type": "eagle3",
        "block_size": config["ttt_length"],
        "target_layer_ids": config["target_layer_ids"],
        "num_target_layers": config["num_target_layers"],
        "draft_vocab_size": config.get("draft_vocab_size"),
        "calibration": None,
    }
