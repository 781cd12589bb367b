"""The drafter's forward over many blocks of a text at once, as in training; for each kind of drafter."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..model.packed_blocks import PackedBlocks
from ..model.unrolled import UnrolledSteps
from ..modeling_autoregressive import AutoregressiveDraftModel
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
    if isinstance(drafter, AutoregressiveDraftModel):
        return _unrolled_hidden(model, drafter, embedding, features, blocks), None
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


def _unrolled_hidden(
    model: Callable[..., Any],
    drafter: AutoregressiveDraftModel,
    embedding: nn.Module,
    features: Tensor,
    blocks: AnchorBlocks,
) -> Tensor:
    """Training-time test (EAGLE-3, arXiv 2503.01840, section 3.1): step k reads the states of step k - 1, as decoding
    does, and the text's own tokens; what it sees is [`UnrolledSteps`]'s to say.
    """
    ids, anchors = blocks.input_ids, blocks.anchor_positions
    steps = UnrolledSteps(anchors)
    # Nothing that counts sees the pair at the end, whose token is not known.
    next_ids = torch.cat([ids[:, 1:], ids[:, -1:]], dim=1)
    positions = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
    outputs = model(
        drafter.embed(next_ids, embedding), positions, context_features=features.to(drafter.dtype), cache=steps
    )
    before = (anchors - 1).clamp(min=0)[:, :, None].expand(-1, -1, drafter.config.hidden_size)
    state, hidden = (t.gather(1, before) for t in (outputs.hidden_states[0], outputs.last_hidden_state))
    slots = [hidden]
    for k in range(1, blocks.previous_tokens.shape[2]):
        embedded = drafter.embed(blocks.previous_tokens[:, :, k], embedding)
        outputs = model(embedded, anchors + k - 1, states=state, cache=steps)
        state = outputs.hidden_states[0]
        slots.append(outputs.last_hidden_state)
    return torch.stack(slots, dim=2).flatten(0, 1)
