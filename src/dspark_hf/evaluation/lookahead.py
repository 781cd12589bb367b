"""Whether a schedule looks ahead: what comes behind a slot is changed, and the decision about the slot must stay.

A lossless policy decides about slot k of a row from the confidences of slots 1 to k of that row, which read the drafts
before k. So with the confidences behind k of one row replaced, `ell >= k` of that row is what it was. A policy that
fails cannot be used where drafts and target sample; passing says nothing of what was not tried.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..decoding.policies.facts import StepCosts, VerificationPolicy
from ..decoding.types import Confidence
from .schedules import PolicySchedule, confidence_at
from .trace_replay import FlatTraces

NUM_TRIALS = 200


@dataclass(frozen=True)
class LookaheadCheck:
    """Rounds that were tried, and those in which a decision followed from what came behind it."""

    num_trials: int
    num_violations: int


def check_lookahead(
    policy: VerificationPolicy, traces: FlatTraces, costs: StepCosts, num_rows: int, *, seed: int
) -> LookaheadCheck:
    """Try rounds of rows at random places of the traces, one after the other.

    Args:
        costs: For `num_rows` rows.
    """
    rng = np.random.default_rng(seed)
    schedule = PolicySchedule(policy, traces, costs, num_rows)
    ids = list(range(num_rows))
    num_violations = 0
    for _ in range(NUM_TRIALS):
        places = rng.integers(len(traces.num_accepted), size=num_rows)
        row, slot = int(rng.integers(num_rows)), int(rng.integers(traces.num_slots))
        conditional = confidence_at(traces, places).conditional
        assert conditional is not None
        confidence = Confidence(conditional, conditional.cumprod(dim=-1))
        changed = schedule.lengths(_changed_behind(conditional, row, slot, rng), ids)
        lengths = schedule.lengths(confidence, ids)
        num_violations += int((lengths[row] > slot) != (changed[row] > slot))
        schedule.observe(np.minimum(traces.num_accepted[places], lengths.numpy()))
    return LookaheadCheck(NUM_TRIALS, num_violations)


def _changed_behind(conditional: Tensor, row: int, slot: int, rng: np.random.Generator) -> Confidence:
    """Other confidences of a row behind `slot`, counted from 0: all high or all low, which tempts a search most."""
    conditional = conditional.clone()
    high = bool(rng.integers(2))
    conditional[row, slot + 1 :] = torch.as_tensor(
        rng.uniform(0.95, 1.0) if high else rng.uniform(0.0, 0.05), dtype=conditional.dtype
    )
    return Confidence(conditional, conditional.cumprod(dim=-1))
