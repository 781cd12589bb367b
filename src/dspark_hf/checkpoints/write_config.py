"""`config.json` of other projects for a drafter of ours, and what such a file cannot say."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..configuration_dspark import DSparkConfig
from ..errors import CheckpointFormatError
from ..layer_rules import SLIDING

_LAYERS = (
    "attention_bias",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "pad_token_id",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_window",
    "vocab_size",
)
_HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
# What serves generate() here and has no place in any other project's file.
_OURS_ALONE = ("calibration", "confidence_threshold", "min_drafts_every", "verification_policy")
# Anchors of a sequence in training; DeepSpec's class wants the key.
_NUM_ANCHORS = 512
_SPECULATORS_VERSION = "0.9.0"  # whose layout of keys is written


@dataclass(frozen=True)
class TargetNote:
    """What a file says about the target.

    Attributes:
        name: Folder or Hub id under which the serving engine finds it.
        architectures: Of its config.
    """

    name: str
    architectures: tuple[str, ...]


def left_out(config: DSparkConfig, to: str) -> list[str]:
    """Fields that a written file does not hold, where they are not the default; no draft depends on them."""
    defaults = {name: getattr(DSparkConfig, name) for name in _OURS_ALONE}
    lost = [name for name, default in defaults.items() if getattr(config, name) != default]
    return lost + (["num_target_layers"] if to == "speculators" and config.num_target_layers is not None else [])


def config_for(config: DSparkConfig, to: str, dtype: str, target: TargetNote | None) -> dict[str, Any]:
    """The content of another project's `config.json`.

    Args:
        to: One of `WRITERS`.
        dtype: Of the stored weights, e.g. `bfloat16`.
        target: Needed by speculators.

    Raises:
        CheckpointFormatError: the format cannot express this drafter.
    """
    return {**WRITERS[to](config, target), "dtype": dtype}


def _deepspec(config: DSparkConfig, target: TargetNote | None) -> dict[str, Any]:
    _refuse(config, "deepspec")
    is_gemma = config.layer_style == "gemma4"
    own = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "num_anchors": _NUM_ANCHORS,
        "num_target_layers": config.num_target_layers,
        "target_layer_ids": config.target_layer_ids,
        **_heads(config),
    }
    return (_gemma4_layers(config) if is_gemma else _qwen3_layers(config) | _named("Qwen3DSparkModel")) | own


def _gemma4_layers(config: DSparkConfig) -> dict[str, Any]:
    fields = {name: getattr(config, name) for name in _LAYERS if name not in ("hidden_act", "rope_parameters")}
    return {
        **fields,
        **_named("Gemma4DSparkModel"),
        "attention_k_eq_v": config.attention_k_eq_v,
        "enable_moe_block": False,
        "final_logit_softcapping": config.final_logit_softcapping,
        "global_head_dim": config.head_dim,
        "hidden_activation": config.hidden_act,
        "hidden_size_per_layer_input": 0,
        "model_type": "gemma4_text",
        "num_global_key_value_heads": config.num_key_value_heads,
        "num_kv_shared_layers": 0,
        "rope_parameters": {"full_attention": dict(config.rope_parameters)},
        "target_model_type": "gemma4",
        "target_text_model_type": "gemma4_text",
        "tie_word_embeddings": False,
        "use_double_wide_mlp": False,
    }


def _speculators(config: DSparkConfig, target: TargetNote | None) -> dict[str, Any]:
    _refuse(config, "speculators")
    slides = SLIDING in (config.layer_types or ())
    assert target is not None, "the caller asks for the target's name"
    is_anchor_first = config.draft_layout == "anchor_first"
    is_dflash = not (is_anchor_first or config.markov_rank or config.enable_confidence_head)
    kind = "dflash" if is_dflash else "dspark"
    greedy = {"proposal_type": "greedy", "speculative_tokens": config.block_size}
    return {
        "architectures": ["DFlashDraftModel" if is_dflash else "DSparkDraftModel"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "block_size": config.num_block_tokens,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": is_anchor_first,
        "sliding_window_non_causal": slides and config.causal_layers == "none",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": target.name, "architectures": list(target.architectures)},
        },
        "speculators_model_type": kind,
        "speculators_version": _SPECULATORS_VERSION,
        "tie_word_embeddings": False,
        "transformer_layer_config": _qwen3_layers(config),
        **({} if is_dflash else _heads(config)),
    }


def _specforge(config: DSparkConfig, target: TargetNote | None) -> dict[str, Any]:
    _refuse(config, "specforge")
    fills_in = config.draft_layout == "fill_in"
    slides = SLIDING in (config.layer_types or ())
    nested: dict[str, Any] = {"mask_token_id": config.mask_token_id, "target_layer_ids": config.target_layer_ids}
    common = _qwen3_layers(config) | {
        "block_size": config.num_block_tokens,
        "num_target_layers": config.num_target_layers,
        "is_causal": {"all": True, "sliding": None, "none": False if slides else None}[config.causal_layers],
    }
    if fills_in:
        return common | _named("DFlashDraftModel") | {"dflash_config": nested}
    nested |= {"projector_type": "dspark", "attention_mode": "gqa", **_heads(config)}
    # As its export for serving writes it: the heads' keys at the top as well.
    return common | _named("Qwen3DSparkModel") | {"dflash_config": nested} | _heads(config)


WRITERS: dict[str, Callable[[DSparkConfig, TargetNote | None], dict[str, Any]]] = {
    "deepspec": _deepspec,
    "speculators": _speculators,
    "specforge": _specforge,
}


def _qwen3_layers(config: DSparkConfig) -> dict[str, Any]:
    slides = SLIDING in (config.layer_types or ())
    fields = {name: getattr(config, name) for name in _LAYERS}
    return fields | {
        "max_window_layers": config.num_hidden_layers,
        "model_type": "qwen3",
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": slides,
    }


def _heads(config: DSparkConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in _HEADS}


def _named(architecture: str) -> dict[str, Any]:
    return {"architectures": [architecture]}


def _never_written(config: DSparkConfig) -> list[tuple[bool, str]]:
    return [
        (not config.qk_norm, "draft layers without norms of queries and keys"),
        (config.embedding_multiplier != 1.0, f"embeddings multiplied by {config.embedding_multiplier}"),
        (config.logit_multiplier != 1.0, f"logits multiplied by {config.logit_multiplier}"),
    ]


def _only_deepspec_has(config: DSparkConfig) -> list[tuple[bool, str]]:
    return [
        (config.layer_style != "qwen3", f"draft layers of style {config.layer_style!r}"),
        (config.final_logit_softcapping is not None, "a soft cap on logits"),
        (config.rope_parameters["rope_type"] == "proportional", "RoPE that turns a part of each head"),
    ]


def _beyond_deepspec(config: DSparkConfig) -> list[tuple[bool, str]]:
    is_gemma = config.layer_style == "gemma4"
    return [
        *_never_written(config),
        (config.draft_layout != "anchor_first", "blocks that are filled in behind the anchor"),
        (config.draft_vocab_size is not None, "a reduced draft vocabulary"),
        (SLIDING in (config.layer_types or ()), "sliding draft layers"),
        (config.causal_layers != "none", "slots that do not look ahead"),
        (config.num_target_layers is None, "a drafter whose num_target_layers is not known; set it in its config.json"),
        (not is_gemma and config.final_logit_softcapping is not None, "a soft cap on logits"),
        (is_gemma and config.rope_parameters["rope_type"] not in ("default", "proportional"), "such RoPE for Gemma4"),
    ]


def _beyond_speculators(config: DSparkConfig) -> list[tuple[bool, str]]:
    slides = SLIDING in (config.layer_types or ())
    return [
        *_never_written(config),
        *_only_deepspec_has(config),
        (config.causal_layers == "all", "full layers whose slots do not look ahead"),
        (slides and config.window_start != "anchor", "windows that are counted from each slot"),
    ]


def _beyond_specforge(config: DSparkConfig) -> list[tuple[bool, str]]:
    has_heads = bool(config.markov_rank or config.enable_confidence_head)
    slides = SLIDING in (config.layer_types or ())
    return [
        *_never_written(config),
        *_only_deepspec_has(config),
        (config.draft_vocab_size is not None, "a reduced draft vocabulary"),
        (config.num_target_layers is None, "a drafter whose num_target_layers is not known; set it in its config.json"),
        (config.draft_layout == "fill_in" and has_heads, "blocks that are filled in behind the anchor, with heads"),
        (slides and config.window_start != "slot", "windows that are counted from the anchor"),
    ]


_BEYOND: dict[str, Callable[[DSparkConfig], list[tuple[bool, str]]]] = {
    "deepspec": _beyond_deepspec,
    "speculators": _beyond_speculators,
    "specforge": _beyond_specforge,
}


def _beyond(config: DSparkConfig, to: str) -> list[str]:
    """What of a drafter a format cannot express."""
    return [what for is_so, what in _BEYOND[to](config) if is_so]


def _refuse(config: DSparkConfig, to: str) -> None:
    if found := _beyond(config, to):
        others = [name for name in WRITERS if not _beyond(config, name)]
        way_out = f"convert to {' or '.join(others)}, or" if others else "none of the other formats can either;"
        raise CheckpointFormatError(
            f"a {to} file cannot express {'; '.join(found)}. Nothing was written: {way_out} serve it with this package"
        )
