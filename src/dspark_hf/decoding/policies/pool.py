"""Candidates of all rows in one order, best first; and what the first n of them are worth."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..types import Confidence
from .facts import RoundFacts, StepCosts
from .floor import floor_of


@dataclass(frozen=True, eq=False)
class Pool:
    """The order in which drafts are admitted: by survival, ties by row and then slot, never by what comes later.

    Of a policy that weighs rows survival is multiplied by the row's weight.

    N is rows * slots. Candidates that cannot be verified have survival 0; those are never admitted.

    Attributes:
        survival: `a`, float `[rows, slots]`, non-increasing along slots.
        order: int64 `[N]`, flat index `row * slots + slot` of each candidate, best first.
        num_live: int64 scalar, B when nothing is admitted.
        num_due: int64 scalar, candidates at the head that are admitted whatever they are worth.
    """

    survival: Tensor
    order: Tensor
    num_live: Tensor
    num_due: Tensor

    @classmethod
    def of(cls, survival: Tensor, limits: Tensor, num_live: Tensor, is_due: Tensor | None = None) -> "Pool":
        """The pool of `survival`, float `[rows, slots]`, with int64 `limits` `[rows]` on the slots of each row.

        Args:
            is_due: bool `[rows]`, rows whose first draft comes before all others.
        """
        # A parallel cumprod may round a later product above an earlier one, and then a slot would overtake the one
        # before it.
        survival = survival.cummin(dim=-1).values
        slots = torch.arange(survival.shape[1], device=survival.device)
        survival = torch.where(slots < limits[:, None], survival, 0.0)
        key, num_due = survival, torch.zeros_like(num_live)
        if is_due is not None:
            comes_first = is_due & (survival[:, 0] > 0)
            key = torch.where(comes_first[:, None] & (slots == 0), torch.inf, survival)
            num_due = comes_first.sum()
        return cls(survival, key.flatten().argsort(stable=True, descending=True), num_live, num_due)

    @cached_property
    def values(self) -> Tensor:
        """Survival of each candidate in order, float `[N]`."""
        return self.survival.flatten()[self.order]

    @cached_property
    def ranks(self) -> Tensor:
        """Place of each candidate in the order, int64 `[rows, slots]`."""
        ranks = torch.empty_like(self.order)
        ranks[self.order] = torch.arange(len(self.order), device=self.order.device)
        return ranks.view(self.survival.shape)

    @cached_property
    def tau(self) -> Tensor:
        """Expected tokens of a round that verifies the first n candidates, float `[N + 1]`, anchors' own counted."""
        start = self.num_live.to(self.values.dtype)[None]
        return torch.cat([start, self.values]).cumsum(dim=0)

    def at_counts(self, table: Tensor) -> Tensor:
        """`table` `[max_B + 1]` at the B that each number of candidates makes, `[N + 1]`."""
        counts = torch.arange(len(self.order) + 1, device=table.device) + self.num_live
        return table[counts.clamp(max=len(table) - 1)]

    def first(self, count: Tensor) -> Tensor:
        """Drafts of each row among the first `count` candidates, int64 `[rows]`; all that are due at least."""
        is_in = self.ranks < torch.maximum(count, self.num_due)
        return (is_in & (self.survival > 0)).sum(dim=-1)


class PooledPolicy:
    """What policies over the pool of all rows share.

    Args:
        min_drafts_every: Each row gets a draft verified at least once in so many drafted rounds; None: rows may
            starve.
    """

    name: str
    needs_confidence = True
    needs_costs = True
    weighs_rows = False  # whether a token of one row may count for more than that of another

    def __init__(self, min_drafts_every: int | None = None) -> None:
        self._floor = floor_of(min_drafts_every)

    def lengths(self, confidence: Confidence, facts: RoundFacts) -> Tensor:
        """Drafts to verify, int64 `[rows]`; nothing is read from the device."""
        assert confidence.survival is not None, "a drafter without confidence head is refused before drafting"
        assert facts.costs is not None, "a policy without costs is refused before drafting"
        survival = confidence.survival.to(facts.costs.step_s.dtype)
        if self.weighs_rows and facts.weights is not None:
            survival = survival * facts.weights[:, None]
        pool = Pool.of(survival, facts.limits, facts.num_live, self._floor.is_due(facts))
        return pool.first(self._num_drafts(pool, facts, facts.costs))

    def observe(self, confidence: Confidence, lengths: Tensor, num_accepted: Tensor, facts: RoundFacts) -> None:
        """Take what a drafted round came to."""
        self._floor.observe(lengths, facts)

    def _num_drafts(self, pool: Pool, facts: RoundFacts, costs: StepCosts) -> Tensor:
        """How many candidates are admitted, int64 scalar."""
        raise NotImplementedError
