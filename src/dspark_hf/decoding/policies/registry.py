"""Policies by name."""

from collections.abc import Callable

from .block import BlockPolicy
from .facts import VerificationPolicy
from .goodput import GoodputPolicy
from .lagged import LaggedPolicy
from .pool import PooledPolicy
from .prefix import PrefixPolicy, SmoothedPolicy
from .simple import FullPolicy, SurvivalPolicy, ThresholdPolicy

_POOLED: dict[str, type[PooledPolicy]] = {
    policy.name: policy for policy in (PrefixPolicy, SmoothedPolicy, BlockPolicy, LaggedPolicy)
}

# Policies that need step times.
COST_POLICIES = frozenset({*_POOLED, GoodputPolicy.name})

_THRESHOLDS: dict[str, type[ThresholdPolicy] | type[SurvivalPolicy]] = {
    policy.name: policy for policy in (ThresholdPolicy, SurvivalPolicy)
}

# Policies that read the threshold of a call.
THRESHOLD_POLICIES = frozenset(_THRESHOLDS)


def policy_factory(
    name: str, threshold: float, min_drafts_every: int | None = None
) -> Callable[[], VerificationPolicy]:
    """What makes policy `name`, one of `VERIFICATION_POLICIES`, afresh for each generate() call.

    Args:
        threshold: Of the policies that have one.
        min_drafts_every: Of the policies that weigh rows against each other; see [`PooledPolicy`].

    Raises:
        UnsupportedGenerationError: a value that the policy cannot have.
    """
    if name == FullPolicy.name:
        return FullPolicy
    if name == GoodputPolicy.name:
        return GoodputPolicy
    if name in _THRESHOLDS:
        with_threshold = _THRESHOLDS[name]
        with_threshold(threshold)  # refused now, not in the first round
        return lambda: with_threshold(threshold)
    pooled = _POOLED[name]
    pooled(min_drafts_every)
    return lambda: pooled(min_drafts_every)
