"""What the formats share: fields of the backbone, and how contradictions and gaps are told."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import CheckpointFormatError
from ..layer_rules import SLIDING

# Shape and arithmetic of the draft layers, under the same names everywhere.
_BACKBONE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
)
_BACKBONE_IF_GIVEN = (
    "hidden_act",
    "attention_bias",
    "attention_dropout",
    "initializer_range",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
_HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")


def require_keys(config: Mapping[str, Any], names: Iterable[str], what: str) -> None:
    """Raise CheckpointFormatError for the names that `config` lacks, or has as null."""
    missing = [name for name in names if config.get(name) is None]
    if missing:
        raise CheckpointFormatError(
            f"config.json of {what} lacks {missing}; guessed values would draft nonsense without an "
            "error. Add them as they were in training, or download the file again"
        )


def unexpected(what: str, name: str, found: Any, expected: str) -> CheckpointFormatError:
    """The error for a value that no drafter of this format has, or none that is supported."""
    return CheckpointFormatError(
        f"config.json of {what} has {name} {found!r:.200}, expected {expected}; pass another drafter, or correct the "
        "file"
    )


def agreed(what: str, name: str, *places: Mapping[str, Any]) -> Any:
    """The value of `name`, which may stand in several places; None: in none of them.

    Raises:
        CheckpointFormatError: two places say different things.
    """
    found = [place[name] for place in places if place.get(name) is not None]
    others = [value for value in found[1:] if value != found[0]]
    if others:
        raise CheckpointFormatError(
            f"config.json of {what} contradicts itself: it gives {name} as {found[0]!r:.200} and as "
            f"{others[0]!r:.200}; expected one value. Correct the file"
        )
    return found[0] if found else None


def backbone_fields(config: Mapping[str, Any], what: str) -> dict[str, Any]:
    """`DSparkConfig` fields of a Qwen3-style backbone; layer types and RoPE included.

    Raises:
        CheckpointFormatError: a field is missing or contradicts another.
    """
    require_keys(config, _BACKBONE, what)
    given = {name: config[name] for name in _BACKBONE_IF_GIVEN if config.get(name) is not None}
    dtype = config.get("dtype") or config.get("torch_dtype")
    return {
        "model_type": "dspark",
        **{name: config[name] for name in _BACKBONE},
        **given,
        **({} if dtype is None else {"dtype": dtype}),
        "qk_norm": True,
        "rope_parameters": rope_parameters(config, what),
        **layer_fields(config, what),
    }


def rope_parameters(config: Mapping[str, Any], what: str) -> dict[str, Any]:
    """RoPE of the draft layers, from new and old names.

    Raises:
        CheckpointFormatError: there is no `rope_theta`, or there are two.
    """
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise unexpected(what, "rope_parameters", found, "an object")
    # One RoPE for each kind of layer: draft layers attend fully. What stands beside them is a default of the writer's.
    per_kind = found.get("full_attention")
    chosen = per_kind if isinstance(per_kind, dict) else found
    rope = {key: value for key, value in chosen.items() if value is not None}
    rope.setdefault("rope_type", rope.pop("type", "default"))  # its old name
    theta = agreed(what, "rope_theta", rope, {} if isinstance(per_kind, dict) else config)
    if not isinstance(theta, int | float) or isinstance(theta, bool) or not abs(theta) <= sys.float_info.max:
        raise unexpected(what, "rope_theta", theta, "a number, at the top or in rope_parameters")
    return rope | {"rope_theta": float(theta)}


def layer_fields(config: Mapping[str, Any], what: str) -> dict[str, Any]:
    """`layer_types` and `sliding_window`, as transformers' Qwen3 config understands them.

    Raises:
        CheckpointFormatError: there are sliding layers without a window.
    """
    num_layers, kinds, window = config["num_hidden_layers"], config.get("layer_types"), config.get("sliding_window")
    if kinds is None:
        first = config.get("max_window_layers", num_layers) if config.get("use_sliding_window") else num_layers
        if not isinstance(num_layers, int) or not isinstance(first, int) or not 0 <= num_layers <= 1000:
            raise unexpected(what, "num_hidden_layers", num_layers, "a number of draft layers")
        kinds = [SLIDING if window is not None and i >= first else "full_attention" for i in range(num_layers)]
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise unexpected(what, "layer_types", kinds, "a list of names")
    if SLIDING not in kinds:
        return {"layer_types": kinds, "sliding_window": None}
    if window is None or config.get("use_sliding_window") is False:
        raise CheckpointFormatError(
            f"config.json of {what} contradicts itself: layer_types has sliding layers, and sliding_window is {window} "
            f"with use_sliding_window {config.get('use_sliding_window')}; expected a window. Correct the file"
        )
    return {"layer_types": kinds, "sliding_window": window}


def head_fields(what: str, *places: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of sequential and confidence head, at the top or nested.

    Raises:
        CheckpointFormatError: one that is needed is missing, or two places differ.
    """
    found = {name: agreed(what, name, *places) for name in _HEADS}
    rank = found["markov_rank"] or 0
    defaults: dict[str, Any] = {"markov_rank": 0}
    if not rank:  # such files leave out what there is none of
        defaults |= {"markov_head_type": "vanilla", "confidence_head_with_markov": False}
    if found["enable_confidence_head"] is False:
        defaults |= {"confidence_head_with_markov": False}
    fields = {name: defaults.get(name) if value is None else value for name, value in found.items()}
    require_keys(fields, _HEADS, what)
    return fields
