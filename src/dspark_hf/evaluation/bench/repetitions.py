"""Intervals over repetitions of the same work: how well a machine was measured, not how other prompts would do."""

import math
import statistics
from collections.abc import Sequence

import numpy as np

from ..intervals import LEVEL, Estimate

_QUANTILE_POINTS = 4001


def ratio_over_repetitions(over: Sequence[float], under: Sequence[float]) -> Estimate:
    """Geometric mean of `over / under`, with Student's interval of the logarithms.

    Args:
        over, under: A positive number for each repetition, at least one.
    """
    logs = [math.log(a / b) for a, b in zip(over, under, strict=True)]
    middle = statistics.fmean(logs)
    if len(logs) < 2:
        return Estimate(math.exp(middle), None, None, len(logs))
    half = student_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Estimate(math.exp(middle), math.exp(middle - half), math.exp(middle + half), len(logs))


def student_quantile(num_degrees: int, level: float = LEVEL) -> float:
    """Half width, in standard errors, of a two-sided interval under Student's law; `num_degrees` >= 1."""
    log_scale = (
        math.lgamma((num_degrees + 1) / 2) - math.lgamma(num_degrees / 2) - 0.5 * math.log(num_degrees * math.pi)
    )

    def inside(half: float) -> float:
        x = np.linspace(0.0, half, _QUANTILE_POINTS)
        density = np.exp(log_scale - (num_degrees + 1) / 2 * np.log1p(x * x / num_degrees))
        return 2 * float(np.trapezoid(density, x))

    low, high = 0.0, 1.0
    while inside(high) < level:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < level else (low, middle)
    return high
