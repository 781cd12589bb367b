"""Attention of an autoregressive drafter that is unrolled over its own hidden states, for many anchors at once.

The first step reads a whole text, causally: what decoding reads of committed tokens. Every further step has one query
for each anchor, which sees

    the first step's pairs strictly before the anchor, and
    the own steps of its anchor up to itself,

never another anchor's steps. That is what a drafter sees when it decodes after that anchor, so logits agree.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


class UnrolledSteps:
    """Keys and values of the steps so far, of one layer; gradients flow through all of them.

    Args:
        anchor_positions: int64 `[rows, A]`. Pair i holds token i + 1: an anchor's token is in the pair before it.
    """

    def __init__(self, anchor_positions: Tensor) -> None:
        self._anchors = anchor_positions
        self._text: tuple[Tensor, Tensor] | None = None
        self._own: list[tuple[Tensor, Tensor]] = []

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, *, scaling: float) -> Tensor:
        """Add a step's keys and values, and attend.

        Args:
            queries: `[rows, heads, tokens, head_dim]`: the tokens of the text in the first step, then one per anchor.
            keys, values: `[rows, kv_heads, tokens, head_dim]`.
            scaling: Factor on the scores.

        Returns:
            `[rows, tokens, heads, head_dim]`.
        """
        if self._text is None:
            self._text = keys, values
            dtype = values.dtype  # under autocast norms leave queries and keys in float32
            attended = F.scaled_dot_product_attention(
                queries.to(dtype), keys.to(dtype), values, is_causal=True, scale=scaling, enable_gqa=True
            )
            return attended.transpose(1, 2)
        self._own.append((keys, values))
        text_keys, text_values = self._text
        is_before = torch.arange(text_keys.shape[2], device=queries.device) < self._anchors[:, :, None]
        # [rows, kv_heads, A, steps, head_dim]
        own_keys, own_values = (torch.stack(states, dim=3) for states in zip(*self._own, strict=True))
        rows, num_heads, num_anchors, head_dim = queries.shape
        # Query heads that share keys lie beside each other.
        grouped = (queries * scaling).view(rows, keys.shape[1], -1, num_anchors, head_dim)
        to_text = torch.einsum("rkgad,rksd->rkgas", grouped, text_keys)
        to_text = to_text.masked_fill(~is_before[:, None, None], -torch.inf)
        to_own = torch.einsum("rkgad,rkatd->rkgat", grouped, own_keys)
        weights = torch.cat([to_text, to_own], dim=-1).softmax(dim=-1).to(values.dtype)
        over_text, over_own = weights.split([to_text.shape[-1], to_own.shape[-1]], dim=-1)
        attended = torch.einsum("rkgas,rksd->rkgad", over_text, text_values)
        attended = attended + torch.einsum("rkgat,rkatd->rkgad", over_own, own_values)
        return attended.reshape(rows, num_heads, num_anchors, head_dim).transpose(1, 2)
