"""speculators' `config.json`, dspark and dflash: nested `transformer_layer_config`, direct hidden-state indices."""

import functools
import logging
from typing import Any

from .fields import backbone_fields, head_fields, require_keys, unexpected

logger = logging.getLogger(__name__)

_WHAT = "a speculators drafter"
_OWN = ("block_size", "mask_token_id", "aux_hidden_state_layer_ids", "draft_vocab_size", "transformer_layer_config")


def to_dspark(config: dict[str, Any]) -> dict[str, Any]:
    """`DSparkConfig` fields of a speculators drafter; a file that does not say its layout is read as fill-in.

    Raises:
        CheckpointFormatError: a key is missing, or describes a drafter of another kind.
    """
    kind = config.get("speculators_model_type")
    if kind not in ("dspark", "dflash"):
        raise unexpected(_WHAT, "speculators_model_type", kind, "'dspark' or 'dflash'")
    require_keys(config, _OWN, _WHAT)
    layers = config["transformer_layer_config"]
    if not isinstance(layers, dict):
        raise unexpected(_WHAT, "transformer_layer_config", layers, "an object")
    if config.get("projector_type", "dflash") != "dflash":
        raise unexpected(_WHAT, "projector_type", config["projector_type"], "'dflash'")
    fields = backbone_fields(layers, _WHAT)
    fields |= {"dtype": config["dtype"]} if config.get("dtype") else {}
    _check_hidden_size(config, fields["hidden_size"])
    is_anchor_first = _is_anchor_first(config, kind)
    num_tokens = config["block_size"]
    if not isinstance(num_tokens, int) or isinstance(num_tokens, bool) or num_tokens < 2 - is_anchor_first:
        raise unexpected(_WHAT, "block_size", num_tokens, "a whole number, 2 or more where the anchor drafts nothing")
    return {
        **fields,
        "block_size": num_tokens if is_anchor_first else num_tokens - 1,
        "draft_layout": "anchor_first" if is_anchor_first else "fill_in",
        "mask_token_id": config["mask_token_id"],
        "target_layer_ids": _layer_ids(config["aux_hidden_state_layer_ids"]),
        "num_target_layers": None,  # the format does not say
        "draft_vocab_size": _draft_vocab_size(config["draft_vocab_size"], fields["vocab_size"]),
        **_heads(config, kind),
        **_windows(config, fields["sliding_window"]),
    }


def _check_hidden_size(config: dict[str, Any], hidden_size: int) -> None:
    if config.get("target_hidden_size") not in (None, hidden_size):
        found = config["target_hidden_size"]
        raise unexpected(_WHAT, "target_hidden_size", found, f"{hidden_size}, the width of its own layers")


def _is_anchor_first(config: dict[str, Any], kind: str) -> bool:
    if isinstance(said := config.get("sample_from_anchor"), bool):
        return said
    if said is not None:
        raise unexpected(_WHAT, "sample_from_anchor", said, "true or false")
    if kind == "dspark":
        _warn_of_layout(str(config.get("speculators_version")))
    return False


@functools.cache
def _warn_of_layout(version: str) -> None:
    """Once per version: reading a config is done more than once."""
    logger.warning(
        'the drafter\'s config.json (speculators %s) does not say "sample_from_anchor"; it is read as one from '
        "before that key, whose blocks are filled in behind the anchor. If next to nothing is accepted, it was trained "
        'the other way: add "sample_from_anchor": true to the file',
        version,
    )


def _layer_ids(indices: Any) -> list[int]:
    """Decoder layers of indices into the target's hidden states, whose first is the embedding."""
    if not isinstance(indices, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in indices):
        raise unexpected(_WHAT, "aux_hidden_state_layer_ids", indices, "a list of whole numbers")
    return [index - 1 for index in indices]


def _draft_vocab_size(draft: Any, whole: int) -> int | None:
    return None if draft == whole else draft


def _heads(config: dict[str, Any], kind: str) -> dict[str, Any]:
    if kind == "dflash":
        return head_fields(_WHAT, {"markov_rank": 0, "enable_confidence_head": False})
    return head_fields(_WHAT, config)


def _windows(config: dict[str, Any], sliding_window: int | None) -> dict[str, Any]:
    """Every slot sees the window before the anchor; sliding layers do not look ahead unless the file says so."""
    if sliding_window is None:
        return {}
    looks_ahead = bool(config.get("sliding_window_non_causal"))
    return {"window_start": "anchor", "causal_layers": "none" if looks_ahead else "sliding"}
