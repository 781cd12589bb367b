"""Draft layers in Gemma4's style, as DeepSpec trains them for Gemma4 targets.

Beside Qwen3's: norms behind attention and MLP, values normalised without a scale and often made of the keys'
projection, scores scaled by nothing, and a stored factor on each layer's output.
"""

import torch
from torch import Tensor
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

from ..configuration_dspark import DSparkConfig
from .backbone import AttentionMask, DSparkAttention, DSparkDecoderLayer, RotaryTables, turn
from .row_slots import DraftCache

__all__ = ["Gemma4DraftAttention", "Gemma4DraftLayer", "Gemma4RMSNorm"]


class Gemma4DraftAttention(DSparkAttention):
    """Attention of the block's queries over context and block, with normalised values."""

    def __init__(self, config: DSparkConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.scaling = 1.0
        for name in ("q_norm", "k_norm"):
            setattr(self, name, Gemma4RMSNorm(self.head_dim, config.rms_norm_eps))
        self.v_norm = Gemma4RMSNorm(self.head_dim, config.rms_norm_eps, with_scale=False)
        self.k_eq_v = config.attention_k_eq_v
        if self.k_eq_v:
            del self.v_proj

    def project_keys_values(self, hidden_states: Tensor, rotary: RotaryTables) -> tuple[Tensor, Tensor]:
        """As in [`DSparkAttention`]."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        keys = self.k_proj(hidden_states).view(shape)
        values = keys if self.k_eq_v else self.v_proj(hidden_states).view(shape)
        return turn(self.k_norm(keys).transpose(1, 2), *rotary), self.v_norm(values).transpose(1, 2)


class Gemma4DraftLayer(DSparkDecoderLayer):
    """One draft layer with norms before and behind attention and MLP."""

    attention_class = Gemma4DraftAttention
    norm_class = Gemma4RMSNorm  # type: ignore[assignment]  # the same arithmetic, rounded once less

    def __init__(self, config: DSparkConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.pre_feedforward_layernorm = Gemma4RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = Gemma4RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(
        self,
        block: Tensor,
        context: Tensor | None,
        rotary: RotaryTables,
        attention_mask: AttentionMask,
        cache: DraftCache | None,
    ) -> Tensor:
        """As in [`DSparkDecoderLayer`]."""
        attended = self.self_attn(self.input_layernorm(block), context, rotary, attention_mask, cache)
        block = block + self.post_attention_layernorm(attended)
        mixed = self.mlp(self.pre_feedforward_layernorm(block))
        output: Tensor = (block + self.post_feedforward_layernorm(mixed)) * self.layer_scalar
        return output
