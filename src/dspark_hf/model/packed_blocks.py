"""Attention of many independent blocks over one context, without the mask between blocks.

Training packs A blocks of T slots behind each sequence. A dense mask would make every block score every other block
only to throw that away: A*T x (S + A*T) entries. Here each block scores the context and itself, A*T x (S + T).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .draft_window import DraftWindow


@dataclass(frozen=True)
class PackedBlocks:
    """Where each block of a packed row starts; stands in for an attention mask.

    Attributes:
        anchor_positions: int64 `[rows, A]`; a block sees context positions strictly before its anchor.
        block_size: Slots T of each block.
    """

    anchor_positions: Tensor
    block_size: int

    def sees_context(self, context_length: int, window: DraftWindow | None = None) -> Tensor:
        """bool `[rows, A, T or 1, context_length]`, for context at positions 0, 1, ..."""
        anchors = self.anchor_positions[:, :, None, None]
        positions = torch.arange(context_length, device=anchors.device)
        before = positions < anchors
        return before if window is None else before & window.sees(anchors + self._offsets[:, None], anchors, positions)

    def sees_block(self, window: DraftWindow) -> Tensor:
        """bool `[T, T]`: which slots of its block a slot sees."""
        offsets = self._offsets
        return window.sees(offsets[:, None], torch.zeros_like(offsets[:1]), offsets)

    def dense(self, context_length: int, window: DraftWindow | None = None) -> Tensor:
        """The equivalent mask, bool `[rows, 1, A*T, context_length + A*T]`: the slow reference."""
        rows, num_blocks = self.anchor_positions.shape
        to_context = self.sees_context(context_length, window).expand(-1, -1, self.block_size, -1).flatten(1, 2)
        block = torch.arange(num_blocks, device=to_context.device).repeat_interleave(self.block_size)
        to_blocks = block[:, None] == block[None]
        if window is not None:
            to_blocks = to_blocks & self.sees_block(window).repeat(num_blocks, num_blocks)
        return torch.cat([to_context, to_blocks.expand(rows, -1, -1)], dim=2)[:, None]

    @property
    def _offsets(self) -> Tensor:
        return torch.arange(self.block_size, device=self.anchor_positions.device)


def attend_packed(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: PackedBlocks,
    *,
    scaling: float,
    window: DraftWindow | None = None,
) -> Tensor:
    """Softmax attention of each block over its context and itself.

    Args:
        queries: `[rows, heads, A*T, head_dim]`.
        keys, values: `[rows, kv_heads, S + A*T, head_dim]`, the context first.
        blocks: Which context each block sees.
        scaling: Factor on the scores.
        window: The layer's rule; None: slots see all of their context and block.

    Returns:
        `[rows, A*T, heads, head_dim]`.
    """
    rows, num_heads, num_queries, head_dim = queries.shape
    num_kv_heads, size = keys.shape[1], blocks.block_size
    num_blocks, group = num_queries // size, num_heads // num_kv_heads
    context_length = keys.shape[2] - num_queries
    # Query heads that share keys lie beside each other, so one product serves the group.
    grouped = (queries * scaling).view(rows, num_kv_heads, group, num_blocks, size, head_dim)
    grouped = grouped.permute(0, 1, 3, 2, 4, 5).reshape(rows, num_kv_heads, num_blocks, group * size, head_dim)
    context_keys, own_keys = _split(keys, context_length, num_blocks, size)
    context_values, own_values = _split(values, context_length, num_blocks, size)
    flat = grouped.reshape(rows, num_kv_heads, -1, head_dim)
    to_context = (flat @ context_keys.transpose(2, 3)).view(rows, num_kv_heads, num_blocks, group, size, context_length)
    is_seen = blocks.sees_context(context_length, window)[:, None, :, None]
    to_context = to_context.masked_fill(~is_seen, -torch.inf).flatten(3, 4)
    to_own = grouped @ own_keys.transpose(3, 4)
    if window is not None:
        to_own = to_own.masked_fill(~blocks.sees_block(window).repeat(group, 1), -torch.inf)
    weights = torch.cat([to_context, to_own], dim=-1).softmax(dim=-1).to(values.dtype)
    over_context, over_own = weights.split([context_length, size], dim=-1)
    attended = (over_context.flatten(2, 3) @ context_values).view(grouped.shape)
    attended = attended + over_own @ own_values
    attended = attended.view(rows, num_kv_heads, num_blocks, group, size, head_dim)
    return attended.permute(0, 2, 4, 1, 3, 5).reshape(rows, num_queries, num_heads, head_dim)


def _split(states: Tensor, context_length: int, num_blocks: int, size: int) -> tuple[Tensor, Tensor]:
    """Context part `[rows, kv_heads, S, dim]` and own part `[rows, kv_heads, A, T, dim]`."""
    rows, num_kv_heads, _, head_dim = states.shape
    own = states[:, :, context_length:].reshape(rows, num_kv_heads, num_blocks, size, head_dim)
    return states[:, :, :context_length], own
