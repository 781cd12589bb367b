"""The parallel backbone (DFlash): Qwen3-style layers whose attention sees injected target features and its own block.

Queries come from the block only. Keys and values of a layer are its projections of the context and of the block,
concatenated along the sequence (paper, Eq. 3); inside a block attention is bidirectional.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)

from ..configuration_dspark import DSparkConfig
from .draft_window import DraftWindow
from .packed_blocks import PackedBlocks, attend_packed
from .row_attention import attend_rows
from .row_slots import DraftCache

__all__ = [
    "AttentionMask",
    "DSparkAttention",
    "DSparkDecoderLayer",
    "Qwen3RMSNorm",
    "Qwen3RotaryEmbedding",
    "RotaryTables",
    "turn",
]

RotaryTables = tuple[Tensor, Tensor]  # cos, sin, each [rows, tokens, head_dim]
AttentionMask = Tensor | PackedBlocks | None


class DSparkAttention(nn.Module):
    """Attention of the block's queries over context and block (Eq. 3)."""

    is_causal = False

    def __init__(self, config: DSparkConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.window = DraftWindow.of_layer(config, layer_idx)
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        query_width = config.num_attention_heads * self.head_dim
        key_width = config.num_key_value_heads * self.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, key_width, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, key_width, bias=bias)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = Qwen3RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def project_keys_values(self, hidden_states: Tensor, rotary: RotaryTables) -> tuple[Tensor, Tensor]:
        """Turned keys, and values, `[rows, kv_heads, tokens, head_dim]` of `hidden_states` `[rows, tokens, hidden]`."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        keys = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        values = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        return turn(keys, *rotary), values

    def forward(
        self,
        block: Tensor,
        context: Tensor | None,
        rotary: RotaryTables,
        attention_mask: AttentionMask,
        cache: DraftCache | None,
    ) -> Tensor:
        """Attend from `block` `[rows, T, hidden]` to cached context, new `context` `[rows, S, hidden]` and the block.

        `rotary` covers the S new context positions followed by the T block positions.
        """
        num_queries = block.shape[1]
        cos, sin = rotary
        shape = (*block.shape[:-1], -1, self.head_dim)
        queries = self.q_norm(self.q_proj(block).view(shape)).transpose(1, 2)
        queries = turn(queries, cos[:, -num_queries:], sin[:, -num_queries:])
        keys, values = self.project_keys_values(
            block if context is None else torch.cat([context, block], dim=1), rotary
        )
        if cache is not None:
            keys, values = cache.append(self.layer_idx, keys, values)
        if isinstance(attention_mask, PackedBlocks):
            packed = attend_packed(queries, keys, values, attention_mask, scaling=self.scaling, window=self.window)
            return self.o_proj(packed.reshape(*block.shape[:-1], -1))
        implementation = self.config._attn_implementation
        attend: Callable[..., Any] = (
            attend_rows
            if implementation == "sdpa"
            else ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        )
        attended, _ = attend(
            self,
            queries,
            keys,
            values,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
        )
        output: Tensor = self.o_proj(attended.reshape(*block.shape[:-1], -1))
        return output


class DSparkDecoderLayer(nn.Module):
    """One pre-norm draft layer."""

    attention_class: type[DSparkAttention] = DSparkAttention
    norm_class: type[Qwen3RMSNorm] = Qwen3RMSNorm

    def __init__(self, config: DSparkConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = self.attention_class(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = self.norm_class(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = self.norm_class(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        block: Tensor,
        context: Tensor | None,
        rotary: RotaryTables,
        attention_mask: AttentionMask,
        cache: DraftCache | None,
    ) -> Tensor:
        """`block` `[rows, T, hidden]` to the same shape; the context is read as it is, without this layer's norm."""
        block = block + self.self_attn(self.input_layernorm(block), context, rotary, attention_mask, cache)
        output: Tensor = block + self.mlp(self.post_attention_layernorm(block))
        return output


def turn(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `[rows, heads, tokens, head_dim]`."""
    turned: Tensor = states * cos.unsqueeze(1) + rotate_half(states) * sin.unsqueeze(1)
    return turned
