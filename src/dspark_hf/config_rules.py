"""The rules that a drafter's configuration obeys, each with an error that names value, rule and way out."""

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

from transformers.activations import ACT2FN

from .errors import DSparkConfigError
from .layer_rules import rules_of_layers

if TYPE_CHECKING:
    from .configuration_autoregressive import AutoregressiveConfig
    from .configuration_dspark import DSparkConfig

MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
DRAFTER_TYPES = ("mtp", "eagle3")  # those that read pairs
ROPE_TYPES = ("default", "llama3", "yarn", "proportional")
VERIFICATION_POLICIES = ("full", "threshold", "survival", "goodput", "prefix", "smoothed", "block", "lagged")
CALIBRATION_MODES = ("greedy", "sampled")
# Of one mode's entry; the first three must be there.
CALIBRATION_KEYS = (
    "temperatures", "platt", "settings", "num_proposals", "ece_before", "ece_after", "share_accepted"
)  # fmt: skip

# Far above any drafter; a hostile or damaged config must not build modules for hours, nor fill the memory.
LARGEST_SIZES = {
    "vocab_size": 2**24,
    "hidden_size": 2**17,
    "intermediate_size": 2**19,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
    "max_position_embeddings": 2**40,
    "num_target_layers": 2**12,
    "num_hidden_layers": 64,
    "block_size": 256,
    "markov_rank": 2**14,
}

# Of a calibration's maps, which are float32 when they are applied: far wider than any fit, far from overflow.
SMALLEST_CALIBRATION_SCALE = 1e-4
LARGEST_CALIBRATION_SCALE = 1e4
LARGEST_CALIBRATION_SHIFT = 1e4

_ROPE_NEEDS = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "proportional": ("partial_rotary_factor",),
}
_ROPE_MAY_HAVE = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_AT_LEAST_ONE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "num_hidden_layers",
    "block_size",
)


def check_config(config: "DSparkConfig") -> None:
    """Raise DSparkConfigError for the first rule that is broken; nothing has been allocated by then."""
    _check_sizes(config)
    _check_numbers(config)
    _check_target_layers(config)
    _check_heads(config)
    for rule in rules_of_layers(config):
        _require(*rule)
    _check_rope(config)
    _check_defaults_of_generation(config)
    check_calibration(config)


# What autoregressive drafters do not have, and the value of the field that says so.
FIXED_WHEN_AUTOREGRESSIVE: dict[str, Any] = {
    "num_hidden_layers": 1,
    "draft_layout": "anchor_first",
    "markov_rank": 0,
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
    "sliding_window": None,
    "causal_layers": "none",
    "layer_style": "qwen3",
    "calibration": None,
}


def check_autoregressive_config(config: "AutoregressiveConfig") -> None:
    """As [`check_config`], for drafters that read pairs."""
    kind = config.drafter_type
    _require(kind in DRAFTER_TYPES, "drafter_type", kind, f"must be one of {DRAFTER_TYPES}")
    for name, value in FIXED_WHEN_AUTOREGRESSIVE.items():
        found = getattr(config, name)
        _require(found == value, name, found, f"must be {value!r}, autoregressive drafters have no other; leave it out")
    kinds = config.layer_types
    _require(kinds in (None, ["full_attention"]), "layer_types", kinds, "must be None or ['full_attention']")
    if kind == "mtp":
        _require(config.block_size == 1, "block_size", config.block_size, "must be 1 for drafter_type 'mtp'")
    check_config(config)


def _check_sizes(config: "DSparkConfig") -> None:
    for name in _AT_LEAST_ONE:
        _require(getattr(config, name) >= 1, name, getattr(config, name), "must be >= 1")
    depth = config.num_target_layers
    _require(depth is None or depth >= 1, "num_target_layers", depth, "must be >= 1, or None where it is not known")
    _require(config.head_dim % 2 == 0, "head_dim", config.head_dim, "must be even, RoPE turns pairs")
    _require(
        config.num_attention_heads % config.num_key_value_heads == 0,
        "num_key_value_heads",
        config.num_key_value_heads,
        f"must divide num_attention_heads ({config.num_attention_heads})",
    )
    _require(
        0 <= config.mask_token_id < config.vocab_size,
        "mask_token_id",
        config.mask_token_id,
        f"must be a token id of the target, 0 to {config.vocab_size - 1}",
    )
    _require(
        config.draft_vocab_size is None or 1 <= config.draft_vocab_size < config.vocab_size,
        "draft_vocab_size",
        config.draft_vocab_size,
        f"must be >= 1 and below vocab_size ({config.vocab_size}), or None for the whole vocabulary",
    )
    for name, largest in LARGEST_SIZES.items():
        size = getattr(config, name)  # None: of the target, and not told by the file
        _require(size is None or size <= largest, name, size, f"must be <= {largest}")


def _check_numbers(config: "DSparkConfig") -> None:
    for name in ("rms_norm_eps", "initializer_range", "embedding_multiplier", "logit_multiplier"):
        _require(_is_positive(getattr(config, name)), name, getattr(config, name), "must be a finite number > 0")
    cap = config.final_logit_softcapping
    _require(cap is None or _is_positive(cap), "final_logit_softcapping", cap, "must be > 0, or None for no cap")
    _require(
        0 <= config.attention_dropout < 1,
        "attention_dropout",
        config.attention_dropout,
        "must be a probability below 1",
    )
    _require(
        config.hidden_act in ACT2FN, "hidden_act", config.hidden_act, "must be an activation that transformers knows"
    )
    _require(
        not config.tie_word_embeddings,
        "tie_word_embeddings",
        config.tie_word_embeddings,
        "must be False, a drafter has neither embedding nor head of its own",
    )


def _check_target_layers(config: "DSparkConfig") -> None:
    ids = config.target_layer_ids
    _require(len(ids) >= 1, "target_layer_ids", ids, "must name at least one target layer")
    _require(
        all(low < high for low, high in zip(ids, ids[1:], strict=False)),
        "target_layer_ids",
        ids,
        "must be strictly increasing",
    )
    _require(ids[0] >= -1, "target_layer_ids", ids, "must not go below -1, the embedding output")
    depth = config.num_target_layers
    if config.reads_final_hidden:
        _require(depth is not None, "num_target_layers", depth, "must be given where the final hidden state is read")
        wanted = [(depth or 0) - 1]
        _require(ids == wanted, "target_layer_ids", ids, f"must be {wanted}, the last of {depth} target layers")
        return
    _require(
        depth is None or ids[-1] <= depth - 2,
        "target_layer_ids",
        ids,
        f"must lie between -1 (embedding output) and {(depth or 0) - 2}; the target has {depth} layers and its last "
        "one is only available after the final norm",
    )


def _check_heads(config: "DSparkConfig") -> None:
    _require(
        config.markov_rank >= 0,
        "markov_rank",
        config.markov_rank,
        "must be >= 0; 0 means no sequential head",
    )
    _require(
        config.markov_head_type in MARKOV_HEAD_TYPES,
        "markov_head_type",
        config.markov_head_type,
        f"must be one of {MARKOV_HEAD_TYPES}",
    )
    _require(
        not (config.enable_confidence_head and config.confidence_head_with_markov and config.markov_rank == 0),
        "confidence_head_with_markov",
        config.confidence_head_with_markov,
        "needs markov_rank >= 1, there is no embedding of the previous token at rank 0; set it to False",
    )


def _check_rope(config: "DSparkConfig") -> None:
    rope_type = config.rope_parameters.get("rope_type", "default")
    _require(
        rope_type in ROPE_TYPES,
        "rope_parameters['rope_type']",
        rope_type,
        f"must be one of {ROPE_TYPES}; pass rope_parameters={{'rope_type': 'default', 'rope_theta': ...}}",
    )
    theta = config.rope_parameters.get("rope_theta")
    _require(_is_positive(theta), "rope_parameters['rope_theta']", theta, "must be a finite number > 0")
    for name in _ROPE_NEEDS[rope_type]:
        value = config.rope_parameters.get(name)
        _require(_is_positive(value), f"rope_parameters[{name!r}]", value, f"must be a number > 0 for {rope_type!r}")
    for name in _ROPE_MAY_HAVE:
        value = config.rope_parameters.get(name)
        holds = value is None or (_is_finite(value) and value >= 0)
        _require(holds, f"rope_parameters[{name!r}]", value, "must be a finite number >= 0, or left out")
    part: Any = config.rope_parameters.get("partial_rotary_factor", 1)
    name, factor = "rope_parameters['partial_rotary_factor']", config.rope_parameters.get("factor", 1)
    if rope_type == "proportional":
        _require(part <= 1, name, part, "must be at most 1, the whole head")
        _require(_is_positive(factor), "rope_parameters['factor']", factor, "must be a number > 0, or left out")
    elif rope_type != "default":  # which does not read it
        _require(part == 1, name, part, f"must be 1, or left out, for {rope_type!r}: whole heads are turned")


def _check_defaults_of_generation(config: "DSparkConfig") -> None:
    _require(
        config.verification_policy in VERIFICATION_POLICIES,
        "verification_policy",
        config.verification_policy,
        f"must be one of {VERIFICATION_POLICIES}",
    )
    _require(
        0 <= config.confidence_threshold <= 1,
        "confidence_threshold",
        config.confidence_threshold,
        "must be a probability, 0 to 1",
    )
    every = config.min_drafts_every
    _require(
        every is None or (isinstance(every, int) and not isinstance(every, bool) and every >= 1),
        "min_drafts_every",
        every,
        "must be a whole number of rounds >= 1, or None for no floor",
    )


def check_calibration(config: "DSparkConfig") -> None:
    """The rules of `DSparkConfig.calibration`.

    It maps modes to entries of `temperatures`, one number per slot from 1e-4 to 1e4; `platt`, None or one pair
    `[a, b]` per slot with a in the same range and |b| at most 1e4, which then stand for the temperatures; `settings`,
    the generate() arguments it was fitted under; and, if wanted, `num_proposals` (rounds it was fitted on),
    `ece_before` and `ece_after` (means over slots), and `share_accepted`, for each slot the share of rounds in which
    all drafts up to it were accepted, which a call goes by until it has seen rounds of its own.

    Raises:
        DSparkConfigError: a rule is broken.
    """
    if config.calibration is None:
        return
    _require(
        config.enable_confidence_head,
        "calibration",
        "one",
        "must be None for a drafter without confidence head, there is nothing to calibrate",
    )
    _require_keys("calibration", config.calibration, (), CALIBRATION_MODES)
    for mode, entry in config.calibration.items():
        _check_calibration_entry(f"calibration[{mode!r}]", entry, config.block_size)


def _check_calibration_entry(name: str, entry: object, num_slots: int) -> None:
    _require(isinstance(entry, dict), name, entry, "must be a dict; fit one with `dspark calibrate`")
    assert isinstance(entry, dict)
    _require_keys(name, entry, CALIBRATION_KEYS[:3], CALIBRATION_KEYS)
    temperatures, platt, settings = (entry[key] for key in CALIBRATION_KEYS[:3])
    _require(
        _is_list_of(num_slots, temperatures) and all(map(_is_scale, temperatures)),
        f"{name}['temperatures']",
        temperatures,
        f"must hold one number {_SCALES} for each of the {num_slots} slots; fit them with `dspark calibrate`",
    )
    _require(
        platt is None
        or (
            _is_list_of(num_slots, platt) and all(_is_list_of(2, pair) and is_calibration_map(*pair) for pair in platt)
        ),
        f"{name}['platt']",
        platt,
        f"must be None or hold, for each of the {num_slots} slots, a pair [a, b] with a {_SCALES} and b from "
        f"{-LARGEST_CALIBRATION_SHIFT:g} to {LARGEST_CALIBRATION_SHIFT:g}; fit them with `dspark calibrate`",
    )
    _require(
        isinstance(settings, dict) and all(isinstance(k, str) and _is_finite(v) for k, v in settings.items()),
        f"{name}['settings']",
        settings,
        "must map names of generate() arguments to finite numbers",
    )
    shares = entry.get("share_accepted")
    _require(
        shares is None or (_is_list_of(num_slots, shares) and all(_is_finite(s) and 0 <= s <= 1 for s in shares)),
        f"{name}['share_accepted']",
        shares,
        f"must be None or hold a share from 0 to 1 for each of the {num_slots} slots",
    )
    for key in ("num_proposals", "ece_before", "ece_after"):
        value = entry.get(key)
        holds = value is None or (_is_finite(value) and value >= 0)
        _require(holds, f"{name}[{key!r}]", value, "must be a finite number >= 0")


def is_calibration_map(scale: object, shift: object) -> bool:
    """Whether a calibration may hold the map `scale * logit + shift` of a slot."""
    return _is_scale(scale) and _is_finite(shift) and abs(shift) <= LARGEST_CALIBRATION_SHIFT


def _is_scale(value: object) -> bool:
    return _is_finite(value) and SMALLEST_CALIBRATION_SCALE <= value <= LARGEST_CALIBRATION_SCALE


_SCALES = f"from {SMALLEST_CALIBRATION_SCALE:g} to {LARGEST_CALIBRATION_SCALE:g}"


def _require_keys(name: str, value: dict[str, Any], needed: tuple[str, ...], known: tuple[str, ...]) -> None:
    missing = [key for key in needed if key not in value]
    _require(not missing, name, sorted(value), f"must have the keys {list(needed)}")
    unknown = [key for key in value if key not in known]
    _require(not unknown, name, unknown, f"may only have the keys {list(known)}")


def _is_list_of(length: int, value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == length


def _is_finite(value: object) -> TypeGuard[float]:
    # Also of whole numbers that no float can hold, which math.isfinite does not take.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_positive(value: object) -> bool:
    return _is_finite(value) and value > 0


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise DSparkConfigError(f"{name} {rule}, got {value!r:.200}")
