"""SpecForge's `config.json` of DSpark drafters, raw and as exported for SGLang: nested `dflash_config`, anchor-first.

Its labels in training are anchor-first, whatever its own demonstration loop reads.
"""

from collections.abc import Iterable
from typing import Any

from .fields import backbone_fields, head_fields, unexpected
from .zlab import dflash_fields, target_treatment

_WHAT = "a SpecForge drafter"
_HEAD_KEYS = ("markov_rank", "enable_confidence_head")

# Early checkpoints keep both heads under a container.
LEGACY_KEYS = {r"^logit_head\.markov_head\.": "markov_head.", r"^logit_head\.confidence_head\.": "confidence_head."}


def is_dspark(config: dict[str, Any]) -> bool:
    """Whether a config with `dflash_config` is of a DSpark drafter, and not of a DFlash one."""
    nested = config["dflash_config"]
    has_heads = any(key in place for key in _HEAD_KEYS for place in (nested, config))
    return has_heads or nested.get("projector_type") == "dspark"


def to_dspark(config: dict[str, Any]) -> dict[str, Any]:
    """`DSparkConfig` fields of a SpecForge drafter.

    Raises:
        CheckpointFormatError: a key is missing, two places differ, or the drafter is of another kind.
    """
    nested = config["dflash_config"]
    if nested.get("projector_type") not in (None, "dspark"):
        raise unexpected(_WHAT, "projector_type", nested["projector_type"], "'dspark', since it has DSpark's heads")
    backbone = backbone_fields(config, _WHAT)
    draft_vocab_size = config.get("draft_vocab_size")
    return {
        **backbone,
        **dflash_fields(config, _WHAT),
        **head_fields(_WHAT, nested, config),
        "draft_layout": "anchor_first",
        "draft_vocab_size": None if draft_vocab_size == backbone["vocab_size"] else draft_vocab_size,
        **target_treatment(config, _WHAT),
    }


def is_legacy(source_patterns: Iterable[str]) -> bool:
    """Whether a renaming of weights is one of `LEGACY_KEYS`."""
    return any("logit_head" in pattern for pattern in source_patterns)
