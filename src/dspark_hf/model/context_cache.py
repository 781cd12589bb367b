"""Key/value cache of the drafter: projected target features of committed tokens, plus room for one block."""

import torch
from torch import Tensor

# Positions added at once when a buffer is full; growth then doubles, so that copying stays linear in the length.
_MIN_CAPACITY = 256


class DraftContextCache:
    """Per-layer keys and values of the committed context, in buffers that are larger than what is filled.

    A block's keys and values are written behind the context and seen by that block only: since `length` moves on
    only through [`commit`], the next write overwrites them. Rolling back therefore costs nothing.

    One instance belongs to one running generation; the drafter itself holds no state.
    """

    def __init__(self, num_layers: int) -> None:
        self.length = 0
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers

    def append(self, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write behind the committed context and return everything up to the end of what was written.

        Args:
            layer_idx: Draft layer.
            keys, values: `[rows, kv_heads, new_tokens, head_dim]`.

        Returns:
            Views `[rows, kv_heads, length + new_tokens, head_dim]` of keys and values.
        """
        end = self.length + keys.shape[2]
        all_keys = self._keys[layer_idx] = self._room_for(end, self._keys[layer_idx], keys)
        all_values = self._values[layer_idx] = self._room_for(end, self._values[layer_idx], values)
        all_keys[:, :, self.length : end] = keys
        all_values[:, :, self.length : end] = values
        return all_keys[:, :, :end], all_values[:, :, :end]

    def num_columns(self, num_new: int) -> int:
        """Columns of what [`append`] of `num_new` tokens returns; column j holds position j."""
        return self.length + num_new

    def commit(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` positions of what every layer wrote last."""
        self.length += num_tokens

    def forget(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` positions that were committed; the next write overwrites them."""
        self.length -= num_tokens

    def _room_for(self, end: int, buffer: Tensor | None, like: Tensor) -> Tensor:
        if buffer is not None and buffer.shape[2] >= end:
            return buffer
        rows, heads, _, head_dim = like.shape
        capacity = max(_MIN_CAPACITY, 2 * end)
        grown = torch.empty((rows, heads, capacity, head_dim), dtype=like.dtype, device=like.device)
        if buffer is not None:
            grown[:, :, : self.length] = buffer[:, :, : self.length]
        return grown
