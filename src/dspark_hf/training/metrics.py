"""Sums that a training or evaluation run collects, and the numbers that follow from them."""

import torch
from torch import Tensor

from .anchors import AnchorBlocks
from .losses import PositionTerms

_SCALARS = ("weight", "positions", "cross_entropy", "total_variation", "confidence", "confidence_error", "best_token")


class BlockMetrics:
    """Adds up batches; all sums live in one float64 vector, so that processes are added with one reduction.

    Args:
        num_slots: gamma.
        device: Of the sums.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._num_slots = num_slots
        self._sums = torch.zeros(len(_SCALARS) + 2 * num_slots, dtype=torch.float64, device=device)

    def add(
        self,
        blocks: AnchorBlocks,
        terms: PositionTerms,
        position_weight: Tensor,
        confidence_loss: Tensor | None,
        confidence: Tensor | None,
    ) -> None:
        """Add the supervised positions of a batch, all `[n]` in the order of `blocks.is_supervised`."""
        mask = blocks.is_supervised
        acceptance = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
        acceptance[mask] = terms.acceptance.double()
        acceptance = acceptance.flatten(0, 1)
        survival = acceptance.cumprod(dim=-1)
        reached = torch.cat([torch.ones_like(survival[:, :1]), survival[:, :-1]], dim=-1) * mask.flatten(0, 1)
        zero = position_weight.new_zeros(())
        scalars = [
            position_weight.sum(),
            mask.sum(),
            (position_weight * terms.cross_entropy).sum(),
            (position_weight * terms.total_variation).sum(),
            zero if confidence_loss is None else (position_weight * confidence_loss).sum(),
            zero if confidence is None else (confidence - terms.acceptance).abs().sum(),
            terms.is_best_token.sum(),
        ]
        slots = torch.zeros(2, self._num_slots, dtype=torch.float64, device=mask.device)
        slots[0, : mask.shape[-1]] = reached.sum(dim=0)
        slots[1, : mask.shape[-1]] = (reached * acceptance).sum(dim=0)
        values = torch.stack([scalar.detach().double() for scalar in scalars])
        self._sums += torch.cat([values, slots.flatten()]).to(self._sums.device)

    def take(self) -> Tensor:
        """The sums so far, to be added over processes; counting starts again."""
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        return sums

    def summarise(self, sums: Tensor) -> dict[str, float]:
        """Means of loss parts and acceptance: weighted as the loss is, conditional acceptance per slot, expected tau.

        `expected_tau` counts the bonus token and is the mean over blocks at temperature 1, teacher-forced.
        """
        scalars = dict(zip(_SCALARS, sums[: len(_SCALARS)].tolist(), strict=True))
        if scalars["positions"] == 0:
            return {}
        reached, accepted = sums[len(_SCALARS) :].view(2, self._num_slots)
        conditional = accepted / reached.clamp(min=1e-9)
        by_weight = ("cross_entropy", "total_variation", "confidence")
        result = {name: scalars[name] / scalars["weight"] for name in by_weight}
        result |= {name: scalars[name] / scalars["positions"] for name in ("confidence_error", "best_token")}
        result["expected_tau"] = 1.0 + float(conditional.cumprod(dim=0).sum())
        result |= {f"acceptance_{k}": value for k, value in enumerate(conditional.tolist(), start=1)}
        return result
