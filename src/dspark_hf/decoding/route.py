"""The route: `model.generate(assistant_model=drafter)` reaches our loop; every other assistant goes its old way.

Three methods of `GenerationMixin` are wrapped. A wrapper looks at the assistant and, unless it is a drafter, calls
what was there before with the same arguments.
"""

import copy
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeGuard

from transformers import GenerationConfig
from transformers.generation import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode

from .._compat import CACHE_KEY, REQUIRED_PARAMETERS, wrapped_method
from ..modeling_dspark import DSparkDraftModel
from .candidate_generator import DSparkCandidateGenerator
from .loop import dspark_decoding
from .refusals import refuse_assistant, refuse_generation
from .target_refusals import refuse_cache, refuse_target

logger = logging.getLogger(__name__)

_ROUTE_MARK = "_dspark_hf_route"
# Set on GenerationMixin while the route is on. There, so that every copy of this package in a process (a remote-code
# one, one imported again) sees the same: whichever came first has its wrappers in place, for drafters of all copies.
_ENABLED_MARK = "_dspark_hf_route_is_enabled"
# Arguments of generate() that this package adds.
OWN_ARGUMENTS = ("verification_policy", "verification_layout")
_LOCK = threading.Lock()


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
        setattr(GenerationMixin, _ENABLED_MARK, True)


def uninstall() -> None:
    """Undo [`install`]: drafters are then treated like any other assistant.

    Where another library has wrapped the same methods since, our wrappers stay underneath and pass everything on;
    call it again once that library has gone.
    """
    with _LOCK:
        if _ENABLED_MARK in vars(GenerationMixin):
            delattr(GenerationMixin, _ENABLED_MARK)
        for name in _MAKERS:
            method = getattr(GenerationMixin, name)
            is_on_top = getattr(method, _ROUTE_MARK, None) is method
            if is_on_top:
                setattr(GenerationMixin, name, method.__wrapped__)
        for name in OWN_ARGUMENTS:
            if name in vars(GenerationConfig):
                delattr(GenerationConfig, name)


def is_drafter(assistant: object) -> TypeGuard[DSparkDraftModel]:
    """Whether an assistant is a DSpark drafter, told by a marker: a remote-code drafter is another class."""
    return _is_enabled() and getattr(assistant, "is_dspark_drafter", False) is True


def _is_enabled() -> bool:
    return getattr(GenerationMixin, _ENABLED_MARK, False)


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
        if _is_enabled():
            refuse_assistant(assistant)
        if is_drafter(assistant):
            refuse_generation(self, assistant, generation_mode, generation_config, generation_mode_kwargs)
            # What remains to be asked is about the target. Of assistants transformers wants one sequence and equal
            # vocabularies; our loop returns several, and drafts what two vocabularies share.
            generation_config = copy.copy(generation_config)
            generation_config.num_return_sequences = 1
            generation_mode_kwargs = {k: v for k, v in generation_mode_kwargs.items() if k != "assistant_model"}
        original(self, generation_mode, generation_config, generation_mode_kwargs, *args, **kwargs)

    return _validate_generation_mode


def _wrap_get_candidate_generator(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _get_candidate_generator(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafter = kwargs.get("assistant_model")
        if not is_drafter(drafter):
            return original(self, *args, **kwargs)
        refuse_target(self, drafter)
        return DSparkCandidateGenerator(
            drafter,
            self,
            kwargs["generation_config"],
            kwargs["logits_processor"],
            kwargs["model_kwargs"],
            ids_device=kwargs["input_ids"].device,
        )

    return _get_candidate_generator


def _wrap_assisted_decoding(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _assisted_decoding(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(REQUIRED_PARAMETERS["_assisted_decoding"][1:], args, strict=False)) | kwargs
        drafter = given.get("assistant_model")
        if not is_drafter(drafter):
            return original(self, input_ids, *args, **kwargs)
        # Named arguments of the wrapped method; what remains is generate()'s model_kwargs.
        named = {
            name: given.pop(name, None)
            for name in ("logits_processor", "stopping_criteria", "generation_config", "streamer")
        }
        others = {
            name: given.pop(name, None)
            for name in ("assistant_model", "assistant_tokenizer", "tokenizer", "inputs_tensor", "synced_gpus")
        }
        # Asked before, unless the target's class validates in its own way.
        config = named["generation_config"]
        refuse_generation(self, drafter, GenerationMode.ASSISTED_GENERATION, config, others)
        refuse_cache(self, given.get(CACHE_KEY), config.max_length)
        return dspark_decoding(self, input_ids, drafter=drafter, model_kwargs=given, **named)

    return _assisted_decoding


_MAKERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "_validate_generation_mode": _wrap_validate,
    "_get_candidate_generator": _wrap_get_candidate_generator,
    "_assisted_decoding": _wrap_assisted_decoding,
}
