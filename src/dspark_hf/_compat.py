"""Every question about the installed transformers version, in one place.

The route wraps three methods of `GenerationMixin`. They are not public, so their signatures are checked when the
route is installed: a clear message then is better than a wrong call at the first token.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import transformers
from transformers.generation import GenerationMixin

from .errors import UnsupportedTransformersError

SUPPORTED_TRANSFORMERS = ">=5.24,<6"

# A `PreTrainedModel` that is a `GenerationMixin`; transformers has no class that is both, so no type says it.
TargetModel: TypeAlias = Any

# Name of the key/value cache argument in `model_kwargs`, in forward() and in model outputs (5.24 and later).
CACHE_KEY = "cache"

# transformers merges these values into every generation config, so finding one means "the user said nothing".
MERGED_NUM_ASSISTANT_TOKENS = 20
MERGED_CONFIDENCE_THRESHOLD = 0.4

REQUIRED_PARAMETERS: dict[str, frozenset[str]] = {
    "_assisted_decoding": frozenset(
        {
            "input_ids",
            "logits_processor",
            "stopping_criteria",
            "generation_config",
            "synced_gpus",
            "streamer",
            "inputs_tensor",
            "assistant_model",
            "assistant_tokenizer",
            "tokenizer",
        }
    ),
    "_validate_generation_mode": frozenset({"generation_mode", "generation_config", "generation_mode_kwargs"}),
    "_get_candidate_generator": frozenset(
        {
            "generation_config",
            "input_ids",
            "inputs_tensor",
            "logits_processor",
            "model_kwargs",
            "assistant_model",
        }
    ),
}


def check_overridable(cls: type, names: tuple[str, ...]) -> None:
    """Raise unless a class of transformers has all methods that a subclass of ours overrides.

    Raises:
        UnsupportedTransformersError: one is missing; the override would never be called.
    """
    missing = [name for name in names if not callable(getattr(cls, name, None))]
    if missing:
        raise UnsupportedTransformersError(
            f"transformers {transformers.__version__} has no {cls.__name__}.{missing[0]}; dspark_hf works with "
            f'transformers {SUPPORTED_TRANSFORMERS}: pip install "transformers{SUPPORTED_TRANSFORMERS}"'
        )


def wrapped_method(name: str) -> Callable[..., Any]:
    """The current `GenerationMixin.<name>`, checked to have the parameters the route passes on.

    Raises:
        UnsupportedTransformersError: the method or one of its parameters is missing.
    """
    method = getattr(GenerationMixin, name, None)
    present = frozenset(inspect.signature(method).parameters) if callable(method) else frozenset()
    missing = sorted(REQUIRED_PARAMETERS[name] - present)
    if method is None or missing:
        raise UnsupportedTransformersError(
            f"transformers {transformers.__version__} has no GenerationMixin.{name} with the parameters {missing}; "
            f"dspark_hf works with transformers {SUPPORTED_TRANSFORMERS}: "
            f'pip install "transformers{SUPPORTED_TRANSFORMERS}"'
        )
    checked: Callable[..., Any] = method
    return checked
