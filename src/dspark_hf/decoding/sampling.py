"""Laws and draws: scores to probabilities, one uniform number to one token, and generate()'s logits processors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as lp
from transformers.generation.logits_process import LogitsProcessorList

from .prefixes import Prefixes

# Processors whose output depends on the logits alone, so that all positions of a block can go through at once.
# Compared by exact type: a subclass may read the ids.
_PREFIX_FREE = frozenset(
    {
        lp.TemperatureLogitsWarper,
        lp.TopKLogitsWarper,
        lp.TopPLogitsWarper,
        lp.TopHLogitsWarper,
        lp.MinPLogitsWarper,
        lp.TypicalLogitsWarper,
        lp.EpsilonLogitsWarper,
        lp.EtaLogitsWarper,
        lp.InfNanRemoveLogitsProcessor,
        lp.LogitNormalization,
        lp.SuppressTokensLogitsProcessor,
    }
)


def law(scores: Tensor) -> Tensor:
    """Probabilities of processed `scores` `[..., vocab]`, float32."""
    return torch.softmax(scores, dim=-1, dtype=torch.float32)


def no_law_error(position: int) -> RuntimeError:
    """For a target whose law at a position is none, e.g. because processors forbid every token; plain sampling raises
    the same.
    """
    return RuntimeError(
        f"the target's probability tensor at position {position} contains `inf` or `nan`, or forbids every token; "
        "check the target's weights and the logits processors"
    )


def draw_uniforms(*shape: int, device: torch.device) -> Tensor:
    """Independent uniforms in [0, 1), float64 where the device has it, from torch's global generator."""
    return torch.rand(shape, dtype=_sum_dtype(device), device=device)


def sample(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row by inverting the cumulative law.

    Sums in float64: with float32 sums over a vocabulary of 50k a token of probability 6e-8 may vanish. The law need
    not be normalised, and a token of probability 0 is never drawn.

    Args:
        probs: `[rows, vocab]`, non-negative, at least one entry of each row positive.
        uniforms: `[rows]` in [0, 1).

    Returns:
        int64 `[rows]`.
    """
    cumulative = probs.cumsum(dim=-1, dtype=torch.promote_types(probs.dtype, _sum_dtype(probs.device)))
    total = cumulative[:, -1:]
    point = uniforms.to(cumulative.dtype).unsqueeze(-1) * total
    # u < 1, but the product may round up to the total, behind which no token lies.
    point = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))
    # Without effect on a law; a row of NaN must not give an id that no embedding has.
    return torch.searchsorted(cumulative, point, right=True).squeeze(-1).clamp(max=probs.shape[-1] - 1)


def _sum_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


ForRows = Callable[[tuple[int, ...]], LogitsProcessorList]


class ScoreProcessor:
    """Applies the logits processors of a generate() call to draft and target logits alike.

    Args:
        for_rows: Gives the processors for some rows of a batch; needed for [`Prefixes`] only.
    """

    def __init__(self, processors: LogitsProcessorList, for_rows: ForRows | None = None) -> None:
        self._processors = processors
        self._for_rows = for_rows
        self.is_empty = len(processors) == 0
        self.reads_prefix = any(type(processor) not in _PREFIX_FREE for processor in processors)

    def at_slot(self, prefix_ids: Tensor | Prefixes, logits: Tensor) -> Tensor:
        """Process float32 `logits` `[rows, vocab]` for the token after `prefix_ids` `[rows, length]`.

        `logits` may be overwritten: some processors write in place. Rows of different lengths are processed by one
        call per length.
        """
        if self.is_empty:
            return logits
        if isinstance(prefix_ids, Tensor):
            return _called(self._processors, prefix_ids, logits)
        if not self.reads_prefix:
            return _called(self._processors, prefix_ids.ids[:, :1], logits)
        assert self._for_rows is not None, "a batch gives its processors by row"
        scores = torch.empty_like(logits)
        for index, ids, rows in prefix_ids.groups():
            scores[index] = _called(self._for_rows(rows), ids, logits[index])
        return scores

    def over_block(self, prefix_ids: Tensor | Prefixes, draft_tokens: Tensor, logits: Tensor) -> Tensor:
        """Process the target's logits at the anchor and at each draft; `logits` itself is left as it is.

        Args:
            prefix_ids: int64 `[rows, length]`, committed tokens including the anchor; or rows of several lengths.
            draft_tokens: int64 `[rows, width]`.
            logits: float32 `[rows, 1 + width, vocab]`.
        """
        if self.is_empty:
            return logits
        rows, positions, vocab = logits.shape
        if not self.reads_prefix:
            flat = logits.reshape(rows * positions, vocab).clone()
            return _called(self._processors, draft_tokens.new_zeros(rows * positions, 1), flat).view(
                rows, positions, vocab
            )
        scores = []
        for i in range(positions):
            drafts = draft_tokens[:, :i]
            seen = (
                torch.cat([prefix_ids, drafts], dim=1)
                if isinstance(prefix_ids, Tensor)
                else prefix_ids.followed_by(drafts)
            )
            scores.append(self.at_slot(seen, logits[:, i].clone()))
        return torch.stack(scores, dim=1)


def _called(processors: LogitsProcessorList, ids: Tensor, logits: Tensor) -> Tensor:
    untyped: Any = ids  # transformers types it LongTensor
    scores: Tensor = processors(untyped, logits)
    return scores
