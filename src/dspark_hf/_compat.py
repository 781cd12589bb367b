"""Every question about the installed transformers version, in one place.

The route wraps three methods of `GenerationMixin`. They are not public, so their signatures are checked when the
route is installed: a clear message then is better than a wrong call at the first token.
"""

import inspect
import logging
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import transformers
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from .errors import UnsupportedTransformersError

logger = logging.getLogger(__name__)

SUPPORTED_TRANSFORMERS = ">=5.24,<6"

T = TypeVar("T")

# A `PreTrainedModel` that is a `GenerationMixin`; transformers has no class that is both, so no type says it.
TargetModel: TypeAlias = Any

# Name of the key/value cache argument in `model_kwargs`, in forward() and in model outputs (5.24 and later).
CACHE_KEY = "cache"

# transformers merges these values into every generation config, so finding one means "the user said nothing".
MERGED_NUM_ASSISTANT_TOKENS = 20
MERGED_CONFIDENCE_THRESHOLD = 0.4

# In the order of the signatures: transformers passes some of them by position.
REQUIRED_PARAMETERS: dict[str, tuple[str, ...]] = {
    "_assisted_decoding": (
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
    ),
    "_validate_generation_mode": ("generation_mode", "generation_config", "generation_mode_kwargs"),
    "_get_candidate_generator": (
        "generation_config",
        "input_ids",
        "inputs_tensor",
        "logits_processor",
        "model_kwargs",
        "assistant_model",
    ),
}


def check_version() -> None:
    """Raise for a transformers older than the floor, and warn of one from the next major release.

    Before the floor the cache argument has another name, which no signature shows. Of a later release the signatures
    tell more than its number.

    Raises:
        UnsupportedTransformersError: the release is too old.
    """
    release = Version(transformers.__version__).base_version  # 5.24.0.dev0 has what 5.24 has
    supported = SpecifierSet(SUPPORTED_TRANSFORMERS)
    if supported.contains(release):
        return
    floor = min(Version(spec.version) for spec in supported if spec.operator == ">=")
    if Version(release) < floor:
        raise _unsupported("is too old")
    logger.warning(
        "transformers %s is newer than what dspark_hf was tested with (%s); if something fails, install that",
        transformers.__version__,
        SUPPORTED_TRANSFORMERS,
    )


@contextmanager
def naming_the_version() -> Iterator[None]:
    """Around imports: a name that transformers no longer has becomes an error that says which release has it.

    Raises:
        UnsupportedTransformersError: an import from transformers failed.
    """
    try:
        yield
    except UnsupportedTransformersError:
        raise
    except ImportError as error:
        if (error.name or "").split(".")[0] != "transformers":
            raise
        raise _unsupported(f"lacks a name ({error})") from error


def shared_by_copies(name: str, make: Callable[[], T]) -> T:
    """The one object of this process under `name`; the copy of this package that asks first makes it.

    Copies are the installed package, and the code of each drafter that was loaded with `trust_remote_code=True`. They
    may be of different releases, so what is shared keeps its form, or gets another name.
    """
    module = sys.modules.setdefault("_dspark_hf_shared", types.ModuleType("_dspark_hf_shared"))
    shared: T = vars(module).setdefault(name, make())
    return shared


def let_record_outputs(model: TargetModel) -> None:
    """Make transformers return the hidden states of a model that came here in a pickle.

    It learns which outputs a class can record when one is constructed; a process that was sent its models has
    constructed none, and would get None.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    registry = getattr(capturing, "_CAN_RECORD_REGISTRY", None)
    if registry is None:
        return
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel) and not registry.get(module):
            registry[module] = module._can_record_outputs


def check_overridable(cls: type, names: tuple[str, ...]) -> None:
    """Raise unless a class of transformers has all methods that a subclass of ours overrides.

    Raises:
        UnsupportedTransformersError: one is missing; the override would never be called.
    """
    missing = [name for name in names if not callable(getattr(cls, name, None))]
    if missing:
        raise _unsupported(f"has no {cls.__name__}.{missing[0]}")


def wrapped_method(name: str) -> Callable[..., Any]:
    """The current `GenerationMixin.<name>`, checked to have the parameters the route passes on, and no other to fill.

    A wrapper of another library that takes anything hides them, and is taken at its word.

    Raises:
        UnsupportedTransformersError: the method or one of its parameters is missing, moved or new.
    """
    required = REQUIRED_PARAMETERS[name]
    method = getattr(transformers.GenerationMixin, name, None)
    if not callable(method):
        raise _unsupported(f"has no GenerationMixin.{name}")
    checked: Callable[..., Any] = method
    parameters = inspect.signature(method).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    if {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds:
        return checked
    if missing := sorted(set(required) - parameters.keys()):
        raise _unsupported(f"has no GenerationMixin.{name} with the parameters {missing}")
    if [parameter for parameter in parameters if parameter in required] != list(required):
        raise _unsupported(f"has the parameters of GenerationMixin.{name} in another order than {list(required)}")
    unknown = [
        parameter.name
        for parameter in list(parameters.values())[1:]  # after self
        if parameter.name not in required
        and parameter.default is parameter.empty
        and parameter.kind != parameter.VAR_KEYWORD
    ]
    if unknown:
        raise _unsupported(f"has a GenerationMixin.{name} that requires {unknown}, which this package does not know")
    return checked


def _unsupported(what: str) -> UnsupportedTransformersError:
    return UnsupportedTransformersError(
        f"transformers {transformers.__version__} {what}; dspark_hf works with transformers "
        f'{SUPPORTED_TRANSFORMERS}: pip install "transformers{SUPPORTED_TRANSFORMERS}"'
    )
