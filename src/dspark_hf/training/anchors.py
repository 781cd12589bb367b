"""Anchor blocks: where they start, what they are asked, and which of their slots are supervised.

An anchor is a token the target wrote whose next token it wrote too. Its block predicts the tokens behind it, seeing
the context strictly before it, as when drafting. Positions are supervised while the block stays inside an unbroken
run of the loss mask (released code).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AnchorBlocks:
    """Blocks of a batch; A blocks a row, padded with blocks that supervise nothing.

    Attributes:
        anchor_positions: int64 `[rows, A]`, 0 for padding.
        previous_tokens: int64 `[rows, A, slots]`, the token before the one a slot predicts; slot 1's is the anchor.
        next_tokens: int64 `[rows, A, slots]`, the token a slot predicts; without meaning where not supervised.
        is_supervised: bool `[rows, A, slots]`.
        law_positions: int64 `[rows, A, slots]`, position whose target law predicts the slot's token.
        input_ids: int64 `[rows, length]`, the texts.
    """

    anchor_positions: Tensor
    previous_tokens: Tensor
    next_tokens: Tensor
    is_supervised: Tensor
    law_positions: Tensor
    input_ids: Tensor


def possible_anchors(loss_mask: Tensor) -> Tensor:
    """Positions int64 `[n]` of a row's possible anchors, of bool `loss_mask` `[length]`."""
    return (loss_mask[:-1] & loss_mask[1:]).nonzero().flatten()


def sample_anchors(loss_mask: Tensor, max_anchors: int, generator: torch.Generator) -> Tensor:
    """At most `max_anchors` of a row's possible anchors, without replacement, in increasing order."""
    positions = possible_anchors(loss_mask)
    if len(positions) <= max_anchors:
        return positions
    chosen = torch.randperm(len(positions), generator=generator)[:max_anchors]
    return positions[chosen.sort().values]


def build_blocks(
    input_ids: Tensor, loss_mask: Tensor, anchors: Tensor, block_size: int, first_anchor: int = 0
) -> AnchorBlocks:
    """Cut the blocks of a batch.

    Args:
        input_ids: int64 `[rows, length]`, padded on the right.
        loss_mask: bool `[rows, length]`, false on padding.
        anchors: int64 `[rows, A]`, padded with -1.
        block_size: Slots of a block.
        first_anchor: The drafter's; anchors before it supervise nothing.
    """
    rows, num_blocks = anchors.shape
    length = input_ids.shape[1]
    offsets = torch.arange(block_size + 1, device=anchors.device)
    positions = anchors.clamp(min=0)[:, :, None] + offsets  # of the anchor and of each slot's token
    inside = positions.clamp(max=length - 1)
    flat = inside.view(rows, -1)
    tokens = input_ids.gather(1, flat).view(inside.shape)
    in_mask = (
        loss_mask.gather(1, flat).view(inside.shape) & (positions < length) & (anchors >= first_anchor)[:, :, None]
    )
    return AnchorBlocks(
        anchor_positions=anchors.clamp(min=0),
        previous_tokens=tokens[:, :, :-1],
        next_tokens=tokens[:, :, 1:],
        is_supervised=in_mask.long().cumprod(dim=-1)[:, :, 1:].bool(),
        law_positions=inside[:, :, :-1],
        input_ids=input_ids,
    )


def position_weights(block_size: int, decay: float) -> Tensor:
    """`w_k = exp(-(k-1) / decay)`, float32 `[block_size]`; the paper's decay is gamma, the released code's 4."""
    return torch.tensor([math.exp(-k / decay) for k in range(block_size)])
