"""Which targets, caches and lengths a drafter cannot serve, said before any work is done."""

import functools
import logging
import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from .._compat import TargetModel
from ..errors import IncompatibleTargetError, UnsupportedGenerationError
from ..modeling_dspark import DSparkDraftModel

logger = logging.getLogger(__name__)

# A target's vocabulary may differ from the drafter's by this fraction: Qwen2.5 pads 151,936 to 152,064 rows.
MAX_VOCABULARY_CHANGE = 64

# Ids in a multimodal config that stand in the text for an image, a video or a sound.
_MEDIA_TOKEN = re.compile(r"(image|video|audio|speech|vision)\w*_token_(id|index)$")

_CHANGING_ROPE_TYPES = frozenset({"dynamic", "longrope"})

# Layers whose state sums up everything before; those named "conv" keep the last few positions and can go back.
_RECURRENT_LAYER_TYPES = frozenset({"linear_attention", "mamba", "recurrent"})


def refuse_kind(target: TargetModel) -> None:
    """Raise UnsupportedGenerationError for encoder-decoder and recurrent targets."""
    text = target.config.get_text_config(decoder=True)
    layer_types = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    if target.config.is_encoder_decoder:
        kind = "an encoder-decoder"
    elif target._is_stateful or not _RECURRENT_LAYER_TYPES.isdisjoint(layer_types):
        kind = "a recurrent model"
    else:
        return
    raise UnsupportedGenerationError(
        f"{type(target).__name__} is {kind}; a drafter needs a decoder-only target whose cache can be rolled back. "
        "Leave assistant_model out"
    )


def refuse_attentions(target: TargetModel, generation_config: GenerationConfig) -> None:
    """Raise UnsupportedGenerationError where asking for attentions makes a target's forward look ahead.

    Old classes (Falcon) then leave SDPA for products of their own, with a mask that was made for SDPA.
    """
    wants = generation_config.return_dict_in_generate and generation_config.output_attentions
    implementation = target.config._attn_implementation
    if wants and implementation != "eager" and not type(target)._can_set_attn_implementation():
        raise UnsupportedGenerationError(
            f"output_attentions=True with attn_implementation={implementation!r} makes {type(target).__name__} look at "
            "later tokens of the same forward; load it with attn_implementation='eager', or leave assistant_model out"
        )


def refuse_cache(target: TargetModel, cache: Any, max_length: int) -> None:
    """Raise UnsupportedGenerationError for a cache that can be seen not to roll back, or not to hold the drafts.

    Layers with states of their own show what they are at their first forward only; none is judged here.
    """
    layers = [layer for layer in getattr(cache, "layers", ()) if isinstance(layer, CacheLayerMixin)]
    layers = [layer for layer in layers if not isinstance(layer, LinearAttentionCacheLayerMixin)]
    stuck = [layer for layer in layers if not layer.is_croppable]
    if any(getattr(layer, "is_sliding", False) for layer in stuck):
        raise UnsupportedGenerationError(
            f"a static cache of {type(target).__name__} whose sliding windows are shorter than the text (up to "
            f"{max_length} tokens) cannot be rolled back; use the default cache, or a shorter max_length"
        )
    if stuck:
        raise UnsupportedGenerationError(
            f"a {type(cache).__name__} with layers of type {type(stuck[0]).__name__} cannot be rolled back; use the "
            "default cache, or leave assistant_model out"
        )
    sizes = [layer.get_max_length() for layer in layers if not getattr(layer, "is_sliding", False)]
    size = min((size for size in sizes if size > 0), default=max_length)
    if size < max_length - 1:
        raise UnsupportedGenerationError(
            f"the cache holds {size} tokens, and this call may reach {max_length}, drafts included; pass a cache of "
            f"{max_length - 1}, or a shorter max_length"
        )


def refuse_target(target: TargetModel, drafter: DSparkDraftModel) -> None:
    """Raise IncompatibleTargetError where the drafter was not made for this target."""
    if drafter.device.type == "meta":
        raise IncompatibleTargetError("the drafter is on the meta device and has no weights; load it before generating")
    theirs = target.config.get_text_config(decoder=True)
    ours = drafter.config
    pairs: list[tuple[str, Any, Any]] = [
        ("hidden_size", getattr(theirs, "hidden_size", None), ours.hidden_size),
        ("number of decoder layers", getattr(theirs, "num_hidden_layers", None), ours.num_target_layers),
    ]
    for what, target_value, drafter_value in pairs:
        if target_value != drafter_value and drafter_value is not None:
            raise IncompatibleTargetError(
                f"the drafter was made for a target with {what} {drafter_value}, {type(target).__name__} has "
                f"{target_value}; load the drafter of this target"
            )
    if not ours.reads_final_hidden:
        _refuse_last_layer(target, ours.target_layer_ids)
    vocab_size = _refuse_vocabulary(target, drafter)
    head = target.get_output_embeddings()
    for what, module in (("input embedding", target.get_input_embeddings()), ("output head", head)):
        shape = tuple(getattr(getattr(module, "weight", None), "shape", ()))
        # A packed weight of a quantised module has another shape, and says nothing.
        is_plain = (
            isinstance(module, nn.Embedding | nn.Linear) and len(shape) == 2 and module.weight.is_floating_point()
        )
        if is_plain and shape != (vocab_size, ours.hidden_size):
            raise IncompatibleTargetError(
                f"the drafter borrows the target's {what} as [{vocab_size}, {ours.hidden_size}], and "
                f"{type(target).__name__} has one of {list(shape)}; a drafter needs a target whose embedding and head "
                "cover its vocabulary at its hidden size: call resize_token_embeddings(), or load another"
            )
    if head is None:
        raise IncompatibleTargetError(
            f"{type(target).__name__} has no output head (get_output_embeddings() is None), and the drafter borrows "
            "it; load the target with AutoModelForCausalLM"
        )


def _refuse_last_layer(target: TargetModel, layer_ids: list[int]) -> None:
    """Raise for feature layers that this target lacks: foreign drafters need not say how deep theirs is."""
    depth = getattr(target.config.get_text_config(decoder=True), "num_hidden_layers", None)
    if depth is not None and layer_ids[-1] > depth - 2:
        raise IncompatibleTargetError(
            f"the drafter reads target layers {layer_ids}, and {type(target).__name__} has {depth}, the last of "
            "which is only available after the final norm; load the drafter of this target"
        )


def _refuse_vocabulary(target: TargetModel, drafter: DSparkDraftModel) -> int:
    """The target's vocabulary size; raise where it cannot be the drafter's, resized or padded.

    Added tokens and padding rows change a size by little, another tokenizer by much (or not at all: no size can tell).
    """
    theirs = target.config.get_text_config(decoder=True).vocab_size
    ours = drafter.config
    if abs(theirs - ours.vocab_size) * MAX_VOCABULARY_CHANGE > ours.vocab_size:
        raise IncompatibleTargetError(
            f"the drafter was made for a target with vocab_size {ours.vocab_size}, {type(target).__name__} has "
            f"{theirs}; that is more than added tokens or padding (1/{MAX_VOCABULARY_CHANGE} of it), so load the "
            "drafter of this target"
        )
    if theirs <= ours.mask_token_id:
        raise IncompatibleTargetError(
            f"the drafter's mask_token_id {ours.mask_token_id} is not in the vocabulary of {type(target).__name__}, "
            f"which was cut to {theirs}; resize the target to at least {ours.mask_token_id + 1} tokens"
        )
    if (ids := drafter.draftable_ids(theirs)) is not None and not len(ids):
        raise IncompatibleTargetError(
            f"none of the drafter's {ours.draft_vocab_size} draft tokens is in the vocabulary of "
            f"{type(target).__name__}, which was cut to {theirs}; load the drafter of this target"
        )
    if theirs != ours.vocab_size:
        _warn_of_vocabularies(theirs, ours.vocab_size)
    return int(theirs)


@functools.cache
def _warn_of_vocabularies(theirs: int, ours: int) -> None:
    """Once per pair of sizes."""
    logger.warning(
        "the target has %d tokens and the drafter was made for %d; tokens that only one of them has are never drafted "
        "(output is unaffected)",
        theirs,
        ours,
    )


def refuse_length(target: TargetModel, max_length: int) -> None:
    """Raise for targets whose RoPE changes with the length of the text, where this call may pass the change.

    Their forward over several tokens then is not what it would be one token at a time, with any way of speculating.

    Raises:
        UnsupportedGenerationError: the text may grow past the length where frequencies change.
    """
    config = target.config.get_text_config(decoder=True)
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    changing = sorted({str(part.get("rope_type")) for part in parts} & _CHANGING_ROPE_TYPES)
    if not changing:
        return
    named = [part.get("original_max_position_embeddings") for part in parts]
    limit = min([config.max_position_embeddings, *(int(length) for length in named if length is not None)])
    if max_length > limit:
        raise UnsupportedGenerationError(
            f"{type(target).__name__} has {changing[0]!r} RoPE, whose frequencies change when a text passes {limit} "
            f"tokens, and this call may reach {max_length}; drafts cannot be verified across that. Keep prompt and new "
            f"tokens within {limit}, or leave assistant_model out"
        )


def refuse_cached_media(target: TargetModel, cached_ids: Tensor) -> None:
    """Raise for a cache that holds images, videos or sounds: run again, its text would stand there without them.

    Raises:
        UnsupportedGenerationError: `cached_ids`, any shape, hold a placeholder of the target's config.
    """
    config = target.config
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    fields = [field for part in parts if part is not None for field in vars(part).items()]
    media_ids = {value for name, value in fields if _MEDIA_TOKEN.search(name) and isinstance(value, int)}
    held = torch.isin(cached_ids, torch.tensor(sorted(media_ids), dtype=torch.long, device=cached_ids.device))
    if media_ids and bool(held.any()):
        raise UnsupportedGenerationError(
            f"the cache holds {int(held.sum())} tokens of images, videos or sounds, and the drafter needs the features "
            "of every token, which come with a second run of the whole prompt. Pass the whole conversation and all its "
            "media with an empty cache, or leave assistant_model out"
        )
