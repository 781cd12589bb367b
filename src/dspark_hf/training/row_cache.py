"""A key/value cache whose rows come and go: layers with room to grow, and merging of caches of different width."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from .._compat import CACHE_KEY, TargetModel

# Columns allocated ahead; DynamicLayer itself copies the whole layer for every token.
SPARE_COLUMNS = 64


class RowLayer(DynamicLayer):
    """A full-attention layer that appends in place.

    `keys` and `values` `[rows, heads, columns, dim]` are views of larger buffers.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if self._buffers is None or end > self._buffers[0].shape[-2]:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            room = end + SPARE_COLUMNS
            self._buffers = _grown(self.keys, key_states, room), _grown(self.values, value_states, room)
        keys, values = self._buffers
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values


def can_refill(target: TargetModel) -> bool:
    """Whether rows of the target's cache can be exchanged: plain full attention, positions given by the caller."""
    named = all(takes_argument(target, name) for name in ("position_ids", "attention_mask", CACHE_KEY))
    return named and all(type(layer) is DynamicLayer for layer in DynamicCache(config=target.config).layers)


def takes_argument(target: TargetModel, name: str) -> bool:
    """Whether the target's forward has a parameter of this name."""
    return name in inspect.signature(target.forward).parameters


def new_cache(target: TargetModel) -> DynamicCache:
    """An empty cache of [`RowLayer`]s for a target that passes [`can_refill`]."""
    cache = DynamicCache(config=target.config)
    cache.layers = [RowLayer() for _ in cache.layers]
    return cache


def merge_caches(target: TargetModel, parts: Sequence[tuple[Any, Tensor, Tensor]]) -> tuple[DynamicCache, Tensor]:
    """One cache of the chosen rows of several, aligned at the right, and its mask int64 `[rows, columns]`.

    Columns that are padding in every row go. The caches of the parts are emptied layer by layer, so that the extra
    memory is that of one layer.

    Args:
        target: Whose caches these are.
        parts: Cache, mask int64 `[rows, columns]` and the int64 indices of the rows to keep, at least one.
    """
    merged = new_cache(target)
    if not parts:
        return merged, torch.empty(0, 0, dtype=torch.int64, device=target.device)
    masks = [mask[rows] for _, mask, rows in parts]
    # First column that some row uses; a row's own columns have no gaps.
    used = [int(mask.any(dim=0).int().argmax()) for mask in masks]
    widths = [mask.shape[1] - first for mask, first in zip(masks, used, strict=True)]
    width = max(widths)
    mask = torch.cat([pad(m[:, first:], (width - w, 0)) for m, first, w in zip(masks, used, widths, strict=True)])
    for index, layer in enumerate(merged.layers):
        keys, values = [], []
        for (cache, _, rows), first, own_width in zip(parts, used, widths, strict=True):
            old = cache.layers[index]
            keys.append(_aligned(old.keys, rows, first, width - own_width))
            values.append(_aligned(old.values, rows, first, width - own_width))
            cache.layers[index] = RowLayer()
        assert isinstance(layer, RowLayer)
        layer.update(torch.cat(keys), torch.cat(values))
    return merged, mask


def _aligned(states: Tensor, rows: Tensor, first: int, num_padded: int) -> Tensor:
    """Chosen rows from column `first` on, behind columns of zeros that the mask hides."""
    return pad(states[rows, :, first:], (0, 0, num_padded, 0))


def _grown(states: Tensor | None, like: Tensor, num_columns: int) -> Tensor:
    """A buffer with `num_columns` columns that starts with `states`, which may be None or empty."""
    rows, heads, _, dim = like.shape
    buffer = like.new_empty(rows, heads, num_columns, dim)
    if states is not None and states.numel():
        buffer[:, :, : states.shape[-2]] = states
    return buffer
