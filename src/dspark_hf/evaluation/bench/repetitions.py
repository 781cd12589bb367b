"""Intervals over repetitions of the same work: how well a machine was measured, not how other prompts would do."""

import math
import statistics
from collections.abc import Sequence

from scipy.stats import t as student

from ..intervals import LEVEL, Estimate


def ratio_over_repetitions(over: Sequence[float], under: Sequence[float]) -> Estimate:
    """Geometric mean of `over / under`, with Student's interval of the logarithms.

    Args:
        over, under: A positive number for each repetition, at least one.
    """
    logs = [math.log(a / b) for a, b in zip(over, under, strict=True)]
    middle = statistics.fmean(logs)
    if len(logs) < 2:
        return Estimate(math.exp(middle), None, None, len(logs))
    quantile = float(student.ppf((1 + LEVEL) / 2, len(logs) - 1))
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return Estimate(math.exp(middle), math.exp(middle - half), math.exp(middle + half), len(logs))
