"""Stage 5: which drafts stand, and the target's own token after them. Scores and probabilities in, no model in sight.

Written for any number of rows with different lengths; every function is free of host synchronisation.
"""

import torch
from torch import Tensor

from .sampling import draw_uniforms, law, sample
from .types import Acceptance


def accept(
    drafts: Tensor, draft_probs: Tensor | None, target_scores: Tensor, lengths: Tensor, *, do_sample: bool
) -> Acceptance:
    """Judge the verified drafts of every row; when sampling, with uniforms of their own for each row and slot.

    Args:
        drafts: int64 `[rows, width]`.
        draft_probs: `[rows, at least width, vocab]`; None: one-hot at the drafts.
        target_scores: float32 `[rows, 1 + width, vocab]`, after all logits processors.
        lengths: int64 `[rows]`, drafts verified.
    """
    if not do_sample:
        return accept_greedy(drafts, target_scores.argmax(dim=-1), lengths)
    rows, width = drafts.shape
    return accept_sampled(
        drafts,
        None if draft_probs is None else draft_probs[:, :width],
        law(target_scores),
        lengths,
        draw_uniforms(rows, width, device=drafts.device),
        draw_uniforms(rows, device=drafts.device),
    )


def accepted_lengths(stands: Tensor, lengths: Tensor) -> Tensor:
    """Drafts kept per row: the run of True from slot 0, at most `lengths` (bonus token not counted).

    Args:
        stands: bool `[rows, slots]`.
        lengths: int64 `[rows]`.
    """
    slots = torch.arange(stands.shape[1], device=stands.device)
    return (stands & (slots < lengths[:, None])).long().cumprod(dim=-1).sum(dim=-1)


def accept_greedy(draft_tokens: Tensor, target_tokens: Tensor, lengths: Tensor) -> Acceptance:
    """Keep drafts while they equal the target's choice; then take the target's choice.

    Args:
        draft_tokens: int64 `[rows, slots]`.
        target_tokens: int64 `[rows, 1 + slots]`, the target's choice after the anchor and after each draft.
        lengths: int64 `[rows]`, drafts verified.
    """
    num_accepted = accepted_lengths(draft_tokens == target_tokens[:, :-1], lengths)
    next_token = target_tokens.gather(1, num_accepted[:, None]).squeeze(1)
    return Acceptance(num_accepted, next_token, torch.ones_like(num_accepted, dtype=torch.bool))


def accept_sampled(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    lengths: Tensor,
    accept_uniforms: Tensor,
    next_uniforms: Tensor,
) -> Acceptance:
    """Speculative sampling: accept `x_k` with probability `min(1, p_target(x_k) / p_draft(x_k))`, left to right.

    After a rejection the next token comes from the positive part of `p_target - p_draft`, after acceptance of all
    verified drafts from `p_target`. The committed tokens then follow the target's law whatever the draft law is.

    Args:
        draft_tokens: int64 `[rows, slots]`.
        draft_probs: `[rows, slots, vocab]`, the law each draft was drawn from; None: one-hot at `draft_tokens`.
        target_probs: `[rows, 1 + slots, vocab]`, the target law after the anchor and after each draft.
        lengths: int64 `[rows]`, drafts verified; later slots are not looked at.
        accept_uniforms: `[rows, slots]` in [0, 1).
        next_uniforms: `[rows]` in [0, 1).
    """
    index = draft_tokens.unsqueeze(-1)
    target_at_draft = target_probs[:, :-1].gather(-1, index).squeeze(-1)
    draft_at_draft = (
        torch.ones_like(target_at_draft) if draft_probs is None else draft_probs.gather(-1, index).squeeze(-1)
    )
    # u < p_t / p_d without the division, so that p_d = 0 needs no care.
    stands = accept_uniforms * draft_at_draft < target_at_draft
    num_accepted = accepted_lengths(stands, lengths)
    next_law = _law_after(num_accepted, draft_tokens, draft_probs, target_probs, lengths)
    total = next_law.sum(dim=-1)
    return Acceptance(num_accepted, sample(next_law, next_uniforms), (total > 0) & total.isfinite())


def _law_after(
    num_accepted: Tensor,
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    lengths: Tensor,
) -> Tensor:
    """Unnormalised law `[rows, vocab]` of the token after the accepted drafts."""
    rows = torch.arange(num_accepted.shape[0], device=num_accepted.device)
    target_law = target_probs[rows, num_accepted]
    if draft_tokens.shape[1] == 0:
        return target_law
    # After full acceptance there may be no slot left; any one will do, its law is not used.
    slot = num_accepted.clamp(max=draft_tokens.shape[1] - 1)
    if draft_probs is None:
        residual = target_law.scatter(1, draft_tokens[rows, slot][:, None], 0.0)
    else:
        residual = (target_law - draft_probs[rows, slot]).clamp(min=0.0)
    was_rejected = num_accepted < lengths
    # Identical laws leave no residual; then a rejection can only be rounding, and the target law is right.
    use_residual = was_rejected & (residual.sum(dim=-1) > 0)
    return torch.where(use_residual[:, None], residual, target_law)


def expected_tau(conditional: Tensor) -> Tensor:
    """Expected accepted length, bonus counted: `1 + sum_k c_1 ... c_k` for `[..., slots]` acceptance probabilities."""
    return 1.0 + conditional.cumprod(dim=-1).sum(dim=-1)


def acceptance_probability(draft_probs: Tensor, target_probs: Tensor) -> Tensor:
    """Probability that a draft from `draft_probs` is accepted under `target_probs`, both `[..., vocab]`.

    The sum of minima, `1 - 0.5 * ||p_draft - p_target||_1`; also the confidence head's label `c*` (Eq. 8).
    """
    return 1.0 - 0.5 * (draft_probs - target_probs).abs().sum(dim=-1)
