"""Stages 1 to 3 for several rows of different lengths."""

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList

from .._compat import TargetModel
from ..model.row_slots import RowContextCache, RowSlots, attention_mask_for
from ..modeling_dspark import DSparkDraftModel
from .calibrate import calibrate
from .candidate_generator import CONTEXT_CHUNK_TOKENS, DSparkCandidateGenerator
from .draft import draft_block
from .prefixes import Prefixes
from .row_processors import processors_for_rows
from .sampling import ScoreProcessor
from .schedule import FullPolicy, schedule
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
    ) -> None:
        super().__init__(drafter, target, generation_config, logits_processor, model_kwargs)
        self._rows = RowContextCache(drafter.config.num_hidden_layers, capacity + drafter.config.block_size)
        num_sequences = generation_config.num_return_sequences
        for_rows = functools.cache(lambda rows: processors_for_rows(logits_processor, rows, num_rows, num_sequences))
        self.processor = ScoreProcessor(logits_processor, for_rows)
        # Of the tokens observed but not yet in the cache: features, positions, and which are no padding.
        self._new: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def verifies_all(self) -> bool:
        """Whether every usable draft is verified, whatever the confidences."""
        return isinstance(self._settings.policy, FullPolicy)

    @torch.no_grad()
    def observe_rows(self, outputs: Any, positions: Tensor, is_committed: Tensor) -> None:
        """Take the features of a target forward over `[rows, tokens]` as context, where `is_committed`."""
        device, dtype = self._drafter.device, self._drafter.dtype
        layers = self._features_of(outputs)
        num_rows, num_tokens, _ = layers[0].shape
        size = max(1, CONTEXT_CHUNK_TOKENS // num_rows)
        for start in range(0, num_tokens, size):
            self._flush_rows()
            chunk = slice(start, start + size)
            features = torch.cat([layer[:, chunk].to(device) for layer in layers], dim=-1).to(dtype)
            self._new = features, positions[:, chunk].to(device), is_committed[:, chunk].to(device)

    @torch.no_grad()
    def propose_rows(self, prefixes: Prefixes, num_context: list[int], num_allowed: list[int]) -> Proposal | None:
        """Draft after each row's last token, its anchor; None when no draft of any row could be committed.

        Args:
            num_context: Committed tokens before the anchor, padding not counted.
            num_allowed: Most drafts of each row that max_length leaves room for.
        """
        num_slots = min(self._settings.num_draft_tokens, max(num_allowed))
        if num_slots <= 0:
            return None
        hidden = self._block_hidden_of_rows(prefixes.last[:, None], num_context)[:, :num_slots]
        block = draft_block(
            self._drafter,
            hidden,
            self._drafter.base_logits(hidden.to(self._head_device, self._head_dtype), self._head),
            prefixes,
            self.processor,
            draft_ids=self._draft_ids,
            do_sample=self._do_sample,
            vocab_size=self._vocab_size,
        )
        confidence = calibrate(block.confidence_logits, self._calibration)
        lengths = schedule(self._settings.policy, block, confidence)
        room = torch.tensor(num_allowed, device=lengths.device)
        return Proposal(block, confidence, torch.minimum(lengths, room))

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but those of int64 `rows`."""
        rows = rows.to(self._drafter.device)
        self._rows.keep(rows)
        if self._new is not None:
            features, positions, is_real = (part[rows] for part in self._new)
            self._new = features, positions, is_real

    def _block_hidden_of_rows(self, anchors: Tensor, num_context: list[int]) -> Tensor:
        """Backbone output `[rows, block, hidden]` for blocks that start at `anchors` `[rows, 1]`."""
        device = self._drafter.device
        block_ids = torch.cat([anchors.to(self._target_device), self._masks.expand(len(anchors), -1)], dim=1)
        num_block = block_ids.shape[1]
        starts = torch.tensor(num_context, device=device)[:, None]
        positions = starts + torch.arange(num_block, device=device)
        is_real = torch.ones_like(positions, dtype=torch.bool)
        new, self._new = self._new, None
        features = context_positions = None
        all_positions = positions
        if new is not None:
            features, context_positions, is_context = new
            all_positions = torch.cat([context_positions, positions], dim=1)
            is_real = torch.cat([is_context, is_real], dim=1)
        num_columns = max(num_context) + num_block
        self._rows.slots = RowSlots.of(all_positions, is_real, self._rows.capacity, num_columns)
        is_seen = torch.arange(num_columns, device=device) < starts + num_block
        outputs = self._drafter(
            inputs_embeds=self._drafter.embed(block_ids, self._embedding),
            position_ids=positions,
            context_features=features,
            context_position_ids=context_positions,
            attention_mask=attention_mask_for(
                self._drafter.config._attn_implementation,
                is_seen[:, None, None, :].expand(-1, 1, num_block, -1),
                self._drafter.dtype,
            ),
            cache=self._rows,
        )
        hidden: Tensor = outputs.last_hidden_state
        return hidden

    def _flush_rows(self) -> None:
        """Project pending features into the cache without a block."""
        if self._new is None:
            return
        features, positions, is_real = self._new
        self._rows.slots = RowSlots.of(positions, is_real, self._rows.capacity, 1)
        self._drafter.extend_cache(features, positions, self._rows)
        self._new = None
