"""Attention of several rows: keys are shared by their group of heads without copies, and rows may come as one stream.

Masks of one's own make transformers' SDPA repeat keys and values for every query head, the whole cache at every step.
Here the heads of a group become queries of their shared key head instead, which is the same product.

The function stands in for SDPA while a batch runs. Without a stream it computes what SDPA computes, so other calls of
the same model, in other threads, lose nothing.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from .._compat import TargetModel
from .._version import __version__

# By release, since the copies of one release share what is registered under it.
NAME = f"dspark_rows_{__version__}"

_LOCK = threading.Lock()
_NUM_USERS: dict[int, int] = {}  # by the id of a config, which models may share


@dataclass(frozen=True)
class RowStream:
    """All rows' tokens in one stream `[1, tokens]`, and the grid `[rows, width]` they come from.

    Attributes:
        place: int64 `[tokens]`, where each token stands in the flattened grid.
        source: int64 `[rows, width]`, which token of the stream stands at each place; at padding any of them.
    """

    place: Tensor
    source: Tensor

    @classmethod
    def of(cls, is_real: Tensor, num_tokens: int) -> "RowStream":
        """The stream of the `num_tokens` places that are True in bool `is_real` `[rows, width]`, row by row.

        Nothing is read from the device: the caller knows how many there are.
        """
        flat = is_real.flatten()
        place = (~flat).to(torch.uint8).argsort(stable=True)[:num_tokens]
        source = (flat.cumsum(0) - 1).clamp(min=0).view(is_real.shape)
        return cls(place, source)

    @property
    def rows(self) -> Tensor:
        """The row of each token, int64 `[tokens]`."""
        return self.place // self.source.shape[1]

    def flatten(self, grid: Tensor) -> Tensor:
        """`[rows, width]` to `[1, tokens]`."""
        return grid.flatten()[self.place][None]

    def to_grid(self, stream: Tensor) -> Tensor:
        """`[1, tokens, ...]` to `[rows, width, ...]`."""
        return stream[0].index_select(0, self.source.flatten()).view(*self.source.shape, *stream.shape[2:])


@dataclass(frozen=True)
class _Forward:
    """One forward of a batch: its stream, if it is one, and the masks of its layers as [`attend_rows`] uses them."""

    stream: RowStream | None
    folded: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def fold(self, mask: Tensor, group: int, dtype: torch.dtype) -> Tensor:
        """The same tensor for all layers that share `mask`."""
        key = id(mask), group
        if key not in self.folded:
            # With the mask, which some layers cut for themselves: once it is gone, another may have its id.
            self.folded[key] = mask, _folded(mask, group, dtype)
        return self.folded[key][1]


_FORWARD: ContextVar[_Forward | None] = ContextVar("dspark_forward", default=None)


def _folded(mask: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """What is added to scores `[rows, kv_heads, group * width, columns]`, of a mask `[rows, 1, width, columns]`."""
    if mask.dtype == torch.bool:
        added = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        mask = added.masked_fill(~mask, torch.finfo(dtype).min)
    return mask.repeat(1, 1, group, 1)


def attend_rows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As transformers' attention functions: `query` `[rows, heads, tokens, dim]` to `[rows, tokens, heads, dim]`.

    Inside [`streaming`] `query` is `[1, heads, tokens, dim]` and holds the tokens of all rows.

    Args:
        key, value: `[rows, kv_heads, columns, dim]`, also where `query` is a stream.
        attention_mask: bool `[rows, 1, width, columns]`.
    """
    mask = attention_mask
    if torch.compiler.is_compiling():
        if query.shape[0] != key.shape[0] or (mask is not None and mask.shape[2] != query.shape[2]):
            # A stream in a target that its user compiled: what follows cannot be traced.
            return _attend_untraced(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
        forward = None
    else:
        forward = _FORWARD.get()
    stream = None if forward is None else forward.stream
    num_rows, num_heads = key.shape[0], query.shape[1]
    is_plain = mask is None or mask.shape[1] != 1 or mask.shape[2] == 1 or kwargs.get("position_bias") is not None
    if stream is None and is_plain:
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
    assert mask is not None, "a batch brings its own masks"
    if stream is not None:
        query = stream.to_grid(query.transpose(1, 2)).transpose(1, 2)
    num_tokens, dim = query.shape[2:]
    group = num_heads // key.shape[1]
    attended = nn.functional.scaled_dot_product_attention(
        query.reshape(num_rows, key.shape[1], group * num_tokens, dim),
        key,
        value,
        attn_mask=_folded(mask, group, query.dtype) if forward is None else forward.fold(mask, group, query.dtype),
        dropout_p=dropout,
        scale=scaling,
    )
    output = attended.reshape(num_rows, num_heads, num_tokens, -1).transpose(1, 2)
    if stream is not None:
        output = output.flatten(0, 1)[stream.place][None]
    return output.contiguous(), None


_attend_untraced: Callable[..., tuple[Tensor, None]] = torch.compiler.disable(attend_rows)


@contextmanager
def streaming(stream: RowStream | None) -> Iterator[None]:
    """Tell [`attend_rows`] that the forwards inside the block run `stream`; None: that they run a grid.

    Not an argument of the forward: not every architecture hands those on to its attention.
    """
    token = _FORWARD.set(_Forward(stream))
    try:
        yield
    finally:
        _FORWARD.reset(token)


@contextmanager
def attending_by_rows(model: TargetModel) -> Iterator[None]:
    """Let `model` attend with [`attend_rows`] inside the block, if it attends with SDPA; blocks of threads overlap."""
    config = model.config
    key = id(config)
    with _LOCK:
        takes_part = takes_rows(model)
        if takes_part:
            _NUM_USERS[key] = _NUM_USERS.get(key, 0) + 1
            config._attn_implementation = NAME
    try:
        yield
    finally:
        with _LOCK:
            if takes_part:
                _NUM_USERS[key] -= 1
                if not _NUM_USERS[key]:
                    del _NUM_USERS[key]
                    if config._attn_implementation == NAME:  # unless somebody has set another meanwhile
                        config._attn_implementation = "sdpa"


def takes_rows(model: TargetModel) -> bool:
    """Whether the target's attention can be [`attend_rows`]."""
    return bool(model._supports_attention_backend and model.config._attn_implementation in ("sdpa", NAME))


# What was registered by whichever copy of this package came first serves all copies of a process (remote-code ones,
# one imported again), so they share what tells it about streams.
_registered = AttentionInterface().get(NAME)
if _registered is None:
    attend_rows.dspark_shared = _LOCK, _NUM_USERS, _FORWARD  # type: ignore[attr-defined]
    AttentionInterface.register(NAME, attend_rows)
    AttentionMaskInterface.register(NAME, sdpa_mask)
else:
    _LOCK, _NUM_USERS, _FORWARD = _registered.dspark_shared
