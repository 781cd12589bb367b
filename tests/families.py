"""Tiny random targets of many families, and what a compatibility table says about them.

All are float32 with wide initial weights, so that their choices are clear-cut, and have no special ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 128

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GROUPS = ("num_key_value_heads",)  # of models whose heads all have keys of their own
_SLIDING = ["sliding_attention", "full_attention"] * 2
_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Family:
    """One kind of target.

    Attributes:
        name: As the table prints it.
        model_type: transformers' name.
        note: What is special about it.
        is_named: One of those that every option is tried on; the others get a shorter list.
        without: Sizes that this config does not take.
    """

    name: str
    model_type: str
    overrides: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    is_named: bool = False
    without: tuple[str, ...] = ()

    def build(self, seed: int = 0, attention: str | None = None, **overrides: Any) -> PreTrainedModel:
        """The target, in eval mode."""
        sizes = {key: size for key, size in _SIZES.items() if key not in self.without}
        config = AutoConfig.for_model(self.model_type, **(sizes | self.overrides | overrides))
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


_ALL = [
    Family("Llama", "llama", is_named=True),
    Family("Qwen3", "qwen3", note="per-head norms of queries and keys", is_named=True),
    Family("Qwen3-MoE", "qwen3_moe", _MIXTURE, "mixture of experts", is_named=True),
    Family(
        "Gemma3",
        "gemma3_text",
        {"sliding_window": 8, "layer_types": _SLIDING, "tie_word_embeddings": False},
        "sliding windows beside full attention; scaled embedding",
        is_named=True,
    ),
    Family("Mistral", "mistral", {"sliding_window": 8}, "every layer slides", is_named=True),
    Family("Phi3", "phi3", {"sliding_window": None}, "joint projections", is_named=True),
    Family(
        "GPT-NeoX",
        "gpt_neox",
        {"rotary_pct": 0.5},
        "parallel residual, RoPE on a part of each head",
        is_named=True,
        without=_GROUPS,
    ),
    Family("OLMo2", "olmo2", note="norms behind attention and MLP", is_named=True),
    Family(
        "Granite",
        "granite",
        {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
        "embedding, residual, attention and logit multipliers",
        is_named=True,
    ),
    Family("Cohere", "cohere", {"logit_scale": 0.25}, "logit scale; parallel blocks", is_named=True),
    Family("Cohere2", "cohere2", {"sliding_window": 8, "layer_types": _SLIDING}, "sliding windows"),
    Family("Qwen2", "qwen2", note="biases in attention"),
    Family("Qwen2-MoE", "qwen2_moe", _MIXTURE | {"shared_expert_intermediate_size": 32}, "shared expert"),
    Family(
        "Gemma2",
        "gemma2",
        {"tie_word_embeddings": False, "sliding_window": 8, "layer_types": _SLIDING},
        "soft caps on attention and logits",
    ),
    Family("Gemma", "gemma", {"tie_word_embeddings": False}, "scaled embedding"),
    Family("Mixtral", "mixtral", {"num_local_experts": 4, "sliding_window": None}, "mixture of experts"),
    Family("OLMo", "olmo"),
    Family("OLMoE", "olmoe", {"num_experts": 4, "num_experts_per_tok": 2}, "mixture of experts"),
    Family("Phi", "phi", {"partial_rotary_factor": 0.5}, "parallel blocks; output head with bias"),
    Family("StableLM", "stablelm"),
    Family("StarCoder2", "starcoder2", {"sliding_window": None}),
    Family("SmolLM3", "smollm3", {"no_rope_layers": [1, 0, 1, 1]}, "layers without RoPE"),
    Family("GLM-4", "glm4"),
    Family("Nemotron", "nemotron"),
    Family(
        "LFM2", "lfm2", {"layer_types": ["conv", "full_attention"] * 2}, "short convolutions, whose state rolls back"
    ),
    Family(
        "GPT-2",
        "gpt2",
        {"n_positions": 256, "n_embd": 32, "n_layer": 4, "n_head": 4},
        "learned positions",
        without=_GROUPS,
    ),
    Family(
        "OPT",
        "opt",
        {"ffn_dim": 64, "word_embed_proj_dim": 32, "initializer_range": 0.1},
        "learned positions",
        without=_GROUPS,
    ),
    Family("Bloom", "bloom", {"n_layer": 4, "n_head": 4, "tie_word_embeddings": False}, "ALiBi", without=_GROUPS),
    Family("Falcon", "falcon", {"num_kv_heads": 4, "new_decoder_architecture": True}, without=("head_dim", *_GROUPS)),
    Family(
        "GPT-J", "gptj", {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256, "rotary_dim": 4}, without=_GROUPS
    ),
    Family(
        "GPT-OSS",
        "gpt_oss",
        _MIXTURE
        | {
            "num_local_experts": 4,
            "sliding_window": 8,
            "layer_types": _SLIDING,
        },
        "attention sinks, sliding windows, mixture of experts",
    ),
    Family("EXAONE 4", "exaone4", {"sliding_window": 8, "layer_types": _SLIDING}, "sliding windows"),
    Family(
        "DeepSeek-V3",
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "head_dim": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
        },
        "latent attention, mixture of experts",
    ),
    Family("HunYuan", "hunyuan_v1_dense"),
    Family("Ministral", "ministral", {"sliding_window": 8, "layer_types": _SLIDING}, "sliding windows"),
]
FAMILIES = {family.name: family for family in _ALL}
NAMED_FAMILIES = [family.name for family in _ALL if family.is_named]
OTHER_FAMILIES = [family.name for family in _ALL if not family.is_named]
