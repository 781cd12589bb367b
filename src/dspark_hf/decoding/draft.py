"""Stage 1: draw a block of draft tokens, slot by slot, and keep the exact law of each draw."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..modeling_dspark import DSparkDraftModel
from .prefixes import Prefixes
from .sampling import ScoreProcessor, draw_uniforms, law, sample
from .types import DraftBlock


def draft_block(
    drafter: DSparkDraftModel,
    hidden: Tensor,
    base_logits: Tensor,
    prefix_ids: Tensor | Prefixes,
    processor: ScoreProcessor,
    *,
    draft_ids: Tensor | None,
    do_sample: bool,
    vocab_size: int | None = None,
    anchor_hidden: Tensor | None = None,
) -> DraftBlock:
    """Turn the backbone's parallel output into tokens: `p_k = softmax(U_k + B_k(x_<k))` (Eq. 4), left to right.

    When sampling, each slot's logits go through generate()'s processors with the draft as prefix, the token is drawn
    from that law, and that law is kept: acceptance is exact only with the law that was sampled from. Rows use
    independent uniforms.

    Args:
        hidden: `h_k`, `[rows, slots, hidden]`.
        base_logits: `U_k`, float32 `[rows, slots, draftable tokens]`.
        prefix_ids: int64 `[rows, length]`, committed tokens, or rows of several lengths; the last token of each is
            the anchor `x_0`.
        processor: The processors of this generate() call.
        draft_ids: The drafter's `draftable_ids`, on its device.
        do_sample: False: take the best token of each slot's processed scores.
        vocab_size: The target's; None: the drafter's.
        anchor_hidden: `[rows, hidden]` of the anchor's slot in the fill-in layout, where it drafts nothing.
    """
    num_slots = base_logits.shape[1]
    head = drafter.markov_head
    state: Tensor | None = None
    embeddings: list[Tensor] = []

    def slot_logits(k: int, previous: Tensor) -> Tensor:
        nonlocal state
        if head is None:
            return base_logits[:, k]
        # A token that was added to the target since has no embedding of its own.
        known = previous.to(hidden.device).clamp(max=drafter.config.vocab_size - 1)
        embedding = head.embed(known)
        embeddings.append(embedding)
        if k == 0:
            state = head.started(embedding, anchor_hidden)
        bias, state = head.step(embedding, hidden[:, k], state)
        return base_logits[:, k] + bias[..., : base_logits.shape[-1]]

    drawn = draw_slots(
        slot_logits, num_slots, prefix_ids, processor,
        draft_ids=draft_ids, do_sample=do_sample, vocab_size=vocab_size or drafter.config.vocab_size,
    )  # fmt: skip
    is_usable = drawn.is_usable
    confidence_logits = _confidence_logits(drafter, hidden, embeddings)
    if confidence_logits is not None:
        confidence_logits = confidence_logits.to(is_usable.device)
        is_usable = is_usable & confidence_logits.isfinite()
    return DraftBlock(drawn.tokens, drawn.draft_probs, confidence_logits, num_before_first(~is_usable))


class DrawnSlots(NamedTuple):
    """What came out of all slots."""

    tokens: Tensor  # int64 [rows, slots]
    draft_probs: Tensor | None  # float32 [rows, slots, vocab]; None when greedy
    is_usable: Tensor  # bool [rows, slots]


def draw_slots(
    slot_logits: Callable[[int, Tensor], Tensor],
    num_slots: int,
    prefix_ids: Tensor | Prefixes,
    processor: ScoreProcessor,
    *,
    draft_ids: Tensor | None,
    do_sample: bool,
    vocab_size: int,
) -> DrawnSlots:
    """Draw slot after slot, each from its logits after the processors, with the drafts before it as prefix.

    Args:
        slot_logits: `(k, previous tokens int64 [rows])` to slot k's logits, float32 `[rows, draftable tokens]`; called
            once for each k = 0, 1, ...
        prefix_ids, processor, draft_ids, do_sample, vocab_size: As for [`draft_block`].
    """
    ids = prefix_ids if isinstance(prefix_ids, Tensor) else prefix_ids.ids
    rows, device = ids.shape[0], ids.device  # of everything that acceptance will see; the drafter may be elsewhere
    uniforms = draw_uniforms(num_slots, rows, device=device) if do_sample else None
    previous = prefix_ids[:, -1] if isinstance(prefix_ids, Tensor) else prefix_ids.last
    slots: list[_Slot] = []
    for k in range(num_slots):
        logits = slot_logits(k, previous)
        if draft_ids is not None:
            # Processors and acceptance speak of the whole vocabulary; what cannot be drafted has probability 0.
            whole = logits.new_full((rows, vocab_size), -torch.inf)
            logits = whole.index_copy_(1, draft_ids, logits)
        slots.append(_draw(logits.to(device), prefix_ids, processor, None if uniforms is None else uniforms[k]))
        previous = slots[-1].token
        if processor.reads_prefix:
            new = previous[:, None]
            prefix_ids = (
                torch.cat([prefix_ids, new], dim=1) if isinstance(prefix_ids, Tensor) else prefix_ids.followed_by(new)
            )
    laws = [slot.probs for slot in slots if slot.probs is not None]
    return DrawnSlots(
        tokens=torch.stack([slot.token for slot in slots], dim=1),
        draft_probs=torch.stack(laws, dim=1) if laws else None,
        is_usable=torch.stack([slot.is_usable for slot in slots], dim=1),
    )


def num_before_first(is_broken: Tensor) -> Tensor:
    """int64 `[rows]`: slots of bool `[rows, slots]` before the first that is true."""
    return (~is_broken).long().cumprod(dim=-1).sum(dim=-1)


class _Slot(NamedTuple):
    """One slot's draw, for all rows."""

    token: Tensor  # int64 [rows]
    probs: Tensor | None  # float32 [rows, vocab]; None when greedy
    is_usable: Tensor  # bool [rows]


def _draw(logits: Tensor, prefix_ids: Tensor | Prefixes, processor: ScoreProcessor, uniforms: Tensor | None) -> _Slot:
    """Process one slot's logits and draw from them, or take the best token when there are no uniforms."""
    # The maximum shows NaN and +inf, one read instead of a test of each entry; a head may say -inf.
    is_usable = logits.amax(dim=-1).isfinite()
    # Some processors raise at NaN. A broken slot is not verified, so zeros do as well.
    scores = processor.at_slot(prefix_ids, torch.where(is_usable[:, None], logits, 0.0))
    if uniforms is None:
        return _Slot(scores.argmax(dim=-1), None, is_usable)
    probs = law(scores)
    is_usable = is_usable & probs.sum(dim=-1).isfinite()
    # Where the numbers are broken any law will do: this slot is not verified.
    probs = torch.where(is_usable[:, None], probs, 1.0)
    return _Slot(sample(probs, uniforms), probs, is_usable)


def _confidence_logits(drafter: DSparkDraftModel, hidden: Tensor, embeddings: list[Tensor]) -> Tensor | None:
    """Raw confidence logits `[rows, slots]`: slot k reads `h_k` and the token before it, never its own."""
    if drafter.confidence_head is None:
        return None
    previous_embeddings = torch.stack(embeddings, dim=1) if embeddings else None
    logits: Tensor = drafter.confidence_head(hidden, previous_embeddings)
    return logits.float()
