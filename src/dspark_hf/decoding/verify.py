"""Stage 4: the target's side of a running generation: its cache, its arguments, its forwards."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig
from transformers.utils import ModelOutput

from .._compat import CACHE_KEY, TargetModel
from ..errors import UnsupportedGenerationError

# Arguments that a chunked prefill knows how to cut or to repeat.
_CHUNKABLE_KWARGS = frozenset(
    {
        "attention_mask",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "position_ids",
        "token_type_ids",
        "use_cache",
        CACHE_KEY,
    }
)

Observer = Callable[[ModelOutput], None]


class TargetRunner:
    """Runs the target's forwards for one generate() call and keeps its cache in step with what is committed.

    Between rounds the cache holds every committed token but the last, the anchor.

    Args:
        model: The target.
        model_kwargs: As generate() prepared them, with the cache.
        generation_config: The call's.
        capture: Extra forward arguments, e.g. `output_hidden_states=[2, 10]` for the drafter's features.
    """

    def __init__(
        self,
        model: TargetModel,
        model_kwargs: dict[str, Any],
        generation_config: GenerationConfig,
        capture: dict[str, Any],
    ) -> None:
        self._model = model
        self._kwargs = model_kwargs
        self._generation_config = generation_config
        self._capture = capture
        self._num_cached = 0  # positions of committed tokens; 0 until the prompt is committed
        self._prompt_length = 0
        self.cache: Cache = model_kwargs[CACHE_KEY]
        self._decode_forward = (
            model.get_compiled_call(generation_config.compile_config)
            if model._valid_auto_compile_criteria(model_kwargs, generation_config)
            else model.__call__
        )

    @contextmanager
    def guarding_cache(self) -> Iterator[None]:
        """Leave the cache usable by plain generation, whatever happens: committed tokens only, nothing recording."""
        try:
            yield
        except BaseException:
            self._drop_uncommitted()
            raise
        finally:
            for layer in self.cache.layers:
                if hasattr(layer, "record_past"):
                    layer.record_past = False

    def refuse_prompt(self, input_ids: Tensor) -> None:
        """Raise for a prompt that [`prefill`] could not run; nothing has been touched by then.

        Raises:
            UnsupportedGenerationError: the cache cannot be rolled back, or the inputs cannot be cut into chunks.
        """
        chunk_size = self._generation_config.prefill_chunk_size
        uncuttable = sorted(
            key for key, value in self._kwargs.items() if value is not None and key not in _CHUNKABLE_KWARGS
        )
        if chunk_size is not None and chunk_size < input_ids.shape[1] and uncuttable:
            raise UnsupportedGenerationError(
                f"prefill_chunk_size={chunk_size} cannot cut the inputs {uncuttable} (images, videos or sounds, or "
                "what your model takes besides tokens); set prefill_chunk_size=None"
            )
        if not any(self.cache.is_linear):  # such layers know only after their first forward
            self._require_roll_back()

    def prefill(self, input_ids: Tensor, observe: Observer) -> ModelOutput:
        """Run the prompt `[1, length]`, in chunks if generate() was asked to, and return the last forward's outputs.

        `observe` sees the outputs of every forward.

        Raises:
            UnsupportedGenerationError: the cache turns out to be recurrent, or not to hold one position per token.
        """
        length = input_ids.shape[1]
        outputs = None
        for ids, kwargs in self._prompt_chunks(input_ids):
            inputs = self._model.prepare_inputs_for_generation(ids, is_first_iteration=True, **kwargs)
            outputs = self._model(**inputs | self._capture, return_dict=True)
            self._require_roll_back()
            observe(outputs)
        assert outputs is not None, "a prompt has at least one chunk"
        if (num_cached := int(self.cache.get_seq_length())) != length:
            raise UnsupportedGenerationError(
                f"{type(self._model).__name__} put {num_cached} positions into its cache for a prompt of {length} "
                "tokens (a soft prompt, or a model without a cache); a drafter needs one position per token. Leave "
                "assistant_model out"
            )
        # From here on layers of fixed size keep what a roll-back needs. Not before: a layer that records keeps the
        # whole prompt, and convolution layers do not pad prompts shorter than their kernel then.
        self.cache.activate_past_recording()
        self._prompt_length = length
        return outputs

    def verify(self, ids: Tensor, draft_tokens: Tensor) -> ModelOutput:
        """Run anchor and drafts: `ids` `[1, length]` committed tokens, `draft_tokens` `[1, width]`.

        Returns:
            The target's outputs; `logits` is `[1, 1 + width, vocab]`.
        """
        width = draft_tokens.shape[1]
        inputs = self._model.prepare_inputs_for_generation(
            torch.cat([ids, draft_tokens], dim=1),
            next_sequence_length=width + 1,
            is_first_iteration=False,
            **_lengthened(self._kwargs, width),
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = width + 1
        outputs: ModelOutput = self._decode_forward(**inputs | self._capture, return_dict=True)
        return outputs

    def commit(self, outputs: ModelOutput, num_tokens: int, num_surplus: int) -> None:
        """Take `num_tokens` new tokens as committed and forget the last `num_surplus` positions of the forward."""
        self.cache.crop(-num_surplus)
        self._kwargs = self._model._update_model_kwargs_for_generation(
            outputs, self._kwargs, is_encoder_decoder=False, num_new_tokens=num_tokens
        )
        # Tracked here: a static cache would have to copy its length from the device.
        self._num_cached = (self._num_cached or self._prompt_length - 1) + num_tokens

    def _require_roll_back(self) -> None:
        if not self.cache.is_croppable:
            raise UnsupportedGenerationError(
                f"the cache of {type(self._model).__name__} cannot be rolled back ({self.cache}): it is recurrent, or "
                "its sliding window is shorter than max_length; use the default cache or a shorter max_length"
            )

    def _drop_uncommitted(self) -> None:
        """Bring every layer back to the committed length; a forward that failed may have reached only some."""
        layers: list[Any] = self.cache.layers
        if self._num_cached == 0 or not all(hasattr(layer, "get_seq_length") for layer in layers):
            # Convolution layers cannot tell how far the forward came. A reset zeroes what a recording one has
            # collected, but keeps its size, which plain generation does not expect.
            for layer in layers:
                for i, size in getattr(layer, "conv_kernel_size", {}).items():
                    if layer.conv_states[i] is not None:
                        layer.conv_states[i] = layer.conv_states[i][..., -size:]
            self.cache.reset()
            return
        for layer in layers:
            surplus = int(layer.get_seq_length()) - self._num_cached
            if surplus > 0:
                layer.crop(-surplus)

    def _prompt_chunks(self, input_ids: Tensor) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        length = input_ids.shape[1]
        chunk_size = self._generation_config.prefill_chunk_size or length
        if chunk_size >= length:
            yield input_ids, self._kwargs
            return
        for start in range(0, length, chunk_size):
            end = min(start + chunk_size, length)
            kwargs = dict(self._kwargs)
            # Read by position, from 0 to the chunk's end.
            for key in ("attention_mask", "token_type_ids"):
                if kwargs.get(key) is not None:
                    kwargs[key] = kwargs[key][..., :end]
            if kwargs.get("position_ids") is not None:
                kwargs["position_ids"] = kwargs["position_ids"][..., start:end]
            yield input_ids[:, start:end], kwargs


def _lengthened(model_kwargs: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """A copy of generate()'s kwargs whose per-token tensors cover `num_tokens` more tokens of the same text."""
    if num_tokens == 0:
        return model_kwargs
    kwargs = dict(model_kwargs)
    if (mask := kwargs.get("attention_mask")) is not None:
        kwargs["attention_mask"] = torch.cat([mask, mask.new_ones(mask.shape[0], num_tokens)], dim=-1)
    if (positions := kwargs.get("position_ids")) is not None:
        steps = torch.arange(1, num_tokens + 1, dtype=positions.dtype, device=positions.device)
        kwargs["position_ids"] = torch.cat([positions, positions[..., -1:] + steps], dim=-1)
    if (types := kwargs.get("token_type_ids")) is not None:
        kwargs["token_type_ids"] = torch.cat([types, types[:, -1:].expand(-1, num_tokens)], dim=-1)
    if (types := kwargs.get("mm_token_type_ids")) is not None:  # drafts are text, type 0
        kwargs["mm_token_type_ids"] = torch.cat([types, types.new_zeros(types.shape[0], num_tokens)], dim=-1)
    return kwargs


def last_logits(outputs: Any, num_positions: int, device: torch.device) -> Tensor:
    """The logits `[rows, num_positions, vocab]` at the end of a forward, float32 on the ids' device."""
    logits: Tensor = outputs.logits[:, -num_positions:].to(dtype=torch.float32, device=device)
    return logits
