"""Tiny drafters as other projects store them, from the documented keys and tensor names; nothing of `src` is used.

`facts` says what a file's project documents about it, in the words of `tests/reference.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, RANK, MASK = 61, 32, 4, 2, 8, 48, 6, 60
NUM_LAYERS, TARGET_DEPTH, BLOCK = 2, 4, 5
LAYER_IDS = [-1, 0, 2]  # outputs of decoder layers; -1 is the embedding
DRAFT_IDS = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59]
SLIDING = ["sliding_attention", "full_attention"]
WINDOW = 4

QWEN3_LAYERS = {
    "attention_bias": False, "attention_dropout": 0.0, "head_dim": HEAD_DIM, "hidden_act": "silu",
    "hidden_size": HIDDEN, "initializer_range": 0.02, "intermediate_size": MLP,
    "layer_types": ["full_attention"] * NUM_LAYERS, "max_position_embeddings": 512, "max_window_layers": 28,
    "num_attention_heads": HEADS, "num_hidden_layers": NUM_LAYERS, "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "sliding_window": None,
    "tie_word_embeddings": False, "use_cache": True, "use_sliding_window": False, "vocab_size": VOCAB,
    "model_type": "qwen3",
}  # fmt: skip
HEAD_KEYS = {
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


@dataclass(frozen=True)
class Foreign:
    """A stored drafter.

    Attributes:
        facts: Fields that the reference reads.
        first_slot: 1 where the anchor's own slot drafts nothing.
        num_drafts: Of a round.
        head_kind: Of the sequential head.
        cap: Soft cap of the draft logits.
    """

    config: dict
    tensors: dict[str, Tensor]
    facts: SimpleNamespace
    first_slot: int = 0
    num_drafts: int = BLOCK
    head_kind: str = "vanilla"
    cap: float | None = None

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        save_file(self.tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def but(self, **changes) -> Foreign:
        """The same with other config keys; None removes one, in nested objects too."""
        return replace(self, config=merged(self.config, changes))


def merged(config: dict, changes: dict) -> dict:
    result = dict(config)
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


def facts(**changes) -> SimpleNamespace:
    """What the reference reads of plain Qwen3-style layers."""
    return SimpleNamespace(
        **{
            "layer_style": "qwen3", "rms_norm_eps": 1e-6, "num_hidden_layers": NUM_LAYERS, "hidden_act": "silu",
            "head_dim": HEAD_DIM, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
            "rope_parameters": {"rope_theta": 1e4}, "layer_types": None, "sliding_window": None,
            "window_start": "slot", "causal_layers": "none", "attention_k_eq_v": False,
        } | changes
    )  # fmt: skip


def rand(*shape, generator, scale=0.3) -> Tensor:
    return torch.randn(*shape, generator=generator) * scale


def backbone_tensors(generator, *, head_dim=HEAD_DIM, kv_heads=KV_HEADS, values=True) -> dict[str, Tensor]:
    def new(*shape):
        return rand(*shape, generator=generator)

    def norm(size):
        return 1.0 + new(size)

    tensors = {"fc.weight": new(HIDDEN, len(LAYER_IDS) * HIDDEN), "hidden_norm.weight": norm(HIDDEN)}
    for i in range(NUM_LAYERS):
        at = f"layers.{i}."
        tensors |= {
            at + "self_attn.q_proj.weight": new(HEADS * head_dim, HIDDEN),
            at + "self_attn.k_proj.weight": new(kv_heads * head_dim, HIDDEN),
            at + "self_attn.o_proj.weight": new(HIDDEN, HEADS * head_dim),
            at + "self_attn.q_norm.weight": norm(head_dim),
            at + "self_attn.k_norm.weight": norm(head_dim),
            at + "mlp.gate_proj.weight": new(MLP, HIDDEN),
            at + "mlp.up_proj.weight": new(MLP, HIDDEN),
            at + "mlp.down_proj.weight": new(HIDDEN, MLP),
            at + "input_layernorm.weight": norm(HIDDEN),
            at + "post_attention_layernorm.weight": norm(HIDDEN),
        }
        if values:
            tensors[at + "self_attn.v_proj.weight"] = new(kv_heads * head_dim, HIDDEN)
    return tensors | {"norm.weight": norm(HIDDEN)}


def head_tensors(generator, kind: str = "vanilla", draft_vocab: int = VOCAB) -> dict[str, Tensor]:
    def new(*shape):
        return rand(*shape, generator=generator)

    tensors = {
        "markov_head.markov_w1.weight": new(VOCAB, RANK),
        "markov_head.markov_w2.weight": new(draft_vocab, RANK),
        "confidence_head.proj.weight": new(1, HIDDEN + RANK),
        "confidence_head.proj.bias": new(1),
    }
    if kind == "gated":
        tensors["markov_head.gate_proj.weight"] = new(RANK, HIDDEN + RANK)
        tensors["markov_head.gate_proj.bias"] = new(RANK)
    if kind == "rnn":
        tensors["markov_head.joint_proj.weight"] = new(3 * RANK, 2 * RANK + HIDDEN)
        tensors["markov_head.joint_proj.bias"] = new(3 * RANK)
    return tensors


# -- DeepSpec ---------------------------------------------------------------------------------------------------------


def deepspec(kind: str = "vanilla", *, baseline: bool = False) -> Foreign:
    """Flat keys, copies of embedding and head; its DFlash baseline leaves two head keys out."""
    g = torch.Generator().manual_seed(1)
    own = {
        "architectures": ["Qwen3DSparkModel"], "block_size": BLOCK, "mask_token_id": MASK, "num_anchors": 512,
        "num_target_layers": TARGET_DEPTH, "target_layer_ids": LAYER_IDS, "dtype": "float32",
    }  # fmt: skip
    heads = HEAD_KEYS | {"markov_head_type": kind}
    tensors = backbone_tensors(g) | head_tensors(g, kind)
    if baseline:
        heads = {"markov_rank": 0, "enable_confidence_head": False}
        tensors = {name: t for name, t in tensors.items() if "_head." not in name}
    tensors |= {
        "embed_tokens.weight": rand(VOCAB, HIDDEN, generator=g),
        "lm_head.weight": rand(VOCAB, HIDDEN, generator=g),
    }
    return Foreign(QWEN3_LAYERS | own | heads, tensors, facts(), head_kind=kind)


def deepspec_gemma4(*, k_eq_v: bool = True) -> Foreign:
    """Gemma4 flavour: global head size and key heads, RoPE nested by layer type beside stray defaults."""
    g = torch.Generator().manual_seed(2)
    head_dim, kv_heads = 16, 1 if k_eq_v else KV_HEADS
    rope = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    config = {
        "architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", "target_model_type": "gemma4",
        "target_text_model_type": "gemma4_text", "attention_bias": False, "attention_dropout": 0.0,
        "attention_k_eq_v": k_eq_v, "block_size": BLOCK, "mask_token_id": 4, "num_anchors": 512,
        "num_target_layers": TARGET_DEPTH, "target_layer_ids": LAYER_IDS, "enable_moe_block": False,
        "final_logit_softcapping": 3.0, "global_head_dim": head_dim, "head_dim": HEAD_DIM,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": HIDDEN, "hidden_size_per_layer_input": 0,
        "initializer_range": 0.02, "intermediate_size": MLP, "layer_types": ["full_attention"] * NUM_LAYERS,
        "max_position_embeddings": 512, "num_attention_heads": HEADS, "num_global_key_value_heads": 1,
        "num_hidden_layers": NUM_LAYERS, "num_key_value_heads": KV_HEADS, "num_kv_shared_layers": 0,
        "rms_norm_eps": 1e-6, "sliding_window": 8, "tie_word_embeddings": False, "use_double_wide_mlp": False,
        "vocab_size": VOCAB, "dtype": "float32", "pad_token_id": None, "eos_token_id": None, "bos_token_id": None,
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "rope_theta": None,
            "rope_type": "default",
        },
    } | HEAD_KEYS  # fmt: skip
    tensors = backbone_tensors(g, head_dim=head_dim, kv_heads=kv_heads, values=not k_eq_v) | head_tensors(g)
    for i in range(NUM_LAYERS):
        tensors[f"layers.{i}.pre_feedforward_layernorm.weight"] = 1.0 + rand(HIDDEN, generator=g)
        tensors[f"layers.{i}.post_feedforward_layernorm.weight"] = 1.0 + rand(HIDDEN, generator=g)
        tensors[f"layers.{i}.layer_scalar"] = torch.tensor([0.7 + 0.2 * i])
    tensors["embed_tokens.weight"] = rand(VOCAB, HIDDEN, generator=g)
    tensors["lm_head.weight"] = rand(VOCAB, HIDDEN, generator=g)
    known = facts(
        layer_style="gemma4", attention_k_eq_v=k_eq_v, head_dim=head_dim, num_key_value_heads=kv_heads,
        hidden_act="gelu_pytorch_tanh", rope_parameters=rope,
    )  # fmt: skip
    return Foreign(config, tensors, known, cap=3.0)


# -- speculators ------------------------------------------------------------------------------------------------------


def speculators(
    *, reduced: bool = False, says_layout: bool | None = True, slides: bool = False, looks_ahead: bool = False,
    is_dflash: bool = False, kind: str = "vanilla",
) -> Foreign:  # fmt: skip
    """Nested layer config, direct hidden-state indices; a reduced vocabulary comes with t2d, d2t and head rows."""
    g = torch.Generator().manual_seed(3)
    draft_vocab = len(DRAFT_IDS) if reduced else VOCAB
    layers = QWEN3_LAYERS | (
        {"layer_types": SLIDING, "sliding_window": WINDOW, "use_sliding_window": True} if slides else {}
    )
    algorithm = "dflash" if is_dflash else "dspark"
    config = {
        "architectures": ["DFlashDraftModel" if is_dflash else "DSparkDraftModel"],
        "auto_map": {"": "config.DSparkSpeculatorConfig"}, "speculators_model_type": algorithm,
        "speculators_version": "0.9.0", "aux_hidden_state_layer_ids": [i + 1 for i in LAYER_IDS], "block_size": BLOCK,
        "draft_vocab_size": draft_vocab, "dtype": "float32", "mask_token_id": MASK,
        "sample_from_anchor": says_layout, "sliding_window_non_causal": looks_ahead,
        "target_hidden_size": None, "tie_word_embeddings": False, "transformer_layer_config": layers,
        "speculators_config": {
            "algorithm": algorithm, "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": BLOCK}],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "some/target"},
        },
    } | ({} if is_dflash else HEAD_KEYS | {"markov_head_type": kind})  # fmt: skip
    if says_layout is None:
        del config["sample_from_anchor"]
    tensors = backbone_tensors(g) | ({} if is_dflash else head_tensors(g, kind, draft_vocab))
    if reduced:
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, torch.tensor(DRAFT_IDS), True)
        tensors["d2t"] = torch.tensor(DRAFT_IDS) - torch.arange(len(DRAFT_IDS))
        tensors["lm_head.weight"] = rand(len(DRAFT_IDS), HIDDEN, generator=g)
    known = facts()
    if slides:
        causal = "none" if looks_ahead else "sliding"
        known = facts(layer_types=SLIDING, sliding_window=WINDOW, window_start="anchor", causal_layers=causal)
    first = 0 if says_layout else 1
    return Foreign(config, tensors, known, first_slot=first, num_drafts=BLOCK - first, head_kind=kind)


# -- SpecForge and z-lab ----------------------------------------------------------------------------------------------


def specforge(export: str = "raw", *, slides: bool = False) -> Foreign:
    """`raw`, `legacy` (heads under a container) or `normalised` (head keys at the top, another class name)."""
    g = torch.Generator().manual_seed(4)
    nested = {
        "projector_type": "dspark", "attention_mode": "gqa", "mask_token_id": MASK, "target_layer_ids": LAYER_IDS,
        "confidence_head_alpha": 1.0,
    } | HEAD_KEYS  # fmt: skip
    config = QWEN3_LAYERS | {
        "architectures": ["DSparkDraftModel"], "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
        "block_size": BLOCK, "num_target_layers": TARGET_DEPTH, "dtype": "float32", "dflash_config": nested,
        "draft_vocab_size": VOCAB, "rope_theta": 10_000,
    }  # fmt: skip
    if export == "normalised":
        config = merged(config, {"auto_map": None, "draft_vocab_size": None, "architectures": ["Qwen3DSparkModel"]})
        config |= HEAD_KEYS
        config["dflash_config"] = {"mask_token_id": MASK, "target_layer_ids": LAYER_IDS}
    heads = head_tensors(g)
    if export == "legacy":
        heads = {f"logit_head.{name}": tensor for name, tensor in heads.items()}
    known = facts()
    if slides:
        config |= {"layer_types": SLIDING, "sliding_window": WINDOW, "use_sliding_window": True}
        known = facts(layer_types=SLIDING, sliding_window=WINDOW, window_start="slot", causal_layers="sliding")
    return Foreign(config, backbone_tensors(g) | heads, known)


def zlab(*, nests_block: bool = False, slides: bool = False, is_causal: bool | None = None, cap=None) -> Foreign:
    """Fill-in, no heads; old files have their RoPE at the top, newer ones their block size nested."""
    g = torch.Generator().manual_seed(5)
    config = merged(QWEN3_LAYERS, {"rope_parameters": None}) | {
        "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "num_target_layers": TARGET_DEPTH, "dtype": "float32", "rope_scaling": None, "rope_theta": 10_000,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": LAYER_IDS},
    }  # fmt: skip
    (config["dflash_config"] if nests_block else config)["block_size"] = BLOCK
    if cap is not None:
        config["final_logit_softcapping"] = cap
    known = facts()
    if slides:
        config |= {"layer_types": SLIDING, "sliding_window": WINDOW, "use_sliding_window": True}
        causal = {None: "sliding", True: "all", False: "none"}[is_causal]
        known = facts(layer_types=SLIDING, sliding_window=WINDOW, window_start="slot", causal_layers=causal)
    if is_causal is not None:
        config["is_causal"] = is_causal
    return Foreign(config, backbone_tensors(g), known, first_slot=1, num_drafts=BLOCK - 1, cap=cap)


FIXTURES = {
    "deepspec": deepspec,
    "deepspec_gated": lambda: deepspec("gated"),
    "deepspec_rnn": lambda: deepspec("rnn"),
    "deepspec_dflash": lambda: deepspec(baseline=True),
    "deepspec_gemma4": deepspec_gemma4,
    "deepspec_gemma4_own_values": lambda: deepspec_gemma4(k_eq_v=False),
    "speculators": speculators,
    "speculators_reduced": lambda: speculators(reduced=True),
    "speculators_fill_in": lambda: speculators(says_layout=False),
    "speculators_fill_in_rnn": lambda: speculators(says_layout=False, kind="rnn"),
    "speculators_legacy": lambda: speculators(says_layout=None),
    "speculators_sliding": lambda: speculators(slides=True, reduced=True),
    "speculators_sliding_ahead": lambda: speculators(slides=True, looks_ahead=True),
    "speculators_dflash": lambda: speculators(is_dflash=True, says_layout=None),
    "specforge": specforge,
    "specforge_legacy": lambda: specforge("legacy"),
    "specforge_normalised": lambda: specforge("normalised"),
    "specforge_sliding": lambda: specforge(slides=True),
    "zlab": zlab,
    "zlab_nested_block": lambda: zlab(nests_block=True, cap=2.0),
    "zlab_sliding": lambda: zlab(slides=True),
    "zlab_sliding_ahead": lambda: zlab(slides=True, is_causal=False),
    "zlab_causal": lambda: zlab(slides=True, is_causal=True),
}


def tiny_gemma4(seed: int = 0):
    """A random float32 Gemma4 text model: layers of different head sizes, scaled embedding, soft cap."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig  # brings vision and audio models

    config = Gemma4TextConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=MLP, num_hidden_layers=TARGET_DEPTH,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, global_head_dim=16,
        num_global_key_value_heads=1, attention_k_eq_v=True, hidden_size_per_layer_input=0, sliding_window=8,
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        final_logit_softcapping=3.0, initializer_range=0.3, max_position_embeddings=512,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    return Gemma4ForCausalLM(config).eval()
