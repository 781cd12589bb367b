"""Block commit: look ahead with a prior for what is not drafted yet to be known, and jump over edges that pay."""

import torch
from torch import Tensor

from .facts import RoundFacts, StepCosts
from .pool import Pool, PooledPolicy

# Expected conditional acceptance of a slot whose confidence may not be looked at yet.
PRIOR_DECAY = 0.85

# Numbers of admitted drafts at which the search may stop or go on; all of them where there are no more.
MAX_CHECKPOINTS = 33


class BlockPolicy(PooledPolicy):
    """Admit up to the best number that can be foreseen, and look again on the way.

    With t candidates admitted, each row's next candidate is known, and those behind it are taken to decay by
    `PRIOR_DECAY` a slot. The best total under that forecast is where the search is going: if it lies before the next
    checkpoint the policy admits that many and stops, else it admits up to the checkpoint and asks again. A stop
    is decided on admitted candidates and rows' next ones only, as in Algorithm 1. Tokens of rows that hold up the
    others count for more, by what is known before the draft (`urgency.py`).
    """

    name = "block"
    weighs_rows = True

    def _num_drafts(self, pool: Pool, facts: RoundFacts, costs: StepCosts) -> Tensor:
        num_all = len(pool.order)
        checkpoints = torch.arange(num_all + 1, device=pool.order.device)
        if num_all >= MAX_CHECKPOINTS:
            steps = torch.arange(MAX_CHECKPOINTS, device=pool.order.device)
            checkpoints = steps * num_all // (MAX_CHECKPOINTS - 1)
        best = checkpoints + _best_further(pool, facts.known_limits, costs.round_s, checkpoints)
        following = torch.cat([checkpoints[1:], checkpoints.new_tensor([num_all + 1])])
        stops = (best < following).long()  # the last one always does
        return best.gather(0, stops.argmax()[None]).squeeze(0)


def _best_further(pool: Pool, limits: Tensor, round_s: Tensor, checkpoints: Tensor) -> Tensor:
    """How many more candidates promise the most tokens a second, seen from each checkpoint; int64 `[checkpoints]`."""
    forecast = _forecast(pool, limits, checkpoints).flatten(1).sort(dim=1, descending=True).values
    gain = torch.nn.functional.pad(forecast.cumsum(dim=1), (1, 0))
    ahead = torch.arange(gain.shape[1], device=gain.device)
    b = pool.num_live + checkpoints[:, None] + ahead
    theta = (pool.tau[checkpoints, None] + gain) / round_s[b.clamp(max=len(round_s) - 1)]
    is_there = torch.nn.functional.pad(forecast > 0, (1, 0), value=True)
    return torch.where(is_there, theta, 0.0).argmax(dim=1)  # the fewest of equals


def _forecast(pool: Pool, limits: Tensor, checkpoints: Tensor) -> Tensor:
    """Survival of what is not admitted yet, 0 for the rest; `[checkpoints, rows, slots]`.

    Args:
        limits: int64 `[rows]`, as known before the draft.
    """
    num_slots = pool.survival.shape[1]
    is_admitted = pool.ranks < checkpoints[:, None, None]
    num_admitted = is_admitted.sum(dim=-1)  # [checkpoints, rows]
    frontier = num_admitted.clamp(max=num_slots - 1)
    known = pool.survival.expand(len(checkpoints), -1, -1).gather(2, frontier[:, :, None])
    slots = torch.arange(num_slots, device=frontier.device)
    behind = (slots - frontier[:, :, None]).clamp(min=0)
    return torch.where(is_admitted | (slots >= limits[:, None]), 0.0, known * PRIOR_DECAY**behind)
