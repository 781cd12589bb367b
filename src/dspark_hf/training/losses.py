"""The three losses of the paper (Eqs. 8 to 12): a slow reference on probability tables, and the pass that trains.

The pass never holds more than a chunk of the positions' logits, and none across the backward: the gradients with
respect to hidden states, codes and `W_2` are computed beside the loss, chunk by chunk. On a vocabulary of 152k a
float32 row is 0.6 MB, so a batch of 10,000 positions would otherwise need 6 GB several times over.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..decoding.accept import acceptance_probability
from .head_rows import HeadRows

# Logits of this size, float32, exist at once, in about four copies. Measured on a CPU with 2 MB of L2 per core: 8 MiB
# is 10 to 45 % faster than 2 or 64.
CHUNK_BYTES = 8 * 2**20
# There a chunk has to be worth launching two dozen kernels.
ACCELERATOR_CHUNK_BYTES = 256 * 2**20


def chunk_bytes(device: torch.device) -> int:
    """Size of one chunk's logits on a device."""
    return CHUNK_BYTES if device.type == "cpu" else ACCELERATOR_CHUNK_BYTES


@dataclass(frozen=True)
class LossWeights:
    """Coefficients of cross-entropy, full L1 and confidence (Eq. 12)."""

    cross_entropy: float = 0.1
    total_variation: float = 0.9
    confidence: float = 1.0


def reference_losses(
    draft_probs: Tensor, target_probs: Tensor, next_tokens: Tensor, confidence: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Unweighted loss terms of each position, differentiable: the slow reference.

    Args:
        draft_probs, target_probs: `[..., vocab]`.
        next_tokens: int64 `[...]`, `x*`.
        confidence: `c_k` `[...]` in (0, 1).

    Returns:
        Cross-entropy (Eq. 9), full L1 (Eq. 10) and confidence loss (Eq. 11), each `[...]`.
    """
    cross_entropy = -draft_probs.gather(-1, next_tokens[..., None]).squeeze(-1).log()
    total_variation = (draft_probs - target_probs).abs().sum(dim=-1)
    label = acceptance_probability(draft_probs, target_probs).detach().clamp(0, 1)
    return cross_entropy, total_variation, F.binary_cross_entropy(confidence, label, reduction="none")


@dataclass(frozen=True)
class PositionTerms:
    """What each position contributed, float32 `[n]`, detached.

    Attributes:
        cross_entropy: 0 where the true token cannot be drafted.
        total_variation: Full L1, in [0, 2].
        acceptance: `c*` (Eq. 8), the probability that a draft is accepted.
        is_best_token: bool, whether the draft law's best token is the true one.
    """

    cross_entropy: Tensor
    total_variation: Tensor
    acceptance: Tensor
    is_best_token: Tensor


def draft_loss(
    hidden: Tensor | None,
    codes: Tensor | None,
    markov_w2: Tensor | None,
    *,
    head: HeadRows,
    target_hidden: Tensor,
    log_normalizer: Tensor,
    next_tokens: Tensor,
    position_weight: Tensor,
    weights: LossWeights,
) -> tuple[Tensor, PositionTerms]:
    """`sum_i w_i (a CE_i + b L1_i)` over positions, and what each contributed.

    A true token outside the draft vocabulary has no cross-entropy term; its law counts in L1 like any other, with
    the target's probability outside the vocabulary as a part of the distance.

    Args:
        hidden: `h_k` `[n, hidden]`, for the target's head; None: the drafter has a head of its own, and its hidden
            states and weight are `codes` and `markov_w2`.
        codes: `[n, rank]`, the sequential head's; None at rank 0.
        markov_w2: `W_2` `[draft_vocab, rank]`; None at rank 0.
        head: The target's head.
        target_hidden: `[n, hidden]`, the target's final hidden state at the position whose law is learned.
        log_normalizer: float32 `[n]`, of that law over the whole vocabulary.
        next_tokens: int64 `[n]`, token ids.
        position_weight: float32 `[n]`.
        weights: Coefficients; `confidence` is not used here.
    """
    inputs = (head, target_hidden, log_normalizer, head.draft_ids(next_tokens), position_weight, weights)
    # Every product below has the dtype it should have; autocast would also round the loss's own sums.
    with torch.autocast(position_weight.device.type, enabled=False):
        loss, *terms = _DraftLoss.apply(hidden, codes, markov_w2, *inputs)
    return loss, PositionTerms(*terms)


class _DraftLoss(torch.autograd.Function):
    """Loss and, beside it, its gradients; the backward only scales them."""

    @staticmethod
    @torch.no_grad()
    def forward(
        ctx: Any,
        hidden: Tensor | None,
        codes: Tensor | None,
        markov_w2: Tensor | None,
        head: HeadRows,
        target_hidden: Tensor,
        log_normalizer: Tensor,
        draft_ids: Tensor,
        position_weight: Tensor,
        weights: LossWeights,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        dtype = head.weight.dtype
        wants_grad = any(ctx.needs_input_grad[:3])
        w2 = None if markov_w2 is None else markov_w2.to(dtype)
        grad_hidden = torch.empty_like(hidden) if wants_grad and hidden is not None else None
        grad_codes = torch.empty_like(codes) if wants_grad and codes is not None else None
        grad_w2 = torch.zeros_like(markov_w2) if wants_grad and markov_w2 is not None else None
        rows = max(1, chunk_bytes(position_weight.device) // (4 * head.weight.shape[0]))
        terms: list[tuple[Tensor, ...]] = []
        for start in range(0, position_weight.shape[0], rows):
            part = slice(start, start + rows)
            code = None if codes is None else codes[part].to(dtype)
            bias = None if code is None or w2 is None else F.linear(code, w2)
            if hidden is None:
                assert bias is not None, "without the target's head there is one of its own"
                base = logits = bias.float()
            else:
                base = head.logits(hidden[part].to(dtype))
                logits = base.clone() if head.has_cap else base  # the cap's slope is read off `base`
                if bias is not None:
                    logits.add_(bias)
            target_probs = head.logits(target_hidden[part].to(dtype)).sub_(log_normalizer[part, None]).exp_()
            chunk, grad = _chunk_loss(
                logits, target_probs, draft_ids[part], position_weight[part], weights, wants_grad=wants_grad
            )
            terms.append(chunk)
            if grad is None:
                continue
            if grad_hidden is not None:
                grad_hidden[part] = head.grad_through_treatment(grad, base).to(dtype) @ head.weight
            if grad_codes is not None and grad_w2 is not None and w2 is not None and code is not None:
                grad_bias = grad.to(dtype)
                grad_codes[part] = grad_bias @ w2
                grad_w2 += grad_bias.T @ code
        if not terms:  # a batch without anchors
            nothing = position_weight.new_zeros(0)
            terms = [(nothing, nothing, nothing, nothing.bool())]
        cross_entropy, total_variation, acceptance, is_best = (torch.cat(term) for term in zip(*terms, strict=True))
        each = weights.cross_entropy * cross_entropy + weights.total_variation * total_variation
        loss = (position_weight * each).sum()
        ctx.grads = (grad_hidden, grad_codes, grad_w2)
        ctx.mark_non_differentiable(cross_entropy, total_variation, acceptance, is_best)
        return loss, cross_entropy, total_variation, acceptance, is_best

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        scaled = tuple(None if grad is None else grad * grad_loss for grad in ctx.grads)
        return (*scaled, None, None, None, None, None, None)


def _chunk_loss(
    logits: Tensor,
    target_probs: Tensor,
    draft_ids: Tensor,
    position_weight: Tensor,
    weights: LossWeights,
    *,
    wants_grad: bool,
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Terms of one chunk and the gradient of its weighted loss with respect to `logits` `[n, draft_vocab]`.

    Both tables are overwritten.
    """
    is_draftable = draft_ids >= 0
    index = draft_ids.clamp(min=0)[:, None]
    best, best_id = logits.max(dim=-1)
    true_logit = logits.gather(1, index).squeeze(1)
    # softmax by hand, in place: each pass over a chunk costs as much as a tenth of its products.
    draft_probs = logits.sub_(best[:, None]).exp_()
    total = draft_probs.sum(dim=-1)
    draft_probs.div_(total[:, None])
    cross_entropy = torch.where(is_draftable, best + total.log() - true_logit, 0.0)
    outside = (1.0 - target_probs.sum(dim=-1)).clamp(min=0.0)
    difference = torch.sub(draft_probs, target_probs, out=target_probs)
    total_variation = torch.linalg.vector_norm(difference, ord=1, dim=-1) + outside
    acceptance = (1.0 - 0.5 * total_variation).clamp(0.0, 1.0)
    terms = (cross_entropy, total_variation, acceptance, is_draftable & (best_id == draft_ids))
    if not wants_grad:
        return terms, None
    # d L1 / d z_j = p_j (s_j - sum_i s_i p_i) with s the signs; d CE / d z_j = p_j - [j is the true token].
    signs = difference.sign_()
    expected_sign = (signs[:, None] @ draft_probs[:, :, None]).flatten()
    tv_scale = weights.total_variation * position_weight
    ce_scale = weights.cross_entropy * position_weight * is_draftable
    signs.mul_(tv_scale[:, None]).add_((ce_scale - tv_scale * expected_sign)[:, None])
    grad = signs.mul_(draft_probs)
    grad.scatter_add_(1, index, -ce_scale[:, None])
    return terms, grad
