"""Bootstrap intervals of pooled ratios: prompts are drawn again with replacement."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
NUM_RESAMPLES = 10_000
RESAMPLES_AT_ONCE = 500

Floats = NDArray[np.float64]
Sums = Mapping[str, Floats]


@dataclass(frozen=True)
class Estimate:
    """A pooled value with its percentile bootstrap interval over prompts, at level `LEVEL`.

    Attributes:
        value: From the sums over all prompts; None where it is undefined (0 / 0).
        low, high: Ends of the interval; None with fewer than two prompts.
        n: Prompts.
    """

    value: float | None
    low: float | None
    high: float | None
    n: int


def bootstrap(
    columns: Mapping[str, Sequence[float]],
    statistic: Callable[[Sums], Floats],
    *,
    seed: int,
    num_resamples: int = NUM_RESAMPLES,
) -> Estimate:
    """Estimate a statistic of sums over prompts.

    Args:
        columns: What each prompt adds to each sum: one entry per prompt, at least one.
        statistic: Maps the sums, by name, to a value; of arrays of sums to an array of values.
        seed: Of the resampling.
        num_resamples: Resamples; each has as many prompts as there are.
    """
    per_prompt = np.array(list(columns.values()), dtype=np.float64).T
    n = len(per_prompt)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(dict(zip(columns, per_prompt.sum(axis=0), strict=True))))
        if n < 2 or not np.isfinite(value):
            return Estimate(value if np.isfinite(value) else None, None, None, n)
        # How often each prompt is drawn says all: a resample's sums are one product of matrices.
        rng = np.random.default_rng(seed)
        sums = [
            rng.multinomial(n, np.full(n, 1 / n), size=min(RESAMPLES_AT_ONCE, num_resamples - start)) @ per_prompt
            for start in range(0, num_resamples, RESAMPLES_AT_ONCE)
        ]
        resampled = statistic(dict(zip(columns, np.concatenate(sums).T, strict=True)))
    finite = resampled[np.isfinite(resampled)]
    tail = (1 - LEVEL) / 2
    low, high = (float(end) for end in np.quantile(finite, [tail, 1 - tail]))
    return Estimate(value, low, high, n)
