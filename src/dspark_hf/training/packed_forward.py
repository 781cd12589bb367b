"""The drafter's forward over many blocks of a text at once, as in training."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..model.packed_blocks import PackedBlocks
from ..modeling_dspark import DSparkDraftModel
from .anchors import AnchorBlocks


def packed_hidden(
    model: Callable[..., Any], drafter: DSparkDraftModel, embedding: nn.Module, features: Tensor, blocks: AnchorBlocks
) -> tuple[Tensor, Tensor | None]:
    """`h_k` `[rows * A, slots, hidden]` of the slots that draft, and `[rows * A, hidden]` of an anchor's that does not.

    Args:
        model: The drafter, or what wraps it for training.
        embedding: The target's.
        features: `[rows, length, m * hidden]`, of the texts that the blocks were cut from.
    """
    rows, num_blocks, num_slots = blocks.previous_tokens.shape
    first = drafter.config.first_draft_slot
    size = first + num_slots
    block_ids = blocks.previous_tokens.new_full((rows, num_blocks, size), drafter.config.mask_token_id)
    block_ids[:, :, 0] = blocks.previous_tokens[:, :, 0]
    positions = blocks.anchor_positions[:, :, None] + torch.arange(size, device=block_ids.device)
    outputs = model(
        inputs_embeds=drafter.embed(block_ids.flatten(1), embedding),
        position_ids=positions.flatten(1),
        context_features=features.to(drafter.dtype),
        context_position_ids=torch.arange(features.shape[1], device=block_ids.device).expand(rows, -1),
        attention_mask=PackedBlocks(blocks.anchor_positions, size),
    )
    hidden: Tensor = outputs.last_hidden_state.view(rows * num_blocks, size, -1)
    return hidden[:, first:], hidden[:, 0] if first else None
