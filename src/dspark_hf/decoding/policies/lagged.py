"""Lagged capacity: how many drafts are verified follows from confidences of two rounds earlier."""

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import UnsupportedGenerationError
from ..types import Confidence
from .facts import RoundFacts, StepCosts
from .pool import Pool, PooledPolicy
from .survival import RealisedSurvival

# Rounds between the confidences that set the capacity and the round that it holds for (paper, section 5.2).
LAG_ROUNDS = 2


class _Past(NamedTuple):
    """One round's survival estimates, float `[rows, slots]`, 0 where broken, and whose they are."""

    row_ids: tuple[int, ...]
    survival: Tensor


class LaggedPolicy(PooledPolicy):
    """The K best drafts by current confidence, K from a global search over confidences of `lag` rounds earlier.

    K counts drafts, not anchors. The search may look at everything, edges included: all of it is past. A row without
    estimates that old is expected to fare as drafts have so far, by slot.

    Args:
        lag: Drafted rounds, >= 1: the current round's confidences would tell what was drafted.
        min_drafts_every: As for all pooled policies.

    Raises:
        UnsupportedGenerationError: `lag` is below 1.
    """

    name = "lagged"

    def __init__(self, min_drafts_every: int | None = None, lag: int = LAG_ROUNDS) -> None:
        super().__init__(min_drafts_every)
        if lag < 1:
            raise UnsupportedGenerationError(
                f"lag must be >= 1 rounds, got {lag!r}: with the current round's confidences output would be biased"
            )
        self._past: deque[_Past] = deque(maxlen=lag)
        self._realised = RealisedSurvival()

    def observe(self, confidence: Confidence, lengths: Tensor, num_accepted: Tensor, facts: RoundFacts) -> None:
        super().observe(confidence, lengths, num_accepted, facts)
        assert confidence.survival is not None
        slots = torch.arange(facts.num_slots, device=lengths.device)
        survival = torch.where(slots < facts.num_usable[:, None], confidence.survival, 0.0)
        self._past.append(_Past(facts.row_ids, survival))
        self._realised.observe(lengths, num_accepted, facts.num_slots)

    def _num_drafts(self, pool: Pool, facts: RoundFacts, costs: StepCosts) -> Tensor:
        # Limits as they stood before this draft: which slots came out broken tells what was drafted.
        stale = Pool.of(self._stale(pool.survival, facts), facts.known_limits, facts.num_live)
        return (stale.tau / stale.at_counts(costs.round_s)).argmax()

    def _stale(self, like: Tensor, facts: RoundFacts) -> Tensor:
        """Survival estimates `lag` rounds old of the present rows, float `[rows, slots]`."""
        expected = self._realised.expected(facts.num_slots, like)
        survival = expected.repeat(len(facts.row_ids), 1)
        if len(self._past) < (self._past.maxlen or 0):
            return survival
        past = self._past[0]
        here = {row_id: place for place, row_id in enumerate(facts.row_ids)}
        shared = [(here[row_id], place) for place, row_id in enumerate(past.row_ids) if row_id in here]
        if shared:
            places = torch.tensor(shared, device=like.device)
            # Slots that were not drafted then are expected to fare as they have so far.
            num_known = min(facts.num_slots, past.survival.shape[1])
            survival[places[:, 0], :num_known] = past.survival.to(like)[places[:, 1], :num_known]
        return survival
