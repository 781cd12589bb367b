"""What speculation cannot do, said before any work is done."""

from typing import Any

from torch import nn
from transformers import GenerationConfig
from transformers.generation import logits_process as lp
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import LogitsProcessorList

from .._compat import TargetModel
from ..errors import IncompatibleTargetError, UnsupportedGenerationError
from ..modeling_dspark import DSparkDraftModel

# They carry state from one call to the next, and speculation calls them on prefixes that are later rejected.
STATEFUL_PROCESSORS = (
    lp.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    lp.SynthIDTextWatermarkLogitsProcessor,
    lp.DiaEOSDelayPatternLogitsProcessor,
)

_CHANGING_ROPE_TYPES = frozenset({"dynamic", "longrope"})

# Other ways to speculate: they would run instead of the drafter, or change what the target says.
_CONFLICTING_OPTIONS = (
    "assistant_early_exit",
    "assistant_ensemble_weight",
    "dola_layers",
    "prompt_lookup_num_tokens",
    "speculation_type",
    "use_mtp",
)


def refuse_generation(
    target: TargetModel,
    drafter: DSparkDraftModel,
    generation_mode: GenerationMode,
    generation_config: GenerationConfig,
) -> None:
    """Raise for a combination of arguments that a drafter cannot serve.

    Raises:
        UnsupportedGenerationError: an option, a decoding method or a kind of target that cannot be combined.
        IncompatibleTargetError: the drafter was made for another target.
    """
    if generation_mode != GenerationMode.ASSISTED_GENERATION:
        raise UnsupportedGenerationError(
            f"assistant_model works with greedy search and sampling, not with {generation_mode.value}; "
            "set num_beams=1, or leave assistant_model out"
        )
    for option in _CONFLICTING_OPTIONS:
        if value := getattr(generation_config, option, None):
            raise UnsupportedGenerationError(
                f"{option}={value!r} cannot be combined with a DSpark drafter; set it to None, or leave "
                "assistant_model out"
            )
    if generation_config.num_return_sequences > 1:
        raise UnsupportedGenerationError(
            f"num_return_sequences={generation_config.num_return_sequences} makes a batch, and speculation runs one "
            "row at a time in this release; call generate() that many times, or leave assistant_model out"
        )
    if generation_config.use_cache is False:
        raise UnsupportedGenerationError("use_cache=False cannot be combined with a drafter; leave it at True")
    if (scale := generation_config.guidance_scale) is not None and scale != 1:
        raise UnsupportedGenerationError(
            f"guidance_scale={scale} keeps state between steps, which speculation would corrupt; "
            "set it to 1, or leave assistant_model out"
        )
    if target.config.is_encoder_decoder or target._is_stateful:
        kind = "an encoder-decoder" if target.config.is_encoder_decoder else "a recurrent model"
        raise UnsupportedGenerationError(
            f"{type(target).__name__} is {kind}; a drafter needs a decoder-only target whose cache can be rolled back"
        )
    refuse_target(target, drafter)


def refuse_target(target: TargetModel, drafter: DSparkDraftModel) -> None:
    """Raise IncompatibleTargetError where the drafter was not made for this target."""
    if drafter.device.type == "meta":
        raise IncompatibleTargetError("the drafter is on the meta device and has no weights; load it before generating")
    theirs = target.config.get_text_config(decoder=True)
    ours = drafter.config
    pairs: list[tuple[str, Any, Any]] = [
        ("hidden_size", getattr(theirs, "hidden_size", None), ours.hidden_size),
        ("vocab_size", getattr(theirs, "vocab_size", None), ours.vocab_size),
        ("number of decoder layers", getattr(theirs, "num_hidden_layers", None), ours.num_target_layers),
    ]
    for what, target_value, drafter_value in pairs:
        if target_value != drafter_value:
            raise IncompatibleTargetError(
                f"the drafter was made for a target with {what} {drafter_value}, {type(target).__name__} has "
                f"{target_value}; load the drafter of this target"
            )
    head = target.get_output_embeddings()
    for what, module in (("input embedding", target.get_input_embeddings()), ("output head", head)):
        shape = tuple(getattr(getattr(module, "weight", None), "shape", ()))
        # A packed weight of a quantised module has another shape, and says nothing.
        is_plain = (
            isinstance(module, nn.Embedding | nn.Linear) and len(shape) == 2 and module.weight.is_floating_point()
        )
        if is_plain and shape != (ours.vocab_size, ours.hidden_size):
            raise IncompatibleTargetError(
                f"the drafter borrows the target's {what} as [{ours.vocab_size}, {ours.hidden_size}], and "
                f"{type(target).__name__} has one of {list(shape)}; a drafter needs a target whose embedding and head "
                "cover its vocabulary at its hidden size"
            )
    if head is None:
        raise IncompatibleTargetError(
            f"{type(target).__name__} has no output head (get_output_embeddings() is None), and the drafter borrows "
            "it; load the target with AutoModelForCausalLM"
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


def refuse_processors(processors: LogitsProcessorList) -> None:
    """Raise UnsupportedGenerationError for logits processors that keep state between steps."""
    for processor in processors:
        if isinstance(processor, STATEFUL_PROCESSORS):
            raise UnsupportedGenerationError(
                f"{type(processor).__name__} keeps state between steps, which speculation would corrupt; "
                "remove it, or leave assistant_model out"
            )
