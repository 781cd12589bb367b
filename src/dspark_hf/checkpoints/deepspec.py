"""DeepSpec's `config.json`: flat keys, anchor-first, in Qwen3 and Gemma4 flavour, also for its DFlash baseline."""

from typing import Any

from .fields import backbone_fields, head_fields, require_keys, rope_parameters, unexpected

MODEL_TYPES = ("qwen3", "gemma4_text")
_WHAT = "a DeepSpec drafter"
_OWN = ("block_size", "target_layer_ids", "mask_token_id", "num_target_layers")


def to_dspark(config: dict[str, Any]) -> dict[str, Any]:
    """`DSparkConfig` fields of a DeepSpec drafter.

    Raises:
        CheckpointFormatError: a key is missing, or describes layers that DeepSpec's drafters do not have.
    """
    require_keys(config, _OWN, _WHAT)
    is_gemma = config["model_type"] == "gemma4_text"
    backbone = _gemma4_backbone(config) if is_gemma else backbone_fields(config, _WHAT)
    kinds = backbone["layer_types"]
    if kinds != ["full_attention"] * len(kinds):
        raise unexpected(_WHAT, "layer_types", kinds, "only 'full_attention', as its training writes")
    return {
        **backbone,
        **{name: config[name] for name in _OWN},
        **head_fields(_WHAT, config),
        "draft_layout": "anchor_first",
    }


def _gemma4_backbone(config: dict[str, Any]) -> dict[str, Any]:
    """Draft layers are Gemma4's full-attention layers: their head size, key heads and RoPE are the "global" ones."""
    what = "a DeepSpec drafter of Gemma4 flavour"
    require_keys(config, ("global_head_dim", "num_key_value_heads", "hidden_activation", "rope_parameters"), what)
    shares = bool(config.get("attention_k_eq_v"))
    for name, wanted in (("enable_moe_block", False), ("hidden_size_per_layer_input", 0)):
        if config.get(name):
            raise unexpected(what, name, config[name], repr(wanted))
    if config.get("use_double_wide_mlp") and config.get("num_kv_shared_layers"):
        raise unexpected(what, "num_kv_shared_layers", config["num_kv_shared_layers"], "0 with use_double_wide_mlp")
    if shares:
        require_keys(config, ("num_global_key_value_heads",), what)
    as_qwen3 = config | {
        "head_dim": config["global_head_dim"],
        "num_key_value_heads": config["num_global_key_value_heads" if shares else "num_key_value_heads"],
        "hidden_act": config["hidden_activation"],
        # The target's; no draft layer slides.
        "sliding_window": None,
    }
    fields = backbone_fields(as_qwen3, what)
    rope = rope_parameters(config, what)
    if rope["rope_type"] == "proportional":
        rope.setdefault("partial_rotary_factor", 1.0)
    return fields | {
        "layer_style": "gemma4",
        "attention_k_eq_v": shares,
        "rope_parameters": rope,
        "final_logit_softcapping": config.get("final_logit_softcapping"),
    }
