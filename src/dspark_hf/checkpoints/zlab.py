"""z-lab's DFlash `config.json`, which SpecForge writes for DFlash too: nested `dflash_config`, fill-in layout."""

from typing import Any

from .fields import agreed, backbone_fields, refuse_value, require_keys

_WHAT = "a DFlash drafter"
# Of successors with other layers or heads.
_OTHER_ARCHITECTURES = ("conv_kernel_size", "conv_group_size", "selector_rank", "emb_dim", "gru_hidden_dim")


def to_dspark(config: dict[str, Any]) -> dict[str, Any]:
    """`DSparkConfig` fields of a DFlash drafter.

    Raises:
        CheckpointFormatError: a key is missing, or describes a drafter of another kind.
    """
    nested = config["dflash_config"]
    for name in _OTHER_ARCHITECTURES:
        if (found := agreed(_WHAT, name, nested, config)) is not None:
            raise refuse_value(_WHAT, name, found, "none: that is a later architecture, which is not supported")
    if nested.get("projector_type") not in (None, "dflash"):
        raise refuse_value(_WHAT, "projector_type", nested["projector_type"], "'dflash' or 'dspark'")
    if agreed(_WHAT, "shift_label", nested, config):
        raise refuse_value(_WHAT, "shift_label", True, "False: slots of a DFlash block predict their own position")
    backbone = backbone_fields(config, _WHAT)
    own = dflash_fields(config, _WHAT)
    if own["block_size"] < 2:
        raise refuse_value(_WHAT, "block_size", own["block_size"], "2 or more, the anchor and what follows")
    return {
        **backbone,
        **own,
        "block_size": own["block_size"] - 1,  # the anchor's slot drafts nothing
        "draft_layout": "fill_in",
        "markov_rank": 0,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
        **target_treatment(config, _WHAT),
    }


def dflash_fields(config: dict[str, Any], what: str) -> dict[str, Any]:
    """What the DFlash family keeps at the top or in `dflash_config`; `block_size` counts the anchor's slot.

    Raises:
        CheckpointFormatError: a key is missing, two places differ, or attention is of another kind.
    """
    nested = config["dflash_config"]
    names = ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers")
    own = {name: agreed(what, name, nested, config) for name in names}
    require_keys(own, names[:3], what)
    if not isinstance(own["block_size"], int) or isinstance(own["block_size"], bool):
        raise refuse_value(what, "block_size", own["block_size"], "a whole number")
    modes = nested.get("attention_modes") or [nested.get("attention_mode") or "gqa"]
    if not isinstance(modes, list) or any(mode not in ("gqa", "mha") for mode in modes):
        raise refuse_value(what, "attention_mode", modes, "'gqa' or 'mha'")
    return own | _causal_fields(config, what)


def _causal_fields(config: dict[str, Any], what: str) -> dict[str, Any]:
    """Sliding layers do not look ahead in the block unless the file says otherwise; windows end with each slot."""
    slides = "sliding_attention" in (config.get("layer_types") or ())
    nested = config["dflash_config"]
    is_causal = agreed(what, "is_causal", config, nested, {"is_causal": nested.get("causal")})
    if is_causal not in (None, True, False):
        raise refuse_value(what, "is_causal", is_causal, "true, false or null")
    causal = "sliding" if is_causal is None and slides else "all" if is_causal else "none"
    return {"window_start": "slot", "causal_layers": causal}


def target_treatment(config: dict[str, Any], what: str) -> dict[str, Any]:
    """How the file says that the target's embedding and head are used, where it does."""
    nested = config["dflash_config"]
    scale = agreed(what, "input_embedding_scale", nested, config)
    if scale not in (None, 1, 1.0):
        raise refuse_value(what, "input_embedding_scale", scale, "1, embeddings as the target gives them")
    multiplier = agreed(what, "output_multiplier", nested, config)
    cap = agreed(what, "final_logit_softcapping", nested, config)
    return {
        **({} if multiplier is None else {"logit_multiplier": multiplier}),
        **({} if not cap else {"final_logit_softcapping": cap}),
    }
