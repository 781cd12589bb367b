"""Layers of the baseline drafters, which read pairs: a hidden state of position i, and the token at i + 1.

Eagle3 feeds both halves of a pair to attention and keeps the hidden state as the residual stream; MTP projects them to
one vector first. Attention is causal over the pairs before. Tensor names of Eagle3 are DeepSpec's.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .backbone import DSparkAttention, DSparkDecoderLayer, Qwen3RMSNorm, RotaryTables, turn
from .row_slots import attention_mask_for
from .unrolled import UnrolledSteps


def causal_mask(num_cached: int, new: Tensor, implementation: str | None) -> Tensor | None:
    """Mask `[1, 1, T, num_cached + T]` of `new` `[rows, T, hidden]` behind cached pairs; None where all is seen."""
    num_new = new.shape[1]
    if num_new == 1:
        return None
    columns = torch.arange(num_cached + num_new, device=new.device)
    is_seen = columns <= columns[num_cached:, None]
    return attention_mask_for(implementation, is_seen[None, None], new.dtype)


class PairAttention(DSparkAttention):
    """Attention over pairs; in training over unrolled steps too."""

    def forward(
        self, block: Tensor, context: Tensor | None, rotary: RotaryTables, attention_mask: Any, cache: Any
    ) -> Tensor:
        """As for [`DSparkAttention`], without a context; `cache` may be [`UnrolledSteps`]."""
        if not isinstance(cache, UnrolledSteps):
            return super().forward(block, context, rotary, attention_mask, cache)
        shape = (*block.shape[:-1], -1, self.head_dim)
        queries = turn(self.q_norm(self.q_proj(block).view(shape)).transpose(1, 2), *rotary)
        attended = cache.attend(queries, *self.project_keys_values(block, rotary), scaling=self.scaling)
        output: Tensor = self.o_proj(attended.reshape(*block.shape[:-1], -1))
        return output


class Eagle3Attention(PairAttention):
    """Its input is the embedding and the hidden state side by side."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        for name in ("q_proj", "k_proj", "v_proj"):
            width = getattr(self, name).out_features
            setattr(self, name, nn.Linear(2 * config.hidden_size, width, bias=config.attention_bias))


class Eagle3Layer(DSparkDecoderLayer):
    """`state + attention([norm(embedding); norm(state)])`, then the MLP; neither norm touches the residual stream."""

    attention_class = Eagle3Attention

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def read_pairs(
        self, embeddings: Tensor, states: Tensor, rotary: RotaryTables, attention_mask: Tensor | None, cache: Any
    ) -> Tensor:
        """The next state of each pair, `[rows, tokens, hidden]`, from `embeddings` and `states` of that shape."""
        pairs = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(states)], dim=-1)
        states = states + self.self_attn(pairs, None, rotary, attention_mask, cache)
        output: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return output


class MTPLayer(DSparkDecoderLayer):
    """An ordinary decoder layer on `W [norm(embedding); norm(hidden state)]` (DeepSeek-V3, arXiv 2412.19437)."""

    attention_class = PairAttention

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.enorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def read_pairs(
        self, embeddings: Tensor, states: Tensor, rotary: RotaryTables, attention_mask: Tensor | None, cache: Any
    ) -> Tensor:
        """As for [`Eagle3Layer`]."""
        projected = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(states)], dim=-1))
        return self(projected, None, rotary, attention_mask, cache)
