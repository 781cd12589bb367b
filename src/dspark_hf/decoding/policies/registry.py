"""Policies by name."""

from collections.abc import Callable

from .block import BlockPolicy
from .facts import VerificationPolicy
from .lagged import LaggedPolicy
from .pool import PooledPolicy
from .prefix import PrefixPolicy, SmoothedPolicy
from .simple import FullPolicy, ThresholdPolicy

_POOLED: dict[str, type[PooledPolicy]] = {
    policy.name: policy for policy in (PrefixPolicy, SmoothedPolicy, BlockPolicy, LaggedPolicy)
}

# Policies that need step times.
COST_POLICIES = frozenset(_POOLED)


def policy_factory(
    name: str, threshold: float, min_drafts_every: int | None = None
) -> Callable[[], VerificationPolicy]:
    """What makes policy `name`, one of `VERIFICATION_POLICIES`, afresh for each generate() call.

    Args:
        threshold: Of policy `threshold`.
        min_drafts_every: Of the policies that weigh rows against each other; see [`PooledPolicy`].

    Raises:
        UnsupportedGenerationError: a value that the policy cannot have.
    """
    if name == FullPolicy.name:
        return FullPolicy
    if name == ThresholdPolicy.name:
        ThresholdPolicy(threshold)  # refused now, not in the first round
        return lambda: ThresholdPolicy(threshold)
    pooled = _POOLED[name]
    pooled(min_drafts_every)
    return lambda: pooled(min_drafts_every)
