"""Stage 4 for several rows: the target's forwards over rows of different lengths, on a cache with a place per row."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, GenerationConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import ModelOutput

from .._compat import CACHE_KEY, TargetModel
from ..model.row_attention import NAME as ROW_ATTENTION
from ..model.row_attention import RowStream, streaming, takes_rows
from ..model.row_slots import RowBuffer, RowSlots, attention_mask_for, columns_to_see

_NEEDED_ARGUMENTS = ("position_ids", "attention_mask", CACHE_KEY)


def why_not_together(model: TargetModel) -> str | None:
    """Why rows of this target cannot share a forward here; None when they can."""
    config = model.config.get_text_config(decoder=True)
    parameters = inspect.signature(model.forward).parameters
    if config is not model.config:
        return "it is more than a text model"
    if missing := [name for name in _NEEDED_ARGUMENTS if name not in parameters]:
        return f"its forward has no {missing[0]}"
    if getattr(config, "alibi", False):
        return "its attention (ALiBi) counts columns"
    if config._attn_implementation not in ("sdpa", "eager", ROW_ATTENTION):
        return f"its attention is {config._attn_implementation!r}, and masks of one's own need 'sdpa' or 'eager'"
    if model.device.type == "meta" or len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "it is spread over devices"
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    if not kinds or not kinds <= {DynamicLayer, DynamicSlidingWindowLayer}:
        return "its cache is not one of keys and values only"
    if DynamicSlidingWindowLayer in kinds and not _window_of(config):
        return "its layers have windows of different kinds"
    if len(kinds) == 2 and set(config.layer_types) != {"full_attention", "sliding_attention"}:
        return f"it has layers of the kinds {sorted(set(config.layer_types))}"
    return None


def why_not_flat(model: TargetModel) -> str | None:
    """Why rows of this target cannot be one stream; None when they can."""
    if not takes_rows(model):
        return f"its attention is {model.config._attn_implementation!r}, of its own or not SDPA"
    return None


def _window_of(config: Any) -> int | None:
    windows = {
        int(layer.sliding_window)
        for layer in DynamicCache(config=config).layers
        if type(layer) is DynamicSlidingWindowLayer
    }
    return windows.pop() if len(windows) == 1 else None


class RowLayer(CacheLayerMixin):
    """One target layer's keys and values of all rows; the cache says where a forward's tokens go."""

    is_croppable = True

    def __init__(self, capacity: int, num_rows: int) -> None:
        super().__init__()
        self.buffers = RowBuffer(capacity, num_rows), RowBuffer(capacity, num_rows)
        self.slots: RowSlots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The buffers allocate themselves."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = self.buffers
        return keys.write(key_states, self.slots), values.write(value_states, self.slots)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.num_columns, 0

    def get_seq_length(self) -> int:
        return self.slots.num_columns

    def get_max_length(self) -> int:
        return self.buffers[0].capacity


@dataclass(frozen=True)
class RowOutputs:
    """What a target forward says about a grid of tokens.

    Attributes:
        logits: `[rows, num_logits, vocab]`, as the target returned them.
        hidden_states: As the target returned them, `[rows, tokens, hidden]` each; some may be None.
    """

    logits: Tensor
    hidden_states: tuple[Tensor | None, ...]


class RowTarget:
    """Runs the target for several rows.

    Args:
        model: A target that passes [`why_not_together`].
        num_rows: Rows at the start.
        capacity: Most tokens of a row, padding not counted.
        capture: Extra forward arguments, e.g. `output_hidden_states=[2, 10]`.
        compiled: The target's compiled forward, for rounds; shapes then stay what they are.
    """

    def __init__(
        self,
        model: TargetModel,
        num_rows: int,
        capacity: int,
        capture: dict[str, Any],
        compiled: Callable[..., Any] | None = None,
    ) -> None:
        self._model = model
        self._capture = capture
        self._capacity = capacity
        self._compiled = compiled
        config = model.config.get_text_config(decoder=True)
        layers = DynamicCache(config=config).layers
        self._layers = [RowLayer(capacity, num_rows) for _ in layers]
        self._cache = Cache(layers=list(self._layers))
        self._window = _window_of(config)
        slides = [type(layer) is DynamicSlidingWindowLayer for layer in layers]
        self._slides_somewhere = any(slides) and not all(slides)
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters

    @classmethod
    def for_call(
        cls,
        model: TargetModel,
        num_rows: int,
        capture: dict[str, Any],
        model_kwargs: dict[str, Any],
        generation_config: GenerationConfig,
    ) -> "RowTarget":
        """For one generate() call; compiled where generate() would compile its own rounds."""
        capacity: int = generation_config.max_length
        if not model._valid_auto_compile_criteria(model_kwargs, generation_config):
            return cls(model, num_rows, capacity, capture)
        # The cache that generate() prepared is as long as that of the longest call before, so that texts of other
        # lengths need no new graph; it has no place for the last token, which is never run.
        capacity = max(capacity, model_kwargs[CACHE_KEY].get_max_length() + 1)
        return cls(model, num_rows, capacity, capture, model.get_compiled_call(generation_config.compile_config))

    @property
    def is_compiled(self) -> bool:
        """Whether rounds should come in few shapes."""
        return self._compiled is not None

    def prefill(
        self, tokens: Tensor, positions: Tensor, is_real: Tensor, *, num_columns: int, num_flat: int | None = None
    ) -> RowOutputs:
        """Run a part of the prompts; logits for the last token only. As [`forward`]."""
        return self._forward(self._model, tokens, positions, is_real, num_columns, 1, num_flat)

    def forward(
        self, tokens: Tensor, positions: Tensor, is_real: Tensor, *, num_columns: int, num_flat: int | None = None
    ) -> RowOutputs:
        """Run `tokens` int64 `[rows, tokens]` and put their keys and values into the cache.

        Args:
            positions: int64, same shape; of padding any that its row has.
            is_real: bool, same shape; False: padding, whose outputs mean nothing.
            num_columns: The largest position plus one.
            num_flat: How many tokens are real: then they run as one stream; None: the grid runs as it is.
        """
        call = self._model
        if self._compiled is not None and num_flat is None:  # streams come in any number of tokens
            call, num_columns = self._compiled, self._capacity
        return self._forward(call, tokens, positions, is_real, num_columns, tokens.shape[1], num_flat)

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but those of int64 `rows`."""
        for layer in self._layers:
            for buffer in layer.buffers:
                buffer.keep(rows)

    def _forward(
        self,
        call: Callable[..., Any],
        tokens: Tensor,
        positions: Tensor,
        is_real: Tensor,
        num_columns: int,
        num_logits: int,
        num_flat: int | None,
    ) -> RowOutputs:
        num_columns = columns_to_see(num_columns, self._capacity, self._model.device)
        # Prompts may be on the host, as in plain generation; the loop then computes there.
        tokens, positions, is_real = (part.to(self._model.device) for part in (tokens, positions, is_real))
        options: dict[str, Any] = {"logits_to_keep": num_logits} if self._takes_logits_to_keep else {}
        inputs, stream = (tokens, positions), None
        if num_flat is None:
            slots = RowSlots.of(positions, is_real, self._capacity, num_columns)
        else:
            stream = RowStream.of(is_real, num_flat)
            inputs = stream.flatten(tokens), stream.flatten(positions)
            slots = RowSlots(inputs[1], num_columns, stream.rows[None])
            options = {}
            if self._takes_logits_to_keep and num_logits < tokens.shape[1]:
                options["logits_to_keep"] = stream.source[:, -num_logits:].flatten()
        for layer in self._layers:
            layer.slots = slots
        mask = self._mask(positions, num_columns)
        with streaming(stream):
            outputs: ModelOutput = call(
                input_ids=inputs[0],
                position_ids=inputs[1],
                attention_mask=mask,
                use_cache=True,
                return_dict=True,
                **{CACHE_KEY: self._cache},
                **options,
                **self._capture,
            )
        return self._to_grid(outputs, stream, num_logits)

    def _to_grid(self, outputs: Any, stream: RowStream | None, num_logits: int) -> RowOutputs:
        hidden_states = tuple(getattr(outputs, "hidden_states", None) or ())
        logits = outputs.logits
        if stream is None:
            return RowOutputs(logits[:, -num_logits:], hidden_states)
        in_grid = tuple(None if layer is None else stream.to_grid(layer) for layer in hidden_states)
        rows, width = stream.source.shape
        if logits.shape[1] == rows * num_logits and num_logits < width:
            return RowOutputs(logits.view(rows, num_logits, -1), in_grid)
        return RowOutputs(stream.to_grid(logits)[:, -num_logits:], in_grid)

    def _mask(self, positions: Tensor, num_columns: int) -> Tensor | dict[str, Tensor]:
        """Who sees whom, bool `[rows, 1, tokens, columns]`; by kind of layer where a model has two."""
        columns = torch.arange(num_columns, device=positions.device)
        distance = positions[:, None, :, None] - columns
        causal = distance >= 0
        implementation, dtype = self._model.config._attn_implementation, self._model.dtype
        full = attention_mask_for(implementation, causal, dtype)
        if self._window is None:
            return full
        windowed = attention_mask_for(implementation, causal & (distance < self._window), dtype)
        return {"full_attention": full, "sliding_attention": windowed} if self._slides_somewhere else windowed
