"""What a call starts from: the prompt's tokens, and a cache that may come from an earlier turn."""

import functools
import logging
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from .._compat import CACHE_KEY, TargetModel
from ..errors import UnsupportedGenerationError
from .target_refusals import refuse_cached_media

logger = logging.getLogger(__name__)


def refuse_inputs(input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
    """Raise UnsupportedGenerationError for a prompt that is no tokens, and where generate() prepared no cache."""
    if model_kwargs.get("inputs_embeds") is not None or input_ids.shape[1] == 0:
        raise UnsupportedGenerationError(
            f"a drafter needs the prompt as input_ids, got ids of shape {tuple(input_ids.shape)}"
            + (" and inputs_embeds" if model_kwargs.get("inputs_embeds") is not None else "")
            + "; pass input_ids, or leave assistant_model out"
        )
    if model_kwargs.get(CACHE_KEY) is None:
        raise UnsupportedGenerationError(
            "a drafter needs a target with a key/value cache, and generate() prepared none; leave assistant_model out"
        )


def start_from_empty_cache(
    model: TargetModel, input_ids: Tensor, model_kwargs: dict[str, Any], generation_config: GenerationConfig
) -> None:
    """A cache that already holds tokens comes without their features: run the whole text again, if it is there."""
    cache = model_kwargs[CACHE_KEY]
    num_cached = int(cache.get_seq_length())
    if num_cached == 0:
        return
    mask = model_kwargs.get("attention_mask")
    num_text = mask.shape[1] if mask is not None else getattr(generation_config, "_mask_length", input_ids.shape[1])
    if num_text != input_ids.shape[1] or input_ids.shape[1] <= num_cached:
        raise UnsupportedGenerationError(
            f"the cache holds {num_cached} tokens and {input_ids.shape[1]} ids were passed, which is not a longer "
            "text; the drafter needs the features of every token. Pass the whole sequence as input_ids, with an empty "
            "cache (cache.reset()) if it holds no less, or leave assistant_model out"
        )
    refuse_cached_media(model, input_ids[:, :num_cached])
    warn_of_second_run()
    cache.reset()


@functools.cache
def warn_of_second_run() -> None:
    """Once: a chat would repeat it every turn."""
    logger.warning(
        "a cache that holds tokens comes without the features that the drafter needs; the whole sequence is run again"
    )


def refuse_chunk_size(generation_config: GenerationConfig) -> None:
    """Raise UnsupportedGenerationError for a `prefill_chunk_size` that cuts no chunks."""
    chunk_size = generation_config.prefill_chunk_size
    if chunk_size is not None and chunk_size < 1:
        raise UnsupportedGenerationError(
            f"prefill_chunk_size must be >= 1, got {chunk_size}; leave it out, or set it to None, for no chunks"
        )
