"""Estimates as cells of a table."""

import math

from ..intervals import Estimate
from .loads import Points, point_of


def mean_of(points: Points, system: str, load: float, name: str) -> float:
    """Mean of a measure over seeds; NaN where there is no such point."""
    point = point_of(points, system, load)
    value = None if point is None else point.estimate(name).value
    return float("nan") if value is None else value


def ratio_cell(estimate: Estimate | None) -> str:
    """A ratio with its interval."""
    if estimate is None or estimate.value is None:
        return "none"
    if estimate.low is None:
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"


def value_cell(estimate: Estimate) -> str:
    """A value and half its interval."""
    if estimate.value is None:
        return "none"
    digits = 0 if abs(estimate.value) >= 100 else 3
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.{digits}f}"
    return f"{estimate.value:.{digits}f} ± {estimate.high - estimate.value:.{digits}f}"


def base_cell(tokens_per_base: float) -> str:
    """Tokens that cost as much as the rest of a round; where steps do not grow with tokens there are none."""
    return f"{tokens_per_base:.0f}" if math.isfinite(tokens_per_base) else "without bound"
