"""Several continuations of one prompt (`num_return_sequences`): one row after the other, then side by side."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList, PrefixConstrainedLogitsProcessor
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from .._compat import CACHE_KEY
from ..errors import UnsupportedGenerationError
from .report import GenerateDSparkOutput, SpeculationReport

_PER_STEP = ("scores", "logits", "hidden_states", "attentions")


def refuse_rows(
    num_rows: int,
    generation_config: GenerationConfig,
    stopping_criteria: StoppingCriteriaList,
    streamer: BaseStreamer | None,
    model_kwargs: dict[str, Any],
) -> None:
    """Raise UnsupportedGenerationError for rows that are no copies of one prompt, or cannot run one by one."""
    if num_rows != generation_config.num_return_sequences:
        raise UnsupportedGenerationError(
            f"speculation runs one row at a time in this release, got a batch of {num_rows} prompts; "
            "call generate() once per prompt, or leave assistant_model out"
        )
    asked = f"num_return_sequences={num_rows}"
    if streamer is not None:
        raise UnsupportedGenerationError(
            f"{asked} cannot be streamed with a drafter, its rows run one after the other; leave the streamer or "
            "assistant_model out"
        )
    cache = model_kwargs.get(CACHE_KEY)
    if getattr(cache, "_is_user_defined", False):
        raise UnsupportedGenerationError(
            f"{asked} needs a cache for each row; leave the cache out, or call generate() once per row"
        )
    if model_kwargs.get("mm_encoder_outputs") is not None:
        raise UnsupportedGenerationError(
            f"{asked} cannot share encoded images or sounds between rows; pass the pixels, or call generate() per row"
        )
    may_differ = any(type(criterion) is not MaxLengthCriteria for criterion in stopping_criteria)
    if may_differ and getattr(generation_config, "_pad_token_tensor", None) is None:
        raise UnsupportedGenerationError(
            f"with {asked} rows may stop at different lengths, and there is no token to fill the shorter ones; pass "
            "pad_token_id"
        )


def row_processors(processors: LogitsProcessorList) -> LogitsProcessorList:
    """The processors for one row: `prefix_allowed_tokens_fn` counts the rows of a prompt, and would miss the others."""
    return LogitsProcessorList(
        PrefixConstrainedLogitsProcessor(processor._prefix_allowed_tokens_fn, 1)
        if type(processor) is PrefixConstrainedLogitsProcessor
        else processor
        for processor in processors
    )


def split_rows(input_ids: Tensor, model_kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Each row's ids `[1, length]` and its own arguments, with an empty cache of its own.

    The cache that generate() prepared is copied while it is empty.
    """
    num_rows = input_ids.shape[0]
    empty_cache = model_kwargs[CACHE_KEY]
    for row in range(num_rows):
        cache = copy.deepcopy(empty_cache)
        for layer in getattr(cache, "layers", ()):
            layer.is_initialized = False  # allocated anew, for one row, by its first forward
        kwargs = {key: _row_of(key, value, row, num_rows) for key, value in model_kwargs.items()}
        yield input_ids[row : row + 1], kwargs | {CACHE_KEY: cache}


def _row_of(key: str, value: Any, row: int, num_rows: int) -> Any:
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    dim = 1 if key == "position_ids" and value.ndim == 3 else 0  # [3, rows, length]: time, height and width
    # generate() has repeated every tensor; pixel values and the like hold as many entries per row as they want.
    size = value.shape[dim] // num_rows
    return value.narrow(dim, row * size, size)


def join_rows(results: list[GenerateDSparkOutput | Tensor], pad_token_id: int) -> GenerateDSparkOutput | Tensor:
    """What generate() returns for several rows: sequences filled up with `pad_token_id`, one report.

    Per-step tensors hold zeros where a row had ended. No cache comes back: there is one for each row.
    """
    tensors = [result if isinstance(result, Tensor) else result.sequences for result in results]
    longest = max(ids.shape[1] for ids in tensors)
    sequences = torch.cat(
        [torch.nn.functional.pad(ids, (0, longest - ids.shape[1]), value=pad_token_id) for ids in tensors]
    )
    outputs = [result for result in results if not isinstance(result, Tensor)]
    if not outputs:
        return sequences
    report = SpeculationReport()
    for output in outputs:
        assert output.speculation is not None
        report.merge(output.speculation)
    per_step = {name: _join_steps([getattr(output, name) for output in outputs]) for name in _PER_STEP}
    ids: Any = sequences  # transformers types it LongTensor
    return GenerateDSparkOutput(sequences=ids, cache=None, speculation=report, **per_step)


def _join_steps(rows: list[Any]) -> tuple[Any, ...] | None:
    """One tuple of steps from each row's; a step is a tensor `[1, ...]`, or a tuple of them or of None."""
    if rows[0] is None:
        return None
    longest = max(rows, key=len)
    return tuple(_join([row[i] if i < len(row) else None for row in rows], longest[i]) for i in range(len(longest)))


def _join(parts: list[Any], like: Any) -> Any:
    if like is None:
        return None
    if isinstance(like, Tensor):
        return torch.cat([torch.zeros_like(like) if part is None else part for part in parts])
    return tuple(_join([None if part is None else part[i] for part in parts], like[i]) for i in range(len(like)))
