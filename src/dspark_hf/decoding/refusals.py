"""Which arguments of generate() a drafter cannot serve, said before any work is done."""

import functools
import logging
import os
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig
from transformers.generation import logits_process as lp
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import LogitsProcessorList

from .._compat import TargetModel
from ..errors import UnsupportedGenerationError
from ..modeling_dspark import DSparkDraftModel
from .target_refusals import refuse_attentions, refuse_kind, refuse_target

logger = logging.getLogger(__name__)

# They carry state from one call to the next, and speculation calls them on prefixes that are later rejected.
STATEFUL_PROCESSORS = (
    lp.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    lp.SynthIDTextWatermarkLogitsProcessor,
    lp.DiaEOSDelayPatternLogitsProcessor,
)

# Other ways to speculate, which would run instead of the drafter or change what the target says; and a drafter's own
# setting.
_CONFLICTING_OPTIONS = (
    "assistant_early_exit",
    "assistant_ensemble_weight",
    "dola_layers",
    "is_assistant",
    "prompt_lookup_num_tokens",
    "speculation_type",
    "use_mtp",
)

# What makes generate() search in another way, and the value that does not.
_SEARCH_OPTIONS = (("force_words_ids", None), ("constraints", None), ("num_beams", 1), ("penalty_alpha", None))


def refuse_assistant(assistant: object) -> None:
    """Raise UnsupportedGenerationError for what a drafter might be taken from, in place of the drafter.

    Anything else is transformers' affair, or that of another library.
    """
    inner = getattr(assistant, "module", None)
    if getattr(inner, "is_dspark_drafter", False) is True:
        what, way_out = f"a {type(assistant).__name__} around it", "pass the drafter inside, assistant_model.module"
    elif isinstance(assistant, str | os.PathLike | PreTrainedConfig | type):
        what = f"a {type(assistant).__name__}" if isinstance(assistant, PreTrainedConfig) else repr(assistant)
        way_out = "load it first, e.g. DSparkDraftModel.from_pretrained(...), and pass what that returns"
    else:
        return
    raise UnsupportedGenerationError(f"assistant_model must be a loaded model, got {what}; {way_out}")


def refuse_generation(
    target: TargetModel,
    drafter: DSparkDraftModel,
    generation_mode: GenerationMode,
    generation_config: GenerationConfig,
    mode_kwargs: dict[str, Any],
) -> None:
    """Raise for a combination of arguments that a drafter cannot serve.

    Args:
        mode_kwargs: What generate() passes to the decoding method itself, such as `assistant_tokenizer`.

    Raises:
        UnsupportedGenerationError: an option, a decoding method or a kind of target that cannot be combined.
        IncompatibleTargetError: the drafter was made for another target.
    """
    _refuse_search(generation_mode, generation_config)
    _refuse_options(generation_config)
    if mode_kwargs.get("assistant_tokenizer") is not None:
        raise UnsupportedGenerationError(
            "assistant_tokenizer is for assistants with a vocabulary of their own, and a drafter speaks the target's; "
            "leave assistant_tokenizer out"
        )
    if mode_kwargs.get("synced_gpus"):
        raise UnsupportedGenerationError(
            "synced_gpus=True (ZeRO stage 3 or FSDP generation) cannot be combined with a DSpark drafter; "
            "leave assistant_model out"
        )
    if generation_config.num_assistant_tokens_schedule not in (None, "constant"):
        _warn_of_schedule(generation_config.num_assistant_tokens_schedule)
    refuse_kind(target)
    refuse_attentions(target, generation_config)
    refuse_target(target, drafter)


def _refuse_search(generation_mode: GenerationMode, generation_config: GenerationConfig) -> None:
    if generation_mode == GenerationMode.ASSISTED_GENERATION:
        return
    values = [(name, getattr(generation_config, name, None), plain) for name, plain in _SEARCH_OPTIONS]
    name, value, plain = next(
        ((n, v, p) for n, v, p in values if v is not None and v != p), ("generation mode", generation_mode, None)
    )
    raise UnsupportedGenerationError(
        f"{name}={value!r} asks for {generation_mode.value}, and assistant_model works with greedy search and "
        f"sampling; set {name}={plain}, or leave assistant_model out"
    )


def _refuse_options(generation_config: GenerationConfig) -> None:
    for option in _CONFLICTING_OPTIONS:
        value = getattr(generation_config, option, None)
        if value is not None and value is not False:
            raise UnsupportedGenerationError(
                f"{option}={value!r} cannot be combined with a DSpark drafter; set it to None, or leave "
                "assistant_model out"
            )
    if not generation_config.use_cache:
        raise UnsupportedGenerationError(
            f"use_cache={generation_config.use_cache!r} cannot be combined with a drafter, whose drafts are taken back "
            "from the cache; leave it at True, or leave assistant_model out"
        )
    if (scale := generation_config.guidance_scale) is not None and scale != 1:
        raise UnsupportedGenerationError(
            f"guidance_scale={scale} keeps state between steps, which speculation would corrupt; "
            "set it to 1, or leave assistant_model out"
        )


@functools.cache
def _warn_of_schedule(schedule: str) -> None:
    """Once per value."""
    logger.warning(
        "num_assistant_tokens_schedule=%r has no effect on a drafter, which drafts blocks of one size; "
        "verification_policy='threshold' varies how much of a block is verified",
        schedule,
    )


def refuse_processors(processors: LogitsProcessorList) -> None:
    """Raise UnsupportedGenerationError for logits processors that keep state between steps."""
    for processor in processors:
        if isinstance(processor, STATEFUL_PROCESSORS):
            raise UnsupportedGenerationError(
                f"{type(processor).__name__} keeps state between steps, which speculation would corrupt; "
                "remove it, or leave assistant_model out"
            )
