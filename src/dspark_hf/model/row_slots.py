"""Keys and values of rows that stand at different lengths, in one buffer: every row writes at its own columns.

Rolling a row back is forgetting how far it had come: what lies behind a row's length is hidden by the mask, and
overwritten by the row's next tokens. One column at the end takes what belongs to no row, the padding of a forward.
"""

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from .context_cache import DraftContextCache

# Columns that a forward looks at come in multiples of this: CUDA kernels copy masks that are not aligned, and cuDNN,
# which torch prefers on Hopper, spends tens of milliseconds on each number of columns that is new to it.
COLUMN_STEP = 64


def columns_to_see(num_columns: int, capacity: int, device: torch.device) -> int:
    """At least `num_columns`, at most `capacity`; few different numbers, except on a CPU, where exact is quickest.

    The mask hides what is too much.
    """
    step = 1 if device.type == "cpu" else COLUMN_STEP
    return min(-(-num_columns // step) * step, capacity)


@dataclass(frozen=True)
class RowSlots:
    """Where the tokens of one forward go.

    Attributes:
        columns: int64 `[rows, tokens]`, below `capacity`, or `capacity` for padding; of a stream `[1, tokens]`.
        num_columns: Columns that this forward's queries look at, from the first on.
        rows: int64 `[rows, 1]`, or of a stream `[1, tokens]`: the row of each token.
    """

    columns: Tensor
    num_columns: int
    rows: Tensor

    @classmethod
    def of(cls, positions: Tensor, is_real: Tensor, capacity: int, num_columns: int) -> "RowSlots":
        """Slots of tokens at int64 `positions` `[rows, tokens]`; those that are not real are padding."""
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        return cls(torch.where(is_real, positions, capacity), num_columns, rows)


class RowBuffer:
    """`[rows, heads, capacity + 1, dim]`, allocated once, by the first write.

    Args:
        capacity: Most tokens of a row.
        num_rows: Needed where the first write may be a stream.
    """

    def __init__(self, capacity: int, num_rows: int | None = None) -> None:
        self.capacity = capacity
        self._num_rows = num_rows
        self._buffer: Tensor | None = None

    def write(self, states: Tensor, slots: RowSlots) -> Tensor:
        """Put `states` `[rows, heads, tokens, dim]` into their slots, or those of a stream `[1, heads, tokens, dim]`.

        Returns:
            A view `[rows, heads, num_columns, dim]` of the columns that count.
        """
        rows, heads, _, dim = states.shape
        if self._buffer is None:
            # Zeros: a hidden column still takes part in products, where NaN would spread.
            self._buffer = states.new_zeros(self._num_rows or rows, heads, self.capacity + 1, dim)
            if not torch.compiler.is_compiling():
                # As in transformers' static cache: CUDA graphs are skipped where they would change any other input.
                torch._dynamo.mark_static_address(self._buffer)
        # Ten times quicker than scatter_ on a CPU.
        self._buffer[slots.rows, :, slots.columns] = states.transpose(1, 2)
        return self._buffer[:, :, : slots.num_columns]

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but those of int64 `rows`."""
        if self._buffer is not None:
            self._buffer = self._buffer[rows]


def attention_mask_for(implementation: str | None, is_seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as an attention implementation takes it: bool `is_seen`, or for eager attention what is added."""
    if implementation != "eager":
        return is_seen
    added = torch.zeros(is_seen.shape, dtype=dtype, device=is_seen.device)
    return added.masked_fill(~is_seen, torch.finfo(dtype).min)


class RowContextCache:
    """The drafter's context of several rows, as [`DraftContextCache`] is that of one.

    Args:
        num_layers: Draft layers.
        capacity: Most tokens of a row, a block included.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.slots: RowSlots
        self._buffers = [(RowBuffer(capacity), RowBuffer(capacity)) for _ in range(num_layers)]

    def append(self, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write `[rows, kv_heads, tokens, head_dim]` into `slots`; views of all columns that count."""
        key_buffer, value_buffer = self._buffers[layer_idx]
        return key_buffer.write(keys, self.slots), value_buffer.write(values, self.slots)

    def num_columns(self, num_new: int) -> int:
        """Columns of what [`append`] returns; column j holds position j of each row."""
        return self.slots.num_columns

    def commit(self, num_tokens: int) -> None:
        """Nothing to note: what counts is what the next forward's slots and mask say."""

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but those of int64 `rows`."""
        for pair in self._buffers:
            for buffer in pair:
                buffer.keep(rows)


DraftCache: TypeAlias = DraftContextCache | RowContextCache
