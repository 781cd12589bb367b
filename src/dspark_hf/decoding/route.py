"""The route: `model.generate(assistant_model=drafter)` reaches our loop; every other assistant goes its old way.

Three methods of `GenerationMixin` are wrapped. A wrapper looks at the assistant and, unless it is a drafter, calls
what was there before with the same arguments.

A process may hold several copies of this package: the installed one, and the code of drafters that were loaded with
`trust_remote_code=True`. The first of them wraps, and each serves the drafters of its own class.
"""

import copy
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

from transformers import GenerationConfig
from transformers.generation import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode

from .._compat import CACHE_KEY, REQUIRED_PARAMETERS, shared_by_copies, wrapped_method
from ..modeling_dspark import DSparkDraftModel
from .autoregressive import generator_class
from .candidate_generator import DSparkCandidateGenerator
from .loop import dspark_decoding
from .refusals import refuse_assistant, refuse_generation
from .target_refusals import refuse_cache, refuse_target

logger = logging.getLogger(__name__)

_ROUTE_MARK = "_dspark_hf_route"
# Arguments of generate() that this package adds.
OWN_ARGUMENTS = ("verification_policy", "verification_layout")


class _Route(NamedTuple):
    """What a copy of this package does for its drafters; of the same form in every release."""

    check: Callable[..., tuple[GenerationConfig, dict[str, Any]]]
    new_candidate_generator: Callable[..., DSparkCandidateGenerator]
    decode: Callable[..., Any]
    arguments: tuple[str, ...]


_LOCK = shared_by_copies("lock", threading.Lock)
# Of the copies that are installed, by `DSparkDraftModel.package_copy`.
_ROUTES: dict[str, _Route] = shared_by_copies("routes", dict)


def install() -> None:
    """Route drafters through this package's loop. Idempotent; importing `dspark_hf` calls it.

    Raises:
        UnsupportedTransformersError: this transformers release does not have the methods that are wrapped.
    """
    with _LOCK:
        originals = {name: wrapped_method(name) for name in _MAKERS}
        for name, make in _MAKERS.items():
            if not hasattr(originals[name], _ROUTE_MARK):
                wrapper = make(originals[name])
                # The mark is the wrapper itself: a wrapper put on top copies our attributes, but is not its mark.
                setattr(wrapper, _ROUTE_MARK, wrapper)
                setattr(GenerationMixin, name, wrapper)
        # Makes generate() accept the argument, and a GenerationConfig save and load it; None changes nothing.
        for name in OWN_ARGUMENTS:
            if not hasattr(GenerationConfig, name):
                setattr(GenerationConfig, name, None)
        _ROUTES[DSparkDraftModel.package_copy] = _Route(_check, _new_candidate_generator, _decode, OWN_ARGUMENTS)


def uninstall() -> None:
    """Undo [`install`]: drafters are then treated like any other assistant.

    Those of another copy of this package in the process are served as before, until it is uninstalled too. Where
    another library has wrapped the same methods since, our wrappers stay underneath and pass everything on; call it
    again once that library has gone.
    """
    with _LOCK:
        _ROUTES.pop(DSparkDraftModel.package_copy, None)
        for name in _MAKERS:
            method = getattr(GenerationMixin, name)
            is_on_top = getattr(method, _ROUTE_MARK, None) is method
            if is_on_top and not _ROUTES:
                setattr(GenerationMixin, name, method.__wrapped__)
        still_used = {name for route in _ROUTES.values() for name in route.arguments}
        for name in OWN_ARGUMENTS:
            if name in vars(GenerationConfig) and name not in still_used:
                delattr(GenerationConfig, name)


def is_drafter(assistant: object) -> TypeGuard[DSparkDraftModel]:
    """Whether an assistant is a DSpark drafter, told by a marker: a remote-code drafter is another class."""
    return _route_of(assistant) is not None


def _route_of(assistant: object) -> _Route | None:
    """What serves a drafter; None for other assistants, and for drafters whose copy is not installed."""
    if getattr(assistant, "is_dspark_drafter", False) is not True:
        return None
    return _ROUTES.get(getattr(assistant, "package_copy", DSparkDraftModel.package_copy))


# -- what is wrapped ------------------------------------------------------------------------------------------------


def _wrap_validate(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _validate_generation_mode(
        self: Any,
        generation_mode: Any,
        generation_config: Any,
        generation_mode_kwargs: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        assistant = generation_mode_kwargs.get("assistant_model")
        if _ROUTES:
            refuse_assistant(assistant)
        if (route := _route_of(assistant)) is not None:
            generation_config, generation_mode_kwargs = route.check(
                self, assistant, generation_mode, generation_config, generation_mode_kwargs
            )
        original(self, generation_mode, generation_config, generation_mode_kwargs, *args, **kwargs)

    return _validate_generation_mode


def _wrap_get_candidate_generator(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _get_candidate_generator(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafter = kwargs.get("assistant_model")
        route = _route_of(drafter)
        if route is None:
            return original(self, *args, **kwargs)
        return route.new_candidate_generator(self, drafter, kwargs)

    return _get_candidate_generator


def _wrap_assisted_decoding(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _assisted_decoding(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(REQUIRED_PARAMETERS["_assisted_decoding"][1:], args, strict=False)) | kwargs
        route = _route_of(given.get("assistant_model"))
        if route is None:
            return original(self, input_ids, *args, **kwargs)
        return route.decode(self, input_ids, given)

    return _assisted_decoding


_MAKERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "_validate_generation_mode": _wrap_validate,
    "_get_candidate_generator": _wrap_get_candidate_generator,
    "_assisted_decoding": _wrap_assisted_decoding,
}


# -- what this copy does for its drafters ---------------------------------------------------------------------------


def _check(
    target: Any,
    drafter: DSparkDraftModel,
    generation_mode: GenerationMode,
    generation_config: GenerationConfig,
    mode_kwargs: dict[str, Any],
) -> tuple[GenerationConfig, dict[str, Any]]:
    """Refuse what a drafter cannot serve; returns the last two arguments as transformers' own validation takes them."""
    refuse_generation(target, drafter, generation_mode, generation_config, mode_kwargs)
    # What remains to be asked is about the target. Of assistants transformers wants one sequence and equal
    # vocabularies; our loop returns several, and drafts what two vocabularies share.
    generation_config = copy.copy(generation_config)
    generation_config.num_return_sequences = 1
    return generation_config, {k: v for k, v in mode_kwargs.items() if k != "assistant_model"}


def _new_candidate_generator(target: Any, drafter: DSparkDraftModel, given: dict[str, Any]) -> DSparkCandidateGenerator:
    refuse_target(target, drafter)
    return generator_class(drafter)(
        drafter,
        target,
        given["generation_config"],
        given["logits_processor"],
        given["model_kwargs"],
        ids_device=given["input_ids"].device,
    )


def _decode(target: Any, input_ids: Any, given: dict[str, Any]) -> Any:
    """`given`: all arguments of the wrapped method but the first two, by name."""
    # Named arguments of the wrapped method; what remains is generate()'s model_kwargs.
    named = {
        name: given.pop(name, None)
        for name in ("logits_processor", "stopping_criteria", "generation_config", "streamer")
    }
    drafter = given.pop("assistant_model")
    others = {
        name: given.pop(name, None) for name in ("assistant_tokenizer", "tokenizer", "inputs_tensor", "synced_gpus")
    }
    # Asked before, unless the target's class validates in its own way.
    config = named["generation_config"]
    refuse_generation(target, drafter, GenerationMode.ASSISTED_GENERATION, config, others)
    refuse_cache(target, given.get(CACHE_KEY), config.max_length)
    return dspark_decoding(target, input_ids, drafter=drafter, model_kwargs=given, **named)
