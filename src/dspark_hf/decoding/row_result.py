"""Where a batch ends, and what generate() returns for it."""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from .report import GenerateDSparkOutput, SpeculationReport
from .row_state import Row, RowCounts
from .rows import join_steps


def common_end(rows: list[Row]) -> int | None:
    """Without end tokens: where the last row stopped, if all have stopped."""
    stops = [row.stopped_at or (row.num_text if row.is_done else None) for row in rows]
    stopped = [stop for stop in stops if stop is not None]
    return max(stopped) if len(stopped) == len(stops) else None


def cut_rows(rows: list[Row], end: int, counts: RowCounts) -> None:
    """Forget what rows said behind `end`."""
    for row in rows:
        surplus = max(0, row.num_text - end)
        row.num_text -= surplus
        counts.add_tokens(torch.tensor([row.index]), torch.tensor([-surplus]))
        for steps in (row.scores, row.logits):
            del steps[max(0, len(steps) - surplus) :]


def joined_result(
    texts: Tensor,
    rows: list[Row],
    generation_config: GenerationConfig,
    report: SpeculationReport,
    by_row: list[SpeculationReport],
) -> GenerateDSparkOutput | Tensor:
    """Texts int64 `[rows, columns]`, filled up behind each row's end, with what else was asked for."""
    pad = getattr(generation_config, "_pad_token_tensor", None)
    sequences = texts[:, : max(row.num_text for row in rows)].clone()
    for row in rows:
        sequences[row.index, row.num_text :] = 0 if pad is None else int(pad)
    if not generation_config.return_dict_in_generate:
        return sequences
    ids: Any = sequences  # transformers types it LongTensor
    return GenerateDSparkOutput(
        sequences=ids,
        scores=join_steps([row.scores for row in rows]) if generation_config.output_scores else None,
        logits=join_steps([row.logits for row in rows]) if generation_config.output_logits else None,
        cache=None,
        speculation=report,
        speculation_by_row=tuple(by_row),
    )
