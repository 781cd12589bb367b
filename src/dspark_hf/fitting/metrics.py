"""Quality of a predicted probability: calibration error and ranking, for outcomes that may be weighted."""

import torch
from torch import Tensor

NUM_BINS = 20  # recovered from the paper's Figure 6, and what the released evaluator uses


def expected_calibration_error(
    predicted: Tensor, outcome: Tensor, weight: Tensor | None = None, *, num_bins: int = NUM_BINS
) -> float:
    """`sum_b (n_b / N) |mean prediction - mean outcome|` over equal-width bins of [0, 1].

    Args:
        predicted: Probabilities `[n]`.
        outcome: 0 or 1, or a probability, `[n]`.
        weight: How much each counts, `[n]`; None: equally.
        num_bins: Bins.
    """
    weight = torch.ones_like(predicted) if weight is None else weight
    bins = (predicted * num_bins).long().clamp(0, num_bins - 1)
    sums = torch.zeros(3, num_bins, dtype=torch.float64)
    for row, values in enumerate((predicted * weight, outcome * weight, weight)):
        sums[row].index_add_(0, bins, values.double())
    return float((sums[0] - sums[1]).abs().sum() / sums[2].sum().clamp(min=1e-12))


def roc_auc(predicted: Tensor, positive_weight: Tensor, negative_weight: Tensor) -> float:
    """Probability that a positive is ranked above a negative, ties counting half; NaN where one kind is missing.

    Args:
        predicted: Scores `[n]`.
        positive_weight, negative_weight: How much of each entry is a positive, and a negative, `[n]`.
    """
    values, place = predicted.unique(return_inverse=True)
    positive, negative = (
        torch.zeros(len(values), dtype=torch.float64).index_add_(0, place, w.double())
        for w in (positive_weight, negative_weight)
    )
    below = negative.cumsum(0) - negative
    pairs = positive.sum() * negative.sum()
    return float((positive * (below + 0.5 * negative)).sum() / pairs) if pairs > 0 else float("nan")


def brier_score(predicted: Tensor, outcome: Tensor) -> float:
    """Mean squared difference of probabilities and outcomes, both `[n]`; NaN for none."""
    return float((predicted.double() - outcome.double()).square().mean())


def calibrated_error_floor(predicted: Tensor, *, seed: int, num_draws: int = 1000) -> tuple[float, float]:
    """Calibration error that a perfectly calibrated head would show by chance: mean and 97.5 % quantile.

    Outcomes are drawn from the predictions themselves, independently; real ones of one prompt are alike, so the true
    floor is a little higher.

    Args:
        predicted: Probabilities `[n]`.
        seed: Of the draws.
        num_draws: Sets of outcomes.
    """
    generator = torch.Generator().manual_seed(seed)
    errors = torch.tensor(
        [
            expected_calibration_error(predicted, (torch.rand(len(predicted), generator=generator) < predicted).float())
            for _ in range(num_draws)
        ],
        dtype=torch.float64,
    )
    return float(errors.mean()), float(errors.quantile(0.975))
