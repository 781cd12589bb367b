"""The rules of a drafter's layout and layers: which slots draft, what a slot may see, how a layer is built."""

from collections.abc import Iterator
from typing import Any

DRAFT_LAYOUTS = ("anchor_first", "fill_in")
SLIDING = "sliding_attention"
DRAFT_LAYER_TYPES = ("full_attention", SLIDING)
WINDOW_STARTS = ("slot", "anchor")
CAUSAL_LAYERS = ("none", "sliding", "all")
LAYER_STYLES = ("qwen3", "gemma4")

Rule = tuple[bool, str, Any, str]  # whether it holds, field, value, what the field must be


def rules_of_layers(config: Any) -> Iterator[Rule]:
    """The rules of a `DSparkConfig`, one after the other; each may rely on those before it."""
    for name, known in (
        ("draft_layout", DRAFT_LAYOUTS),
        ("window_start", WINDOW_STARTS),
        ("causal_layers", CAUSAL_LAYERS),
        ("layer_style", LAYER_STYLES),
    ):
        yield getattr(config, name) in known, name, getattr(config, name), f"must be one of {known}"
    layer_types = config.layer_types
    yield (
        layer_types is None or len(layer_types) == config.num_hidden_layers,
        "layer_types",
        layer_types,
        f"must have one entry per draft layer ({config.num_hidden_layers})",
    )
    yield (
        all(kind in DRAFT_LAYER_TYPES for kind in layer_types or ()),
        "layer_types",
        layer_types,
        f"may only hold {DRAFT_LAYER_TYPES}",
    )
    yield from _rules_of_windows(config, SLIDING in (layer_types or ()))
    yield from _rules_of_styles(config)


def _rules_of_windows(config: Any, slides: bool) -> Iterator[Rule]:
    window = config.sliding_window
    if slides:
        yield (
            isinstance(window, int) and window >= 1,
            "sliding_window",
            window,
            "must be >= 1, since layer_types has sliding layers",
        )
        return
    yield window is None, "sliding_window", window, "must be None, since no draft layer is a sliding one"
    # One way to say it: configs that mean the same compare equal.
    yield (
        config.causal_layers != "sliding",
        "causal_layers",
        config.causal_layers,
        "must be 'none' or 'all', since no draft layer is a sliding one",
    )


def _rules_of_styles(config: Any) -> Iterator[Rule]:
    is_gemma = config.layer_style == "gemma4"
    yield (
        is_gemma or not config.attention_k_eq_v,
        "attention_k_eq_v",
        config.attention_k_eq_v,
        "must be False, values made of the keys' projection are of layer_style 'gemma4'",
    )
    yield (
        config.qk_norm or not is_gemma,
        "qk_norm",
        config.qk_norm,
        "must be True for layer_style 'gemma4', whose scores are scaled by nothing else",
    )
