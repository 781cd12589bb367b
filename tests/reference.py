"""A slow reference of the drafter in float64: no cache, no attention interface, one block and one head at a time.

Written from the paper's equations and the released code's conventions, on a plain dict of tensors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rotate(vectors: Tensor, positions: list[int], theta: float) -> Tensor:
    """RoPE of one head's vectors `[tokens, head_dim]`."""
    half = vectors.shape[-1] // 2
    frequencies = theta ** -(torch.arange(half, dtype=torch.float64) / half)
    angles = torch.tensor(positions, dtype=torch.float64)[:, None] * frequencies
    low, high = vectors[:, :half], vectors[:, half:]
    return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], dim=-1)


def block_hidden(w: Weights, config, features: Tensor, block: Tensor, anchor_position: int) -> Tensor:
    """`h` float64 `[slots, hidden]` for one block.

    Args:
        features: `[context, m * hidden]` of the tokens at positions 0 to anchor_position - 1.
        block: `[slots, hidden]`, embeddings of the anchor and the masks.
    """
    eps = config.rms_norm_eps
    context = rms_norm(features @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    positions = [*range(len(context)), *range(anchor_position, anchor_position + len(block))]
    hidden = block
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}."
        normed = rms_norm(hidden, w[at + "input_layernorm.weight"], eps)
        hidden = hidden + attention(w, config, at + "self_attn.", context, normed, positions)
        normed = rms_norm(hidden, w[at + "post_attention_layernorm.weight"], eps)
        gate = normed @ w[at + "mlp.gate_proj.weight"].T
        up = normed @ w[at + "mlp.up_proj.weight"].T
        hidden = hidden + (gate * torch.sigmoid(gate) * up) @ w[at + "mlp.down_proj.weight"].T
    return rms_norm(hidden, w["norm.weight"], eps)


def attention(w: Weights, config, at: str, context: Tensor, block: Tensor, positions: list[int]) -> Tensor:
    dim, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    theta, eps = config.rope_parameters["rope_theta"], config.rms_norm_eps
    seen = torch.cat([context, block])
    per_head = []
    for head in range(heads):
        kv = head // (heads // kv_heads)
        queries = (block @ w[at + "q_proj.weight"].T)[:, head * dim : (head + 1) * dim]
        queries = rotate(rms_norm(queries, w[at + "q_norm.weight"], eps), positions[len(context) :], theta)
        keys = (seen @ w[at + "k_proj.weight"].T)[:, kv * dim : (kv + 1) * dim]
        keys = rotate(rms_norm(keys, w[at + "k_norm.weight"], eps), positions, theta)
        values = (seen @ w[at + "v_proj.weight"].T)[:, kv * dim : (kv + 1) * dim]
        per_head.append(torch.softmax(queries @ keys.T / math.sqrt(dim), dim=-1) @ values)
    return torch.cat(per_head, dim=-1) @ w[at + "o_proj.weight"].T


def double_weights(drafter) -> Weights:
    return {name: tensor.detach().double() for name, tensor in drafter.state_dict().items()}


def markov_bias(w: Weights, previous: int) -> Tensor:
    """Bias `[vocab]` of the vanilla head."""
    return w["markov_head.markov_w2.weight"] @ w["markov_head.markov_w1.weight"][previous]


def greedy_block(w: Weights, hidden: Tensor, head: Tensor, anchor: int) -> tuple[list[int], list[float]]:
    """Drafts and confidence logits for reference hidden states; `head` is the target's `[vocab, hidden]`."""
    previous, drafts, confidences = anchor, [], []
    for h in hidden:
        confidence_input = torch.cat([h, w["markov_head.markov_w1.weight"][previous]])
        confidences.append(
            float(w["confidence_head.proj.weight"][0] @ confidence_input + w["confidence_head.proj.bias"][0])
        )
        previous = int((head @ h + markov_bias(w, previous)).argmax())
        drafts.append(previous)
    return drafts, confidences
