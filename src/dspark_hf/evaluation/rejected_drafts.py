"""How drafts go on behind their first rejected token, which a text does not tell.

A threshold may verify drafts behind a rejected one, so how many are verified depends on tokens that are in no text.
Given that slot k is the first rejected one, its draft has the law `(p_draft - p_target)^+`, normalised, whatever
token the target then put in its place: drafting x and rejecting it has probability `(p_draft(x) - p_target(x))^+`,
and the token in its place is drawn without a look at x. What follows is the drafter's own law on that prefix.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..modeling_dspark import DSparkDraftModel
from ..training.anchors import AnchorBlocks


class Drafted(NamedTuple):
    """Blocks drafted on the text's own tokens.

    Attributes:
        hidden: `h_k` `[blocks, slots, hidden]`.
        anchor_hidden: `[blocks, hidden]` of an anchor's slot that drafts nothing; None: there is none.
        base_logits: `U_k`, float32 `[blocks, slots, draft vocabulary]`.
        logits: With the sequential head's bias.
        embeddings: `W_1[x_{k-1}]` `[blocks, slots, rank]`; None without a sequential head.
    """

    hidden: Tensor
    anchor_hidden: Tensor | None
    base_logits: Tensor
    logits: Tensor
    embeddings: Tensor | None


@dataclass(frozen=True)
class BlockLaws:
    """Laws of the slots on the text's own tokens, over the draft vocabulary.

    Attributes:
        draft_logits: float32 `[blocks, slots, draft vocabulary]`.
        draft_probs, target_probs: The same shape; None when greedy.
        temperature: Of both; 0: greedy.
    """

    draft_logits: Tensor
    draft_probs: Tensor | None
    target_probs: Tensor | None
    temperature: float = 0.0


class Rejected(NamedTuple):
    """One draft of each block that leaves the text.

    Attributes:
        logits: float32 `[blocks, slots]`, raw confidence logits along it.
        first: int64 `[blocks]`, slot from 0 whose draft is the first rejected one.
    """

    logits: Tensor
    first: Tensor


def follow_rejected(
    drafter: DSparkDraftModel,
    drafted: Drafted,
    laws: BlockLaws,
    blocks: AnchorBlocks,
    acceptance: Tensor,
    generator: torch.Generator,
) -> Rejected:
    """Draw a first rejected slot for each block, its draft, and what is drafted behind it.

    Args:
        drafter: With a confidence head.
        drafted, laws: Of these blocks.
        blocks: One row.
        acceptance: float64 `[blocks, slots]`, given the text.
        generator: On the laws' device.
    """
    first = _first_rejected(acceptance, generator)
    head = drafter.markov_head
    assert drafter.confidence_head is not None, "thresholds need a confidence head"
    if head is None:  # the confidence reads no drafted token
        return Rejected(drafter.confidence_head(drafted.hidden, None).float(), first)
    rejected = _rejected_token(laws, first, generator)
    before = blocks.previous_tokens[0].clone()  # the token before each slot
    state: Tensor | None = None
    for k in range(before.shape[1] - 1):
        embedding = head.embed(before[:, k])
        if k == 0:
            state = head.started(embedding, drafted.anchor_hidden)
        bias, state = head.step(embedding, drafted.hidden[:, k], state)
        drawn = _draw(drafted.base_logits[:, k] + bias, laws.temperature, generator)
        token = torch.where(first == k, rejected, drawn)
        if (ids := drafter.draft_token_ids) is not None:
            token = ids[token]
        before[:, k + 1] = torch.where(k < first, before[:, k + 1], token)
    logits: Tensor = drafter.confidence_head(drafted.hidden, head.embed(before))
    return Rejected(logits.float(), first)


def _first_rejected(acceptance: Tensor, generator: torch.Generator) -> Tensor:
    """int64 `[blocks]`, drawn given that some draft is rejected; 0 where none can be."""
    survival = acceptance.cumprod(dim=1)
    dies = torch.cat([torch.ones_like(survival[:, :1]), survival[:, :-1]], dim=1) - survival
    dies[:, 0] += dies.sum(dim=1) <= 0
    return torch.multinomial(dies.clamp(min=0), 1, generator=generator).squeeze(1)


def _rejected_token(laws: BlockLaws, first: Tensor, generator: torch.Generator) -> Tensor:
    """Index in the draft vocabulary of each block's first rejected draft, int64 `[blocks]`."""
    rows = torch.arange(len(first), device=first.device)
    if laws.draft_probs is None or laws.target_probs is None:
        return laws.draft_logits[rows, first].argmax(dim=-1)
    draft = laws.draft_probs[rows, first]
    excess = (draft - laws.target_probs[rows, first]).clamp(min=0)
    # Equal laws reject nothing but for rounding, and behind the text's end nobody looks.
    excess = torch.where(excess.sum(dim=-1, keepdim=True) > 0, excess, draft)
    return torch.multinomial(excess, 1, generator=generator).squeeze(1)


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(dim=-1)
    probs = (logits / temperature).softmax(dim=-1)
    return torch.multinomial(probs, 1, generator=generator).squeeze(1)
