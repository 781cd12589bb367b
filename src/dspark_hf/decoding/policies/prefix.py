"""Early stop: admit candidates while each raises the expected tokens per second."""

import torch
from torch import Tensor

from .facts import RoundFacts, StepCosts
from .pool import Pool, PooledPolicy


class PrefixPolicy(PooledPolicy):
    """Algorithm 1 of the paper (section 5): stop at the first candidate that does not raise Theta, equality included.

    Best when step time grows smoothly with B. On a staircase it stops at the first edge, however much a jump over it
    would gain.
    """

    name = "prefix"

    def _num_drafts(self, pool: Pool, facts: RoundFacts, costs: StepCosts) -> Tensor:
        return early_stop(pool, costs.round_s)


class SmoothedPolicy(PooledPolicy):
    """Early stop on the lower convex envelope of the round's seconds, then fill the step of the staircase.

    The fill admits the best candidates left until the step time next rises; how many is known when the search stops.
    """

    name = "smoothed"

    def _num_drafts(self, pool: Pool, facts: RoundFacts, costs: StepCosts) -> Tensor:
        ends = pool.at_counts(costs.step_ends) - pool.num_live
        return ends.gather(0, early_stop(pool, costs.smooth_round_s)[None]).squeeze(0)


def early_stop(pool: Pool, round_s: Tensor) -> Tensor:
    """Candidates before the first that does not raise `tau / round_s`, int64 scalar.

    Args:
        round_s: float `[max_B + 1]`, seconds of a round by B.
    """
    theta = pool.tau / pool.at_counts(round_s)
    is_better = (theta[1:] > theta[:-1]) & (pool.values > 0)
    # All before were better, so the one before is the best so far; what is due is behind us.
    is_taken = is_better | (torch.arange(len(is_better), device=is_better.device) < pool.num_due)
    return is_taken.long().cumprod(dim=0).sum()
