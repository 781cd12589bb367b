"""Logits processors of a batch, for some of its rows: some of them tell rows apart, or hold something of each."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)


def processors_for_rows(
    processors: LogitsProcessorList, rows: Sequence[int], num_rows: int, num_sequences: int
) -> LogitsProcessorList:
    """The processors of a batch of `num_rows` rows, to be called with its `rows` only.

    Args:
        num_sequences: `num_return_sequences`; the rows of a prompt follow each other.
    """
    return LogitsProcessorList(_for_rows(processor, rows, num_rows, num_sequences) for processor in processors)


def _for_rows(processor: LogitsProcessor, rows: Sequence[int], num_rows: int, num_sequences: int) -> LogitsProcessor:
    """Compared by exact type: of a subclass nobody knows what it holds."""
    prompts = [row // num_sequences for row in rows]
    num_prompts = num_rows // num_sequences
    if type(processor) is PrefixConstrainedLogitsProcessor:
        allowed = processor._prefix_allowed_tokens_fn  # is told the prompt, not the row
        return PrefixConstrainedLogitsProcessor(lambda i, ids: allowed(prompts[i], ids), 1)
    if type(processor) is RepetitionPenaltyLogitsProcessor:
        ignored = processor.prompt_ignore_length
        if isinstance(ignored, Tensor) and len(ignored) == num_rows:
            return RepetitionPenaltyLogitsProcessor(processor.penalty, ignored[_index(rows, ignored)])
    if type(processor) is EncoderRepetitionPenaltyLogitsProcessor:
        ids = processor.encoder_input_ids
        if len(ids) == num_prompts:
            own = copy.copy(processor)
            chosen: Any = ids[_index(prompts, ids)]
            own.encoder_input_ids = chosen
            return own
    if type(processor) is EncoderNoRepeatNGramLogitsProcessor and processor.batch_size == num_prompts:
        mine = copy.copy(processor)
        mine.batch_size = len(rows)
        mine.generated_ngrams = [processor.generated_ngrams[prompt] for prompt in prompts]
        return mine
    return processor


def _index(rows: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(list(rows), device=like.device)
