"""Numbers of one run, and of several seeds of it."""

import math
from collections.abc import Sequence
from functools import cache

import numpy as np

from ..intervals import LEVEL, Estimate
from ..settings import ComparisonError
from .server import Run

# A request is starved when so many drafted rounds in a row verified none of its drafts.
STARVED_ROUNDS = 16

# Of `measure`; tokens/s unless said otherwise.
MEASURES = {
    "throughput_tok_s": "tokens per second of all users",
    "user_tok_s_mean": "tokens per second of a user, mean over requests",
    "user_tok_s_p5": "the same of the slowest 5 %",
    "user_tok_s_p50": "the same, median",
    "concurrency": "rows of a round, weighted by time",
    "budget": "verified tokens of a row in a round, anchor counted",
    "tau": "tokens that a row gets in a round",
    "drafted_share": "share of rounds that drafted",
    "num_slots": "slots drafted, mean over drafted rounds",
    "first_token_s_p50": "seconds from asking to the end of the prompt's forward, median",
    "latency_s_mean": "seconds from asking to the last token, mean",
    "jain_index": "Jain's index of users' speeds: 1 when all are alike",
    "slowest_to_median": "p5 of users' speeds over their median",
    "starved_share": f"share of requests that {STARVED_ROUNDS} or more drafted rounds in a row verified no draft of",
    "drafts_per_round_p5": "verified drafts of a request in a drafted round, the 5 % that get fewest",
}


def measure(run: Run, first: int, count: int) -> dict[str, float]:
    """Numbers of the requests `first` to `first + count - 1`, and of the rounds between the issue of the first of them
    and of the one behind the last; by the names of `MEASURES`.

    Requests count whole, also those that end later, so that long answers weigh as much as short ones.
    """
    begin_s, end_s = run.issued_s[first], run.issued_s[first + count]
    rounds = [one for one in run.rounds if begin_s < one.ended_s <= end_s]
    cohort = [one for one in run.served if first <= one.request.id < first + count]
    assert len(cohort) == count and rounds, "a run goes on until its requests have ended"
    num_rows = np.array([one.num_rows for one in rounds], dtype=np.float64)
    seconds = np.array([one.seconds for one in rounds])
    num_tokens = sum(one.num_tokens for one in rounds)
    drafted = [one for one in rounds if one.num_slots]
    speeds = np.array([one.tokens_per_s for one in cohort])
    shares = [one.num_verified / one.num_drafted_rounds for one in cohort if one.num_drafted_rounds]
    p5, p50 = np.quantile(speeds, [0.05, 0.5])
    return {
        "throughput_tok_s": num_tokens / (end_s - begin_s),
        "user_tok_s_mean": float(speeds.mean()),
        "user_tok_s_p5": float(p5),
        "user_tok_s_p50": float(p50),
        "concurrency": float(num_rows @ seconds) / (end_s - begin_s),
        "budget": 1 + sum(one.num_verified for one in rounds) / float(num_rows.sum()),
        "tau": num_tokens / float(num_rows.sum()),
        "drafted_share": len(drafted) / len(rounds),
        "num_slots": float(np.mean([one.num_slots for one in drafted])) if drafted else 0.0,
        "first_token_s_p50": float(np.median([one.started_s - one.request.issued_s for one in cohort])),
        "latency_s_mean": float(np.mean([one.finished_s - one.request.issued_s for one in cohort])),
        "jain_index": float(speeds.sum() ** 2 / (count * (speeds**2).sum())),
        "slowest_to_median": float(p5 / p50),
        "starved_share": float(np.mean([one.longest_wait >= STARVED_ROUNDS for one in cohort])),
        "drafts_per_round_p5": float(np.quantile(shares, 0.05)) if shares else 0.0,
    }


@cache
def student_quantile(n: int) -> float:
    """Standard errors that an interval of `n` runs reaches to either side.

    Raises:
        ComparisonError: scipy is missing.
    """
    try:
        from scipy.stats import t  # slow to import
    except ImportError as error:
        raise ComparisonError('intervals over runs need scipy: pip install "dspark-hf[eval]"') from error
    return float(t.ppf((1 + LEVEL) / 2, n - 1))


def over_seeds(values: Sequence[float]) -> Estimate:
    """Mean over seeds with Student's interval, at the level of other reports; `n` counts seeds.

    A bootstrap of a handful of runs is too narrow, and means of runs are close to normal.
    """
    n = len(values)
    mean = float(np.mean(values))
    if n < 2 or not math.isfinite(mean):
        return Estimate(mean if math.isfinite(mean) else None, None, None, n)
    half = student_quantile(n) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n)


def ratio_over_seeds(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Geometric mean of the ratios of runs with the same seed, and its interval."""
    logs = over_seeds([math.log(a / b) for a, b in zip(numerators, denominators, strict=True)])
    low, high = (None if end is None else math.exp(end) for end in (logs.low, logs.high))
    return Estimate(None if logs.value is None else math.exp(logs.value), low, high, logs.n)


def at_matched(xs: Sequence[float], ys: Sequence[float], target: float) -> float | None:
    """`y` of a load curve where its `x` is `target`, linear in both logarithms; None outside of the curve."""
    order = np.argsort(xs)
    x, y = np.log(np.array(xs)[order]), np.log(np.array(ys)[order])
    if not x[0] <= math.log(target) <= x[-1]:
        return None
    return float(np.exp(np.interp(math.log(target), x, y)))
