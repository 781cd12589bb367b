"""The lengths that a policy would choose if it could look at the whole draft first: what the others are measured by."""

from torch import Tensor

from ..decoding.policies.facts import RoundFacts, StepCosts
from ..decoding.policies.pool import Pool, PooledPolicy


class HindsightPolicy(PooledPolicy):
    """Full scan: the best number of drafts of all (facts of section 5, Theta).

    Not for generation, and no name that generate() knows: it looks at confidences that read the very drafts it
    decides about, so sampled output would not follow the target's law.
    """

    name = "hindsight"

    def _num_drafts(self, pool: Pool, facts: RoundFacts, costs: StepCosts) -> Tensor:
        return (pool.tau / pool.at_counts(costs.round_s)).argmax()
