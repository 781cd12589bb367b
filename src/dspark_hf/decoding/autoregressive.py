"""Stages 1 to 3 with a drafter that reads pairs: slot by slot, each from the state that the slot before came to."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..modeling_autoregressive import AutoregressiveDraftModel
from ..modeling_dspark import DSparkDraftModel
from .candidate_generator import CONTEXT_CHUNK_TOKENS, DSparkCandidateGenerator
from .draft import draw_slots, num_before_first
from .types import DraftBlock, Proposal


class AutoregressiveCandidateGenerator(DSparkCandidateGenerator):
    """Drafts for one running generation of one row with an MTP or Eagle3 drafter.

    The cache holds a pair for each committed token but the first: the target's features of the position before, and
    the token. Pairs of the drafter's own states are written behind them while a round drafts, and then forgotten: once
    its tokens are accepted, the target's features take their place.
    """

    _drafter: AutoregressiveDraftModel

    @torch.no_grad()
    def propose(self, ids: Tensor) -> Proposal | None:
        """As [`DSparkCandidateGenerator.propose`]."""
        num_slots = min(self._settings.num_draft_tokens, self._max_length - ids.shape[1] - 1)
        if num_slots <= 0 or not self.scheduler.wants_draft(1, self._num_observed):
            return None
        num_slots = self.scheduler.slots({0: self._max_length - ids.shape[1]}, num_slots)
        drawn = draw_slots(
            self._slot_logits(ids), num_slots, ids, self.processor,
            draft_ids=self._draft_ids, do_sample=self.do_sample, vocab_size=self._vocab_size,
        )  # fmt: skip
        self._cache.forget(num_slots - 1)
        block = DraftBlock(drawn.tokens, drawn.draft_probs, None, num_before_first(~drawn.is_usable))
        return self._scheduled(block, row_ids=(0,))

    def _slot_logits(self, ids: Tensor) -> Callable[[int, Tensor], Tensor]:
        """What gives slot k's logits `[1, draftable tokens]` from the token before it; k = 0 reads what is new."""
        state: Tensor | None = None

        def slot_logits(k: int, previous: Tensor) -> Tensor:
            nonlocal state
            if k == 0:
                outputs = self._read_committed(ids)
            else:
                # Its last own pair stands right behind the committed ones, at the position before its token's.
                outputs = self._read(previous[:, None], self._cache.length, states=state)
            state = outputs.hidden_states[0][:, -1:]
            hidden = outputs.last_hidden_state[:, -1:].to(self._head_device, self._head_dtype)
            return self._drafter.base_logits(hidden, self._head)[:, 0]

        return slot_logits

    def _read_committed(self, ids: Tensor) -> Any:
        """Run the pairs of committed tokens that are not in the cache yet; the last one holds the anchor."""
        features, _ = self._take_pending()
        assert features is not None, "each round commits a token"
        tokens = self._without_holes(ids)[:, -features.shape[1] :]
        outputs = None
        for start in range(0, features.shape[1], CONTEXT_CHUNK_TOKENS):
            part = slice(start, start + CONTEXT_CHUNK_TOKENS)
            first = self._num_observed - features.shape[1] + start
            outputs = self._read(tokens[:, part], first, context_features=features[:, part])
        return outputs

    def _read(self, tokens: Tensor, first_position: int, **inputs: Tensor | None) -> Any:
        """Run pairs of `tokens` `[1, T]` from `first_position` on, and keep them in the cache."""
        positions = torch.arange(first_position, first_position + tokens.shape[1], device=self._drafter.device)
        size: int = getattr(self._embedding, "num_embeddings", self._drafter.config.vocab_size)
        # An image's placeholder may lie beyond the embedding, as the target's own forward knows.
        known = tokens.to(self._target_device).clamp(max=size - 1)
        embedded = self._drafter.embed(known, self._embedding)
        outputs = self._drafter(embedded, positions[None], cache=self._cache, **inputs)
        self._cache.commit(tokens.shape[1])
        return outputs

    def _without_holes(self, ids: Tensor) -> Tensor:
        """The text `[1, length]` without the prompt's padding."""
        if self._padding_mask is None:
            return ids
        is_real = self._padding_mask[0].bool().to(ids.device)
        length = len(is_real)
        return torch.cat([ids[:, :length][:, is_real], ids[:, length:]], dim=1)

    def _flush(self) -> None:
        """Nothing: a pair is complete only when the token behind its features is known."""


def generator_class(drafter: DSparkDraftModel) -> type[DSparkCandidateGenerator]:
    """What drafts with a drafter, for one row."""
    is_autoregressive = isinstance(drafter, AutoregressiveDraftModel)
    return AutoregressiveCandidateGenerator if is_autoregressive else DSparkCandidateGenerator
