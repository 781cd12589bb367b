"""What a drafter copies from its target's config: sizes, RoPE, multipliers, special ids, feature layers, mask id."""

import re
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from .errors import DSparkConfigError

NUM_FEATURE_LAYERS = 5
_DEFAULT_ROPE_THETA = 10_000.0
_DEFAULT_MAX_POSITIONS = 2048  # for targets without a limit of their own (ALiBi)
_RESERVED_TOKEN = re.compile(r"reserved|unused|extra_id|\bmask\b", re.IGNORECASE)


def derive_from_target(
    target_config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    overrides: dict[str, Any],
) -> dict[str, Any]:
    """The `DSparkConfig` fields that follow from a target's config (see `DSparkConfig.from_target`)."""
    if target_config.is_encoder_decoder:
        raise DSparkConfigError(
            f"a {target_config.model_type!r} target is an encoder-decoder; drafters are for decoder-only language "
            "models"
        )
    text = target_config.get_text_config(decoder=True)
    hidden_size = _size(text, "hidden_size", overrides)
    num_layers = overrides.get("num_target_layers") or _size(text, "num_hidden_layers", {})
    num_heads = _size(text, "num_attention_heads", overrides)
    vocab_size = _size(text, "vocab_size", overrides)
    derived: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": _intermediate_size(text, hidden_size),
        "num_attention_heads": num_heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or num_heads,
        "head_dim": getattr(text, "head_dim", None) or hidden_size // num_heads,
        "max_position_embeddings": getattr(text, "max_position_embeddings", None) or _DEFAULT_MAX_POSITIONS,
        "num_target_layers": num_layers,
        "target_layer_ids": spread_target_layers(num_layers),
        "embedding_multiplier": float(getattr(text, "embedding_multiplier", None) or 1.0),
        "logit_multiplier": _logit_multiplier(text),
        "final_logit_softcapping": getattr(text, "final_logit_softcapping", None),
        **{name: getattr(text, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
    }
    if isinstance(eps := getattr(text, "rms_norm_eps", None), float):
        derived["rms_norm_eps"] = eps
    if "rope_parameters" not in overrides:
        derived["rope_parameters"] = _rope_parameters(text)
    if "mask_token_id" not in overrides:
        derived["mask_token_id"] = choose_mask_token_id(vocab_size, tokenizer)
    return derived


def spread_target_layers(num_target_layers: int, num_features: int = NUM_FEATURE_LAYERS) -> list[int]:
    """Feature layers of a target, as the released recipe spreads them: from layer 1 to the third last, evenly.

    36 layers give 1, 9, 17, 25, 33 and 40 layers give 1, 10, 19, 28, 37. Shallow targets have fewer; a target of one
    layer only has its embedding output (-1). The last layer is never used.
    """
    if num_target_layers == 1:
        return [-1]
    count = min(num_features, num_target_layers - 1)
    first, last = 1, num_target_layers - 3
    if last - first + 1 < count:
        first, last = 0, num_target_layers - 2
    if count == 1:
        return [last]
    return [round(first + i * (last - first) / (count - 1)) for i in range(count)]


def choose_mask_token_id(vocab_size: int, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """An id that never occurs in text: a padding row of the embedding, a reserved token, else the last id."""
    if tokenizer is not None:
        first_free = 1 + max(tokenizer.get_vocab().values(), default=-1)
        if first_free < vocab_size:
            return first_free
        reserved = [
            token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if _RESERVED_TOKEN.search(token.content)
        ]
        if reserved:
            return min(reserved)
    return vocab_size - 1


def _size(config: PreTrainedConfig, name: str, overrides: dict[str, Any]) -> int:
    value = overrides.get(name, getattr(config, name, None))
    if not isinstance(value, int) or value < 1:
        raise DSparkConfigError(
            f"the target's config ({config.model_type!r}) has {name}={value!r}, a drafter needs a size >= 1; "
            f"pass the config of a decoder-only language model, or {name}=... yourself"
        )
    return value


def _intermediate_size(text: PreTrainedConfig, hidden_size: int) -> int:
    size = getattr(text, "intermediate_size", None) or 4 * hidden_size
    return max(size) if isinstance(size, list | tuple) else size  # Gemma3n has one per layer


def _rope_parameters(text: PreTrainedConfig) -> dict[str, Any]:
    """The target's RoPE; of a config with one RoPE per layer type, that of full attention."""
    rope = dict(getattr(text, "rope_parameters", None) or {})
    if isinstance(rope.get("full_attention"), dict):
        rope = dict(rope["full_attention"])
    rope.setdefault("rope_type", "default")
    rope["rope_theta"] = float(rope.get("rope_theta") or _DEFAULT_ROPE_THETA)
    if rope["rope_type"] != "proportional":
        # The draft layers turn whole heads, also where the target turns a part of each.
        rope.pop("partial_rotary_factor", None)
    # Sections of M-RoPE tell a picture's rows and columns; the drafter counts tokens.
    for name in ("mrope_section", "mrope_interleaved"):
        rope.pop(name, None)
    return rope


def _logit_multiplier(text: PreTrainedConfig) -> float:
    """Factor between the head's output and the logits that the target's forward returns."""
    if (scale := getattr(text, "logit_scale", None)) is not None:  # Cohere
        return float(scale)
    if (scale := getattr(text, "lm_head_multiplier", None)) is not None:  # Falcon-H1
        return float(scale)
    if (scaling := getattr(text, "logits_scaling", None)) is not None:
        # Granite divides by it, HyperCLOVA X multiplies with the field of the same name.
        return float(scaling) if text.model_type.startswith("hyperclovax") else 1.0 / float(scaling)
    return 1.0
