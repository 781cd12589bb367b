"""Whether one of two drafters is better on the same prompts: difference, gain, and a test that swaps labels."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .intervals import Estimate, Floats, Resamples, Sums

NUM_SWAPS = 10_000
# Names of the columns of both drafters start with these.
FIRST, SECOND = "first/", "second/"


@dataclass(frozen=True)
class Paired:
    """How a statistic of one drafter compares with that of another on the same prompts.

    Attributes:
        difference: First minus second.
        gain_percent: 100 * (first / second - 1).
        p_value: Two-sided, of the test that [`swap_test`] makes; None with fewer than two prompts.
    """

    difference: Estimate
    gain_percent: Estimate
    p_value: float | None


def compare_pairs(
    first: Mapping[str, Sequence[float]],
    second: Mapping[str, Sequence[float]],
    statistic: Callable[[Sums], Floats],
    *,
    seed: int,
) -> Paired:
    """Compare two drafters; prompts are resampled with both their results.

    Args:
        first, second: What each prompt adds to each sum, by drafter; the same prompts in the same order.
        statistic: As for [`Resamples.estimate`], of the sums of one drafter.
        seed: Of resampling and of swapping.
    """
    columns = {FIRST + name: values for name, values in first.items()}
    columns |= {SECOND + name: values for name, values in second.items()}
    resamples = Resamples(columns, seed=seed)

    def both(sums: Sums) -> tuple[Floats, Floats]:
        return statistic(_of(FIRST, sums)), statistic(_of(SECOND, sums))

    def difference(sums: Sums) -> Floats:
        one, other = both(sums)
        return one - other

    def gain_percent(sums: Sums) -> Floats:
        one, other = both(sums)
        gain: Floats = 100 * (one / other - 1)
        return gain

    return Paired(
        difference=resamples.estimate(difference),
        gain_percent=resamples.estimate(gain_percent),
        p_value=swap_test(first, second, statistic, seed=seed),
    )


def swap_test(
    first: Mapping[str, Sequence[float]],
    second: Mapping[str, Sequence[float]],
    statistic: Callable[[Sums], Floats],
    *,
    seed: int,
    num_swaps: int | None = None,
) -> float | None:
    """Randomisation test of a difference between drafters: their results are swapped within prompts.

    If both accept alike, a prompt's two results could as well have come the other way round, so the difference is an
    ordinary one among those of all swaps; the test's level is then exact, however prompts differ. All `2^n` swaps are
    tried where they are no more than `num_swaps`.

    Args:
        first, second, statistic: As for [`compare_pairs`].
        seed: Of the swaps that are drawn.
        num_swaps: Most swaps tried, `NUM_SWAPS` if None.

    Returns:
        Share of swaps with a difference at least as large as the one seen, the one seen counted; None with fewer than
        two prompts, or where the difference is undefined.
    """
    num_swaps = num_swaps or NUM_SWAPS
    one, other = (np.array(list(part.values()), dtype=np.float64).T for part in (first, second))
    n = len(one)
    if n < 2:
        return None
    if 2**n <= num_swaps:
        is_swapped = np.array(list(itertools.product([0.0, 1.0], repeat=n)))
    else:
        drawn = np.random.default_rng(seed).integers(0, 2, size=(num_swaps - 1, n))
        is_swapped = np.concatenate([np.zeros((1, n)), drawn])
    change = is_swapped @ (other - one)
    with np.errstate(divide="ignore", invalid="ignore"):
        ones = statistic(dict(zip(first, (one.sum(axis=0) + change).T, strict=True)))
        others = statistic(dict(zip(second, (other.sum(axis=0) - change).T, strict=True)))
        size = np.abs(ones - others)
    seen = size[0]  # nothing is swapped in the first
    if not np.isfinite(seen):
        return None
    finite = size[np.isfinite(size)]
    # Sums in another order differ in their last digits.
    return float((finite >= seen - 1e-12 * max(1.0, abs(seen))).mean())


def _of(prefix: str, sums: Sums) -> Sums:
    return {name.removeprefix(prefix): values for name, values in sums.items() if name.startswith(prefix)}
