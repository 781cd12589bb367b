"""Where two greedy texts of one prompt part, and whether that is a near-tie or a bug."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

# Verifying several tokens at once rounds differently from one at a time. In float32 that moves a
# logit by far less than this, so texts that part at a larger gap part because of a bug.
MAX_FLOAT32_GAP = 1e-4


@dataclass(frozen=True)
class FirstDifference:
    """The first position at which plain and DSpark text differ.

    Gaps are in logits after the target's logits processors, from one plain forward on the shared
    text, in the target's dtype. They are None where one text ends and the other goes on.

    Attributes:
        position: New tokens that both share, so the index of the first differing one, from 0.
        plain_token_id, dspark_token_id: The tokens there; None where that text has ended.
        top2_gap: Best logit minus second best.
        token_gap: Best logit minus the lower of the two tokens'. It equals `top2_gap` when these
            are the two best, and is larger otherwise.
        is_error: Whether the difference cannot be rounding: `token_gap` above `MAX_FLOAT32_GAP` in
            float32, or a text that goes on where the other has ended, in any dtype.
    """

    position: int
    plain_token_id: int | None
    dspark_token_id: int | None
    top2_gap: float | None
    token_gap: float | None
    is_error: bool


def first_difference(plain: Sequence[int], dspark: Sequence[int]) -> int | None:
    """Index of the first differing token, None when there is none.

    Where one text continues the other, it is the length of the shorter.
    """
    for position, (ours, theirs) in enumerate(zip(plain, dspark, strict=False)):
        if ours != theirs:
            return position
    return None if len(plain) == len(dspark) else min(len(plain), len(dspark))


def explain_difference(
    target: PreTrainedModel,
    generation_config: GenerationConfig,
    prompt_ids: Tensor,
    plain: Sequence[int],
    dspark: Sequence[int],
) -> FirstDifference | None:
    """Compare the new tokens of both paths; None when they agree.

    Args:
        target: The target.
        generation_config: Of the greedy plain call.
        prompt_ids: int64 `[1, length]`.
        plain, dspark: New tokens.
    """
    position = first_difference(plain, dspark)
    if position is None:
        return None
    if position == min(len(plain), len(dspark)):
        ours, theirs = (ids[position] if position < len(ids) else None for ids in (plain, dspark))
        return FirstDifference(position, ours, theirs, None, None, is_error=True)
    shared = torch.cat([prompt_ids, prompt_ids.new_tensor([list(plain[:position])])], dim=1)
    scores = next_token_scores(target, generation_config, shared)
    best, second = scores.topk(2).values.tolist()
    token_gap = best - min(float(scores[plain[position]]), float(scores[dspark[position]]))
    return FirstDifference(
        position,
        plain[position],
        dspark[position],
        top2_gap=best - second,
        token_gap=token_gap,
        is_error=target.dtype == torch.float32 and not token_gap <= MAX_FLOAT32_GAP,
    )


def next_token_scores(target: PreTrainedModel, generation_config: GenerationConfig, ids: Tensor) -> Tensor:
    """Logits float32 `[vocab]` after `ids` `[1, length]`, processors applied, by one forward."""
    config = copy.deepcopy(generation_config)
    config.update(max_new_tokens=1, output_scores=True, return_dict_in_generate=True)
    model: Any = target  # PreTrainedModel does not declare generate()
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    scores: Tensor = output.scores[0][0].float()
    return scores
