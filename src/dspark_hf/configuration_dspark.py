"""`DSparkConfig`: everything a drafter is. Each default is written here and nowhere else."""

import copy
import difflib
import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Self

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from .checkpoints.detect import to_dspark_config_dict
from .checkpoints.source import checked_config
from .checkpoints.weights import check_dtype, check_quantization
from .config_rules import check_config
from .errors import CheckpointFormatError, DSparkConfigError
from .hub.remote_code import AUTO_CONFIG, is_own_auto_map, needs_code_beside, remove_code, write_code
from .layer_rules import SLIDING
from .target_traits import derive_from_target

logger = logging.getLogger(__name__)

# Fields that may be absent from a config.json; every other one must be there, since a guess would load a drafter
# that drafts nonsense without an error.
_OPTIONAL_ON_LOAD = frozenset(
    {
        "attention_bias",
        "attention_dropout",
        "attention_k_eq_v",
        "bos_token_id",
        "calibration",
        "causal_layers",
        "confidence_threshold",
        "draft_vocab_size",
        "embedding_multiplier",
        "eos_token_id",
        "final_logit_softcapping",
        "initializer_range",
        "layer_style",
        "logit_multiplier",
        "min_drafts_every",
        "pad_token_id",
        "sliding_window",
        "tie_word_embeddings",
        "verification_policy",
        "window_start",
    }
)
# transformers' Trainer leaves use_cache on every config; a drafter always has its cache. How attention is computed is
# the caller's choice: transformers would fetch code for a name that it does not know.
# Labels are a classifier's, and as many as a hostile file says would be made.
_NOT_FROM_A_FILE = frozenset(
    {"use_cache", "attn_implementation", "experts_implementation", "num_labels", "id2label", "label2id", "problem_type"}
)
# What PreTrainedConfig takes through **kwargs without declaring it as a field.
_BASE_KWARGS = frozenset(
    {
        "_commit_hash",
        "_name_or_path",
        "attn_implementation",
        "auto_map",
        "experts_implementation",
        "model_type",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "quantization_config",
        "torch_dtype",
    }
)


@strict
class DSparkConfig(PreTrainedConfig):
    r"""Configuration of a DSpark drafter (arXiv 2607.05147, sections 3 and 4 for the architecture).

    The backbone is one Qwen3-style decoder, whatever the target's family. Sizes that must agree with the target have
    no default; build a config with [`DSparkConfig.from_target`].

    Args:
        vocab_size (`int`): Size of the target's vocabulary.
        hidden_size (`int`): Hidden size of the target, shared by the drafter, which borrows its embedding and head.
        intermediate_size (`int`): Width of the draft layers' MLP.
        num_attention_heads (`int`): Query heads of a draft layer.
        num_key_value_heads (`int`): Key/value heads of a draft layer; divides `num_attention_heads`.
        head_dim (`int`): Width of one attention head; even, for RoPE.
        max_position_embeddings (`int`): Longest context the target was made for.
        rope_parameters (`dict`): RoPE of the draft layers: `rope_theta`, and `rope_type` default,
            llama3, yarn or proportional.
        num_target_layers (`int` or `None`): Decoder layers of the target; `None`: a foreign file did not say.
        target_layer_ids (`list[int]`): Target layers whose outputs feed the drafter, strictly increasing. `k` is the
            output of decoder layer `k` (`hidden_states[k + 1]`), -1 the embedding output. The last layer is
            forbidden, since transformers returns it after the final norm.
        mask_token_id (`int`): Id that fills the undrafted slots of a block.
        num_hidden_layers (`int`, *optional*, defaults to 5): Draft layers.
        block_size (`int`, *optional*, defaults to 7): gamma, drafts per round (bonus token not counted).
        draft_layout (`str`, *optional*, defaults to `"anchor_first"`): `anchor_first` (DSpark): the block is the anchor
            and `block_size - 1` masks, and slot k predicts token anchor + k + 1. `fill_in` (original DFlash): the
            anchor and `block_size` masks; the mask in the place of token anchor + k predicts it, and the anchor's own
            slot nothing.
        draft_vocab_size (`int`, *optional*): Tokens that can be drafted, fewer than `vocab_size`; `None` means all.
            Which ones is part of the weights (`d2t`: draft id `i` is token `i + d2t[i]`); all others have draft
            probability 0, which costs acceptance and never exactness.
        markov_rank (`int`, *optional*, defaults to 256): Rank r of the sequential head; 0 means none (DFlash).
        markov_head_type (`str`, *optional*, defaults to `"vanilla"`): `vanilla` (Eq. 5), `gated` or `rnn` (Eq. 6).
        enable_confidence_head (`bool`, *optional*, defaults to `True`): Whether acceptance is estimated (Eq. 7).
        confidence_head_with_markov (`bool`, *optional*, defaults to `True`): Whether the confidence head also reads
            the embedding of the previous token; needs `markov_rank` of 1 or more.
        hidden_act, attention_bias, attention_dropout, rms_norm_eps, qk_norm, initializer_range: As in Qwen3;
            `qk_norm=False` drops the per-head norms.
        layer_types (`list[str]`, *optional*): `full_attention` or `sliding_attention` for each draft layer; `None`: all
            full.
        sliding_window (`int`, *optional*): Window W of the sliding layers; `None` where there are none.
        window_start (`str`, *optional*, defaults to `"slot"`): From where a window is counted. `slot`: a slot sees W
            positions, its own the last of them. `anchor`: every slot of a block sees the W positions before the anchor.
        causal_layers (`str`, *optional*, defaults to `"none"`): In which layers a slot does not see later slots of its
            block: `none`, `sliding` or `all`.
        layer_style (`str`, *optional*, defaults to `"qwen3"`): `gemma4`: layers with norms behind attention and MLP
            too, values normalised, scores not scaled, and a stored factor on each layer's output.
        attention_k_eq_v (`bool`, *optional*, defaults to `False`): For `gemma4`: values come from the keys' projection.
        embedding_multiplier (`float`, *optional*, defaults to 1.0): What the target's `forward` multiplies its
            embeddings with (Granite); factors inside the embedding module itself do not count.
        logit_multiplier (`float`, *optional*, defaults to 1.0): What the target's `forward` multiplies its logits
            with (Cohere; for Granite the inverse of `logits_scaling`).
        final_logit_softcapping (`float`, *optional*): Soft cap s of the target's logits, `s * tanh(logits / s)`.
        pad_token_id, bos_token_id, eos_token_id: The target's; pipelines read them from the assistant.
        verification_policy (`str`, *optional*, defaults to `"full"`): Used when the generate() call names none.
        confidence_threshold (`float`, *optional*, defaults to 0.4): For policies `threshold` and `survival`, likewise.
        min_drafts_every (`int`, *optional*): For policies that weigh rows against each other: each row has a draft
            verified at least once in so many drafted rounds. `None`: rows of low estimates may go without.
        calibration (`dict`, *optional*): What makes the confidence head's estimates agree with the outcomes, by mode
            (`"greedy"`, `"sampled"`), as `dspark calibrate` fits it; rules in `config_rules.check_calibration`.
            `None`: the estimates are used as they are.

    Raises:
        DSparkConfigError: a value breaks a rule, or an argument is unknown.
    """

    model_type = "dspark"

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    num_target_layers: int | None
    target_layer_ids: list[int]
    mask_token_id: int
    num_hidden_layers: int = 5
    block_size: int = 7
    draft_layout: str = "anchor_first"
    draft_vocab_size: int | None = None
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    hidden_act: str = "silu"
    attention_bias: bool = False
    attention_dropout: float = 0.0
    rms_norm_eps: float = 1e-6
    qk_norm: bool = True
    initializer_range: float = 0.02
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    window_start: str = "slot"
    causal_layers: str = "none"
    layer_style: str = "qwen3"
    attention_k_eq_v: bool = False
    embedding_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False
    verification_policy: str = "full"
    confidence_threshold: float = 0.4
    min_drafts_every: int | None = None
    calibration: dict[str, Any] | None = None

    keys_to_ignore_at_inference: ClassVar[list[str]] = []

    def __post_init__(self, **kwargs: Any) -> None:
        unknown = sorted(set(kwargs) - _BASE_KWARGS)
        if unknown:
            raise DSparkConfigError(_unknown_argument_message(unknown, _field_names()))
        check_config(self)  # before anything is sized by a field
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        super().__post_init__(**kwargs)

    @property
    def first_draft_slot(self) -> int:
        """The first slot of a block that drafts: 1 where the anchor's own slot predicts nothing."""
        return 1 if self.draft_layout == "fill_in" else 0

    @property
    def num_block_tokens(self) -> int:
        """Tokens of a block forward: the anchor and its masks."""
        return self.first_draft_slot + self.block_size

    # -- construction -------------------------------------------------------------------------------------------

    @classmethod
    def from_target(
        cls,
        target_config: PreTrainedConfig,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **overrides: Any,
    ) -> Self:
        """Derive a drafter's config from its target's.

        Sizes, RoPE, multipliers, special ids and the vocabulary are the target's. Five feature layers are spread as
        in the released recipe (fewer on shallow targets, never the last layer). `mask_token_id`, when not given, is
        a reserved unused id that `tokenizer` knows of, else the last id of the vocabulary.

        Args:
            target_config: The target's config; of a multimodal one the text part is used.
            tokenizer: The target's tokenizer, only used to find an unused id for the mask.
            **overrides: Any field of `DSparkConfig`; an override wins over what was derived.

        Raises:
            DSparkConfigError: the target is of a kind that cannot have a drafter, or an override breaks a rule.
        """
        unknown = sorted(set(overrides) - _field_names() - _BASE_KWARGS)
        if unknown:
            raise DSparkConfigError(_unknown_argument_message(unknown, _field_names()))
        if not isinstance(target_config, PreTrainedConfig):
            raise DSparkConfigError(
                f"from_target takes the target's config, got a {type(target_config).__name__}; pass model.config, or "
                "AutoConfig.from_pretrained(...)"
            )
        try:
            derived = derive_from_target(target_config, tokenizer, overrides)
        except (AttributeError, RuntimeError) as error:  # a field is missing, or differs from layer to layer
            raise DSparkConfigError(
                f"a drafter cannot be derived from a {target_config.model_type!r} target: {error}"
            ) from error
        return cls(**{**derived, **overrides})

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read a `config.json` of any known drafter format as a dict of `DSparkConfig` fields."""
        source = kwargs.pop("pretrained_model_name_or_path", None) or args[0]
        try:
            config_dict, unused = super().get_config_dict(checked_config(os.fspath(source), kwargs), **kwargs)
        except (AttributeError, TypeError) as error:  # transformers expects a JSON object
            raise CheckpointFormatError(f"config.json of {source} does not hold a JSON object") from error
        if not config_dict:
            raise CheckpointFormatError(
                f"{source} has no config.json, or an empty one; pass the folder or Hub id of a drafter"
            )
        return to_dspark_config_dict(config_dict), unused

    @classmethod
    def of_folder(cls, folder: Path, subfolder: str, arguments: Mapping[str, Any]) -> Self:
        """The config in a folder as `from_pretrained(folder, **arguments)` would have it, without a word on its keys.

        Args:
            folder: Holds the config, in `subfolder`.
            arguments: Those that are no field of a drafter are left out.
        """
        config_dict, _ = cls.get_config_dict(folder, subfolder=subfolder)
        own = _field_names() - _base_field_names()
        return cls.from_dict(
            _without_unknown(config_dict), **{key: value for key, value in arguments.items() if key in own}
        )

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Self:
        """Build a config from the dict of a `config.json`; nothing that shapes a drafter is guessed.

        Raises:
            CheckpointFormatError: a field is missing.
            DSparkConfigError: a field breaks a rule.
        """
        required = _field_names() - _base_field_names() - _OPTIONAL_ON_LOAD
        kinds = config_dict.get("layer_types")
        if isinstance(kinds, list) and SLIDING in kinds:
            required |= {"causal_layers", "sliding_window", "window_start"}
        missing = sorted(required - set(config_dict))
        if missing:
            raise CheckpointFormatError(
                f"config.json lacks {missing}; a drafter's config must state them, since guessed values would load "
                "and draft nonsense. Add them, or save the drafter again with save_pretrained"
            )
        config_dict = {key: value for key, value in config_dict.items() if key not in _NOT_FROM_A_FILE}
        for key in ("dtype", "torch_dtype"):
            check_dtype(config_dict.get(key), "config.json")
        check_quantization(config_dict.get("quantization_config"), "config.json")
        known = _without_unknown(config_dict)
        ignored = sorted(set(config_dict) - set(known))
        if any(config_dict[key] is not None for key in ignored):
            logger.warning("config.json has keys that dspark_hf does not know, ignored: %s", ignored)
        if not is_own_auto_map(known.get("auto_map")):
            known.pop("auto_map", None)  # of classes that are not these
        try:
            return super().from_dict(known, **kwargs)
        except AttributeError as error:  # e.g. a dtype that torch does not have
            raise CheckpointFormatError(f"config.json cannot be read: {error}") from error

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write `config.json`, as any transformers config; where it names our code (`auto_map`), that comes with it.

        Code of ours that it does not name is removed from the folder.

        Raises:
            CheckpointFormatError: the folder holds code of others under the names of ours.
        """
        saved = copy.copy(self)
        if self._auto_class is not None and type(self) is DSparkConfig:
            saved.auto_map = {**(getattr(self, "auto_map", None) or {}), self._auto_class: AUTO_CONFIG}
            vars(saved)["_auto_class"] = None  # transformers would copy this file without what it imports
        if needs_code_beside(getattr(saved, "auto_map", None)):
            write_code(save_directory)
            if push_to_hub:  # of what lies in the folder by now, transformers would not upload the code
                saved.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)
                push_to_hub = False
            PreTrainedConfig.save_pretrained(saved, save_directory, push_to_hub=push_to_hub, **kwargs)
        else:
            PreTrainedConfig.save_pretrained(saved, save_directory, push_to_hub=push_to_hub, **kwargs)
            remove_code(save_directory)


_FLOAT_FIELDS = frozenset(
    {
        "attention_dropout",
        "confidence_threshold",
        "embedding_multiplier",
        "final_logit_softcapping",
        "initializer_range",
        "logit_multiplier",
        "rms_norm_eps",
    }
)


def _without_unknown(config_dict: dict[str, Any]) -> dict[str, Any]:
    known = _field_names() | _BASE_KWARGS
    return {key: value for key, value in config_dict.items() if key in known}


def _field_names() -> set[str]:
    return {field.name for field in fields(DSparkConfig)}


def _base_field_names() -> set[str]:
    return {field.name for field in fields(PreTrainedConfig)}


def _unknown_argument_message(unknown: list[str], known: set[str]) -> str:
    hints = {name: difflib.get_close_matches(name, known, n=1) for name in unknown}
    parts = [f"{name!r}" + (f" (did you mean {near[0]!r}?)" if near else "") for name, near in hints.items()]
    return f"DSparkConfig has no argument {', '.join(parts)}; see its docstring for the fields it has"


def _raise_our_errors(original_init: Callable[..., None]) -> Callable[..., None]:
    """Report a field of the wrong type like any other broken rule."""

    @functools.wraps(original_init)
    def __init__(self: DSparkConfig, *args: Any, **kwargs: Any) -> None:
        # JSON and people write 1 for 1.0.
        given = {name: kwargs[name] for name in _FLOAT_FIELDS if type(kwargs.get(name)) is int}
        whole = {name: float(value) for name, value in given.items() if abs(value) <= sys.float_info.max}
        try:
            original_init(self, *args, **kwargs | whole)
        except (StrictDataclassClassValidationError, StrictDataclassFieldValidationError) as error:
            raise DSparkConfigError(" ".join(str(error).split())) from error
        except TypeError as error:  # a required field is missing
            raise DSparkConfigError(f"{error}; DSparkConfig.from_target fills in what a target determines") from error

    return __init__


DSparkConfig.__init__ = _raise_our_errors(DSparkConfig.__init__)  # type: ignore[method-assign]
