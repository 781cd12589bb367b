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


class Resamples:
    """Sums over prompts that were drawn again with replacement, for any number of statistics of the same prompts.

    Args:
        columns: What each prompt adds to each sum: one entry per prompt, at least one.
        seed: Of the resampling.
        num_resamples: Resamples, `NUM_RESAMPLES` if None; each has as many prompts as there are.
    """

    def __init__(self, columns: Mapping[str, Sequence[float]], *, seed: int, num_resamples: int | None = None) -> None:
        num_resamples = num_resamples or NUM_RESAMPLES
        per_prompt = np.array(list(columns.values()), dtype=np.float64).T
        self.n = n = len(per_prompt)
        self._sums: Sums = dict(zip(columns, per_prompt.sum(axis=0), strict=True))
        self._resampled: Sums | None = None
        if n >= 2:
            # How often each prompt is drawn says all: a resample's sums are one product of matrices.
            rng = np.random.default_rng(seed)
            sums = [
                rng.multinomial(n, np.full(n, 1 / n), size=min(RESAMPLES_AT_ONCE, num_resamples - start)) @ per_prompt
                for start in range(0, num_resamples, RESAMPLES_AT_ONCE)
            ]
            self._resampled = dict(zip(columns, np.concatenate(sums).T, strict=True))

    def estimate(self, statistic: Callable[[Sums], Floats]) -> Estimate:
        """A statistic with its interval.

        Args:
            statistic: Maps the sums, by name, to a value; of arrays of sums to an array of values.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            value = float(statistic(self._sums))
            if self._resampled is None or not np.isfinite(value):
                return Estimate(value if np.isfinite(value) else None, None, None, self.n)
            resampled = statistic(self._resampled)
        finite = resampled[np.isfinite(resampled)]
        tail = (1 - LEVEL) / 2
        low, high = (float(end) for end in np.quantile(finite, [tail, 1 - tail]))
        return Estimate(value, low, high, self.n)


def bootstrap(
    columns: Mapping[str, Sequence[float]],
    statistic: Callable[[Sums], Floats],
    *,
    seed: int,
    num_resamples: int | None = None,
) -> Estimate:
    """Estimate one statistic of sums over prompts; arguments as for [`Resamples`] and its `estimate`."""
    return Resamples(columns, seed=seed, num_resamples=num_resamples).estimate(statistic)
