"""A slow reference of the drafter in float64: no cache, no attention interface, one block and one head at a time.

Written from the paper's equations and the released code's conventions, on a plain dict of tensors. `config` is a
`DSparkConfig`, or anything that has the fields that are read here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def rms_norm(x: Tensor, weight: Tensor | float, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rotate(vectors: Tensor, positions: list[int], rope: dict) -> Tensor:
    """RoPE of one head's vectors `[tokens, head_dim]`; of rope type proportional a part of the pairs stands still."""
    half = vectors.shape[-1] // 2
    frequencies = rope["rope_theta"] ** -(torch.arange(half, dtype=torch.float64) / half)
    if rope.get("rope_type") == "proportional":
        frequencies[int(rope["partial_rotary_factor"] * half) :] = 0.0
    angles = torch.tensor(positions, dtype=torch.float64)[:, None] * frequencies
    low, high = vectors[:, :half], vectors[:, half:]
    return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], dim=-1)


def sees(config, layer: int, slot: int, key: int, anchor: int) -> bool:
    """Whether a block's slot at absolute position `slot` sees what stands at position `key`, in one layer."""
    slides = (config.layer_types or ["full_attention"] * 99)[layer] == "sliding_attention"
    looks_ahead = config.causal_layers == "none" or (config.causal_layers == "sliding" and not slides)
    if key > slot and not looks_ahead:
        return False
    if not slides:
        return True
    if config.window_start == "anchor":
        return key >= anchor or anchor - key <= config.sliding_window
    return key > slot or slot - key < config.sliding_window


def block_hidden(w: Weights, config, features: Tensor, block: Tensor, anchor_position: int) -> Tensor:
    """`h` float64 `[slots, hidden]` for one block, the anchor's slot included.

    Args:
        features: `[context, m * hidden]` of the tokens at positions 0 to anchor_position - 1.
        block: `[slots, hidden]`, embeddings of the anchor and the masks.
    """
    eps = config.rms_norm_eps
    is_gemma = config.layer_style == "gemma4"
    context = rms_norm(features @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    positions = [*range(len(context)), *range(anchor_position, anchor_position + len(block))]
    hidden = block
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}."
        normed = rms_norm(hidden, w[at + "input_layernorm.weight"], eps)
        attended = attention(w, config, layer, context, normed, positions)
        if is_gemma:
            attended = rms_norm(attended, w[at + "post_attention_layernorm.weight"], eps)
        hidden = hidden + attended
        before_mlp = "pre_feedforward_layernorm.weight" if is_gemma else "post_attention_layernorm.weight"
        normed = rms_norm(hidden, w[at + before_mlp], eps)
        gate = normed @ w[at + "mlp.gate_proj.weight"].T
        up = normed @ w[at + "mlp.up_proj.weight"].T
        mixed = (activation(config.hidden_act, gate) * up) @ w[at + "mlp.down_proj.weight"].T
        if is_gemma:
            mixed = rms_norm(mixed, w[at + "post_feedforward_layernorm.weight"], eps)
        hidden = hidden + mixed
        if is_gemma:
            hidden = hidden * w[at + "layer_scalar"]
    return rms_norm(hidden, w["norm.weight"], eps)


def activation(name: str, x: Tensor) -> Tensor:
    if name == "silu":
        return x * torch.sigmoid(x)
    assert name == "gelu_pytorch_tanh"
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def attention(w: Weights, config, layer: int, context: Tensor, block: Tensor, positions: list[int]) -> Tensor:
    at = f"layers.{layer}.self_attn."
    dim, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    rope, eps, is_gemma = config.rope_parameters, config.rms_norm_eps, config.layer_style == "gemma4"
    slots = positions[len(context) :]
    visible = torch.tensor([[sees(config, layer, slot, key, slots[0]) for key in positions] for slot in slots])
    seen = torch.cat([context, block])
    per_head = []
    for head in range(heads):
        kv = head // (heads // kv_heads)
        queries = (block @ w[at + "q_proj.weight"].T)[:, head * dim : (head + 1) * dim]
        queries = rotate(rms_norm(queries, w[at + "q_norm.weight"], eps), slots, rope)
        plain_keys = (seen @ w[at + "k_proj.weight"].T)[:, kv * dim : (kv + 1) * dim]
        keys = rotate(rms_norm(plain_keys, w[at + "k_norm.weight"], eps), positions, rope)
        if is_gemma and config.attention_k_eq_v:
            values = plain_keys
        else:
            values = (seen @ w[at + "v_proj.weight"].T)[:, kv * dim : (kv + 1) * dim]
        if is_gemma:
            values = rms_norm(values, 1.0, eps)
        scores = queries @ keys.T / (1.0 if is_gemma else math.sqrt(dim))
        scores = scores.masked_fill(~visible, -torch.inf)
        per_head.append(torch.softmax(scores, dim=-1) @ values)
    return torch.cat(per_head, dim=-1) @ w[at + "o_proj.weight"].T


def double_weights(drafter) -> Weights:
    return {name: tensor.detach().double() for name, tensor in drafter.state_dict().items()}


def markov_bias(w: Weights, previous: int) -> Tensor:
    """Bias `[vocab]` of the vanilla head."""
    return w["markov_head.markov_w2.weight"] @ w["markov_head.markov_w1.weight"][previous]


def head_bias(w: Weights, kind: str, previous: int, h: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Bias `[draft vocabulary]` of any sequential head, and its next state; the state starts as zeros `[rank]`."""
    e, w2 = w["markov_head.markov_w1.weight"][previous], w["markov_head.markov_w2.weight"]
    if kind == "gated":
        gate = torch.sigmoid(w["markov_head.gate_proj.weight"] @ torch.cat([h, e]) + w["markov_head.gate_proj.bias"])
        return w2 @ (gate * e), state
    if kind == "rnn":
        joint = w["markov_head.joint_proj.weight"] @ torch.cat([state, e, h]) + w["markov_head.joint_proj.bias"]
        gate, candidate, output = joint.chunk(3)
        gate = torch.sigmoid(gate)
        return w2 @ torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)
    return w2 @ e, state


def greedy_block(
    w: Weights,
    hidden: Tensor,
    head: Tensor,
    anchor: int,
    *,
    kind: str = "vanilla",
    cap: float | None = None,
    anchor_hidden: Tensor | None = None,
) -> tuple[list[int], list[float]]:
    """Drafts and confidence logits for reference hidden states of the slots that draft.

    Args:
        head: The target's `[vocab, hidden]`; where `w` has `d2t`, only its rows are drafted from.
        kind: Of the sequential head, if there is one.
        cap: Soft cap of the target's logits; it comes before the head's bias.
        anchor_hidden: `[hidden]` of the anchor's slot where it drafts nothing; a recurrent head passes through it.
    """
    ids = list(range(len(head)))
    if "d2t" in w:
        ids = [i + int(offset) for i, offset in enumerate(w["d2t"])]
    has_head, has_confidence = "markov_head.markov_w1.weight" in w, "confidence_head.proj.weight" in w
    previous, drafts, confidences = anchor, [], []
    state = torch.zeros(w["markov_head.markov_w1.weight"].shape[1]).double() if has_head else None
    if has_head and anchor_hidden is not None:
        _, state = head_bias(w, kind, anchor, anchor_hidden, state)
    for h in hidden:
        if has_confidence:
            width = w["confidence_head.proj.weight"].shape[1]
            inputs = torch.cat([h, w["markov_head.markov_w1.weight"][previous]]) if width > len(h) else h
            confidences.append(float(w["confidence_head.proj.weight"][0] @ inputs + w["confidence_head.proj.bias"][0]))
        logits = head[ids] @ h
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        if has_head:
            bias, state = head_bias(w, kind, previous, h, state)
            logits = logits + bias
        previous = ids[int(logits.argmax())]
        drafts.append(previous)
    return drafts, confidences
