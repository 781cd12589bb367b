"""Several rows, of a batch of prompts or of `num_return_sequences`: what they cannot have, and one after the other."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import (
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from .._compat import CACHE_KEY, TargetModel
from ..errors import UnsupportedGenerationError
from ..modeling_dspark import DSparkDraftModel
from .report import GenerateDSparkOutput, SpeculationReport
from .row_target import why_not_together

# Arguments of the target's forward that rows sharing one can be given.
_SHAREABLE = frozenset(
    {
        "attention_mask",
        "position_ids",
        "logits_to_keep",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        CACHE_KEY,
    }
)

_PER_STEP = ("scores", "logits", "hidden_states", "attentions")


def refuse_rows(num_rows: int, streamer: BaseStreamer | None, model_kwargs: dict[str, Any]) -> None:
    """Raise UnsupportedGenerationError for what several rows cannot have."""
    asked = f"a batch of {num_rows} rows"
    if streamer is not None:
        raise UnsupportedGenerationError(
            f"{asked} cannot be streamed with a drafter, its rows advance by different numbers of tokens; leave the "
            "streamer or assistant_model out"
        )
    if model_kwargs.get("mm_encoder_outputs") is not None:
        raise UnsupportedGenerationError(
            f"{asked} with images, videos or sounds cannot be run with a drafter; call generate() once per row, or "
            "leave assistant_model out"
        )
    cache = model_kwargs.get(CACHE_KEY)
    if getattr(cache, "_is_user_defined", False):
        raise UnsupportedGenerationError(
            f"{asked} needs a cache for each row; leave the cache out, or call generate() once per row"
        )


def refuse_criteria(stopping_criteria: StoppingCriteriaList) -> None:
    """Raise UnsupportedGenerationError for criteria that rows which run one by one cannot obey as a batch does."""
    if any(isinstance(criterion, MaxTimeCriteria) for criterion in stopping_criteria):
        raise UnsupportedGenerationError(
            "max_time would be used up by the first row, as the rows of this batch run one after the other; leave it "
            "or assistant_model out, or call generate() once per row"
        )
    kinds = {type(criterion) for criterion in stopping_criteria}
    has_end_tokens = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    if not kinds <= {MaxLengthCriteria} and not has_end_tokens:
        raise UnsupportedGenerationError(
            "without eos_token_id a batch goes on until its last row has stopped, which rows that run one after the "
            "other cannot know; pass eos_token_id, leave assistant_model out, or call generate() once per row"
        )


def why_one_by_one(
    model: TargetModel,
    input_ids: Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    drafter: DSparkDraftModel,
) -> str | None:
    """Why the rows of this call cannot share forwards; None when they can."""
    if not drafter.drafts_rows_together:
        return f"{drafter.config.model_type!r} drafters draft for one row at a time"
    for name in ("output_hidden_states", "output_attentions"):
        if generation_config.return_dict_in_generate and getattr(generation_config, name):
            return f"{name} wants every forward's own shapes"
    if others := sorted(key for key, value in model_kwargs.items() if value is not None and key not in _SHAREABLE):
        return f"the inputs {others} are not cut by row"
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not bool(mask[:, -1].all()):
        return "a row is padded on the right"
    positions = model_kwargs.get("position_ids")
    is_real = torch.ones_like(input_ids) if mask is None else mask
    usual = is_real.cumsum(dim=1) - 1
    if positions is not None and not torch.equal(positions[is_real.bool()], usual[is_real.bool()]):
        return "it brings position_ids of its own"
    if getattr(model_kwargs.get(CACHE_KEY), "offloading", False):
        return "its cache is to be offloaded"
    return why_not_together(model)


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
    """A row's part of an argument; what does not count rows goes to every row."""
    if isinstance(value, list | tuple) and len(value) == num_rows:
        return value[row : row + 1]
    dim = 1 if key == "position_ids" and getattr(value, "ndim", 0) == 3 else 0  # [3, rows, length]
    if isinstance(value, Tensor) and value.ndim > dim and value.shape[dim] == num_rows:
        return value.narrow(dim, row, 1)
    return value


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
    by_row = tuple(output.speculation for output in outputs if output.speculation is not None)
    for own in by_row:
        report.merge(own)
    per_step = {name: join_steps([getattr(output, name) for output in outputs]) for name in _PER_STEP}
    ids: Any = sequences  # transformers types it LongTensor
    return GenerateDSparkOutput(sequences=ids, cache=None, speculation=report, speculation_by_row=by_row, **per_step)


def join_steps(rows: list[Any]) -> tuple[Any, ...] | None:
    """One tuple of steps from each row's, zeros where a row had ended.

    A step is a tensor `[1, ...]`, or a tuple of them or of None.
    """
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
