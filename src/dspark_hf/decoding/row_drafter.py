"""Stages 1 to 3 for several rows of different lengths."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList

from .._compat import TargetModel
from ..model.row_slots import RowContextCache, RowSlots, attention_mask_for, columns_to_see
from ..modeling_dspark import DSparkDraftModel
from .candidate_generator import CONTEXT_CHUNK_TOKENS, DSparkCandidateGenerator
from .prefixes import Prefixes
from .row_processors import processors_for_rows
from .sampling import ScoreProcessor
from .types import Proposal


class RowDrafter(DSparkCandidateGenerator):
    """Drafts for several rows of one generation; as [`DSparkCandidateGenerator`] does for one.

    Args:
        capacity: Most tokens of a row, padding not counted.
        num_rows: Of the whole batch.
    """

    def __init__(
        self,
        drafter: DSparkDraftModel,
        target: TargetModel,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        model_kwargs: dict[str, Any],
        capacity: int,
        num_rows: int,
        ids_device: torch.device | None = None,
    ) -> None:
        super().__init__(drafter, target, generation_config, logits_processor, model_kwargs, num_rows, ids_device)
        self._rows = RowContextCache(drafter.config.num_hidden_layers, capacity + drafter.config.num_block_tokens)
        num_sequences = generation_config.num_return_sequences
        for_rows = functools.cache(lambda rows: processors_for_rows(logits_processor, rows, num_rows, num_sequences))
        self.processor = ScoreProcessor(logits_processor, for_rows)
        # Of the tokens observed but not yet in the cache: features, positions, and which are no padding.
        self._new: list[tuple[Tensor, Tensor, Tensor]] = []

    @property
    def num_draft_tokens(self) -> int:
        """Most drafts of a round."""
        return self._settings.num_draft_tokens

    @torch.no_grad()
    def observe_rows(self, outputs: Any, positions: Tensor, is_committed: Tensor) -> None:
        """Take the features of a target forward over `[rows, tokens]` as context, where `is_committed`.

        `positions` and `is_committed` may cover only the first tokens of the forward; the rest is not looked at.
        """
        device, dtype = self._drafter.device, self._drafter.dtype
        layers = self._features_of(outputs)
        num_rows, num_tokens = positions.shape
        size = max(1, CONTEXT_CHUNK_TOKENS // num_rows)
        for start in range(0, num_tokens, size):
            chunk = slice(start, min(start + size, num_tokens))
            features = torch.cat([layer[:, chunk].to(device) for layer in layers], dim=-1).to(dtype)
            if sum(part[1].shape[1] for part in self._new) + features.shape[1] > size:
                self._flush_rows()
            self._new.append((features, positions[:, chunk].to(device), is_committed[:, chunk].to(device)))

    @torch.no_grad()
    def propose_rows(
        self,
        prefixes: Prefixes,
        num_context: Tensor,
        room: Tensor,
        is_live: Tensor,
        *,
        max_context: int,
        num_to_go: Mapping[int, int],
    ) -> Proposal | None:
        """Draft after each row's last token, its anchor; None for a plain round, as in [`propose`].

        Args:
            num_context: int64 `[rows]`, committed tokens before the anchor, padding not counted.
            room: int64 `[rows]`, most drafts of each row that max_length leaves room for.
            is_live: bool `[rows]`, rows that have not ended.
            max_context: The largest `num_context` of a live row, for the host.
            num_to_go: Tokens that max_length leaves room for, of each live row by its id, on the host.
        """
        num_slots = min(self._settings.num_draft_tokens, max(num_to_go.values(), default=1) - 1)
        if num_slots <= 0 or not self.scheduler.wants_draft(len(num_to_go), max_context):
            return None
        num_slots = self.scheduler.slots(num_to_go, num_slots)
        hidden = self._block_hidden_of_rows(prefixes.last[:, None], num_context, max_context)
        return self._draft(hidden, num_slots, prefixes, row_ids=prefixes.rows, is_live=is_live, room=room)

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but those of int64 `rows`."""
        rows = rows.to(self._drafter.device)
        self._rows.keep(rows)
        self._new = [(features[rows], positions[rows], is_real[rows]) for features, positions, is_real in self._new]

    def _block_hidden_of_rows(self, anchors: Tensor, num_context: Tensor, max_context: int) -> Tensor:
        """Backbone output `[rows, block, hidden]` for blocks that start at `anchors` `[rows, 1]`."""
        device = self._drafter.device
        block_ids = torch.cat([anchors.to(self._target_device), self._masks.expand(len(anchors), -1)], dim=1)
        num_block = block_ids.shape[1]
        starts = num_context[:, None].to(device)
        positions = starts + torch.arange(num_block, device=device)
        is_real = torch.ones_like(positions, dtype=torch.bool)
        features = context_positions = None
        all_positions = positions
        if self._new:
            features, context_positions, is_context = self._take_new()
            all_positions = torch.cat([context_positions, positions], dim=1)
            is_real = torch.cat([is_context, is_real], dim=1)
        num_columns = columns_to_see(max_context + num_block, self._rows.capacity, device)
        self._rows.slots = RowSlots.of(all_positions, is_real, self._rows.capacity, num_columns)
        outputs = self._drafter(
            inputs_embeds=self._drafter.embed(block_ids, self._embedding),
            position_ids=positions,
            context_features=features,
            context_position_ids=context_positions,
            attention_mask=self._mask(starts + num_block, num_block, num_columns, max_context + num_block),
            cache=self._rows,
        )
        hidden: Tensor = outputs.last_hidden_state
        return hidden

    def _mask(self, num_seen: Tensor, num_block: int, num_columns: int, most_seen: int) -> Tensor | None:
        """Each row sees its first `num_seen` `[rows, 1]` columns; None for one row that sees them all."""
        if len(num_seen) == 1 and num_columns == most_seen:
            return None
        is_seen = torch.arange(num_columns, device=num_seen.device) < num_seen
        return attention_mask_for(
            self._drafter.config._attn_implementation,
            is_seen[:, None, None, :].expand(-1, 1, num_block, -1),
            self._drafter.dtype,
        )

    def _take_new(self) -> tuple[Tensor, Tensor, Tensor]:
        """Everything that is not yet in the cache, side by side."""
        features, positions, is_real = (torch.cat(parts, dim=1) for parts in zip(*self._new, strict=True))
        self._new = []
        return features, positions, is_real

    def _flush_rows(self) -> None:
        """Project pending features into the cache without a block."""
        if self._new:
            features, positions, is_real = self._take_new()
            self._rows.slots = RowSlots.of(positions, is_real, self._rows.capacity, 1)
            self._drafter.extend_cache(features, positions, self._rows)
