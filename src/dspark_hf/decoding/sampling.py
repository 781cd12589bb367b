"""Laws and draws: scores to probabilities, one uniform number to one token, and generate()'s logits processors."""

from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as lp
from transformers.generation.logits_process import LogitsProcessorList

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


class ScoreProcessor:
    """Applies the logits processors of a generate() call to draft and target logits alike."""

    def __init__(self, processors: LogitsProcessorList) -> None:
        self._processors = processors
        self.is_empty = len(processors) == 0
        self.reads_prefix = any(type(processor) not in _PREFIX_FREE for processor in processors)

    def at_slot(self, prefix_ids: Any, logits: Tensor) -> Tensor:
        """Process float32 `logits` `[rows, vocab]` for the token after `prefix_ids` `[rows, length]`.

        `logits` may be overwritten: some processors write in place.
        """
        if self.is_empty:
            return logits
        scores: Tensor = self._processors(prefix_ids, logits)
        return scores

    def over_block(self, prefix_ids: Tensor, draft_tokens: Tensor, logits: Tensor) -> Tensor:
        """Process the target's logits at the anchor and at each draft; `logits` itself is left as it is.

        Args:
            prefix_ids: int64 `[rows, length]`, committed tokens including the anchor.
            draft_tokens: int64 `[rows, width]`.
            logits: float32 `[rows, 1 + width, vocab]`.
        """
        if self.is_empty:
            return logits
        rows, positions, vocab = logits.shape
        if not self.reads_prefix:
            flat = logits.reshape(rows * positions, vocab).clone()
            return self.at_slot(prefix_ids.new_zeros(rows * positions, 1), flat).view(rows, positions, vocab)
        ids = torch.cat([prefix_ids, draft_tokens], dim=1)
        length = prefix_ids.shape[1]
        scores = [self.at_slot(ids[:, : length + i], logits[:, i].clone()) for i in range(positions)]
        return torch.stack(scores, dim=1)
