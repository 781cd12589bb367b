"""What is compared: plain steps, MTP-1, fixed lengths, and the policies of generate(), run by its own `Scheduler`."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ...config_rules import VERIFICATION_POLICIES
from ...decoding.policies.facts import RoundFacts
from ...decoding.policies.registry import policy_factory
from ...decoding.scheduler import Scheduler
from ...decoding.types import Confidence
from ..settings import ComparisonError
from .bank import Ints, RoundBank
from .machine import Machine

PLAIN, MTP, FIXED = "plain", "mtp-1", "fixed-"
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class System:
    """One way to serve.

    Attributes:
        name: For readers.
        policy: Verification policy; None: plain steps.
        num_slots: Drafts of a round; None: the whole block.
        threshold: Of policy `threshold`.
        min_drafts_every: The floor of the policies that weigh rows; None: none.
    """

    name: str
    policy: str | None
    num_slots: int | None = None
    threshold: float = 0.5
    min_drafts_every: int | None = None

    @classmethod
    def named(cls, name: str, *, threshold: float = 0.5, min_drafts_every: int | None = None) -> "System":
        """`plain`, `mtp-1`, `fixed-K`, or a verification policy.

        Raises:
            ComparisonError: there is no such system.
        """
        if name == PLAIN:
            return cls(name, None)
        if name == MTP:
            return cls(name, "full", 1)
        number = name.removeprefix(FIXED)
        if name.startswith(FIXED) and number.isdecimal() and int(number) >= 1:
            return cls(name, "full", int(number))
        if name not in VERIFICATION_POLICIES:
            known = f"{PLAIN}, {MTP}, {FIXED}1, {FIXED}2, ... or one of {', '.join(VERIFICATION_POLICIES)}"
            raise ComparisonError(f"systems must be {known}, got {name!r}")
        shown = name if min_drafts_every is None else f"{name}, floor {min_drafts_every}"
        return cls(shown, name, None, threshold, min_drafts_every)

    def planner(self, machine: Machine, num_slots: int) -> "Planner":
        """Afresh, for one run.

        Args:
            num_slots: Of recorded blocks.

        Raises:
            ComparisonError: more drafts than were recorded.
        """
        if self.policy is None:
            return PlainPlanner()
        own = num_slots if self.num_slots is None else self.num_slots
        if own > num_slots:
            raise ComparisonError(f"{self.name} needs blocks of {own} drafts, and traces have {num_slots}")
        policy = policy_factory(self.policy, self.threshold, self.min_drafts_every)()
        scheduler = Scheduler(policy, own, machine.times, _CPU, block_size=machine.block_size, fills_freed_rows=True)
        return SchedulerPlanner(scheduler, own)


class Plan(NamedTuple):
    """What a round does.

    Attributes:
        num_slots: Drafted for each row; 0: a plain step.
        lengths: int64 `[rows]`, drafts verified.
    """

    num_slots: int
    lengths: Ints


class Planner(Protocol):
    """Decides round by round; it sees ids, confidences of the present drafts, and what past rounds accepted.

    Attributes:
        has_drafter: Rounds run in the drafter's loop, those that draft nothing too; without, in that of plain
            generation.
    """

    has_drafter: bool

    def plan(self, ids: Ints, confidence: Confidence, context: int) -> Plan:
        """Of the round that begins now.

        Args:
            ids: int64 `[rows]`, of requests.
            confidence: Of whole blocks; only a plan that drafts may look at it.
            context: Tokens of the longest row.
        """
        ...

    def observe(self, plan: Plan, num_accepted: Ints) -> None:
        """Take what the round came to, drafts accepted of each row, int64 `[rows]`."""
        ...


class PlainPlanner:
    """Plain generation."""

    has_drafter = False

    def plan(self, ids: Ints, confidence: Confidence, context: int) -> Plan:
        return Plan(0, np.zeros(len(ids), dtype=np.int64))

    def observe(self, plan: Plan, num_accepted: Ints) -> None:
        """Nothing to learn."""


class SchedulerPlanner:
    """What generate() does with a batch: the gate, the depth of drafts, the policy."""

    has_drafter = True

    def __init__(self, scheduler: Scheduler, num_slots: int) -> None:
        self._scheduler = scheduler
        self._num_slots = num_slots
        self._ids: list[int] = []  # of the round in progress

    def plan(self, ids: Ints, confidence: Confidence, context: int) -> Plan:
        num_rows, self._ids = len(ids), ids.tolist()
        if not self._scheduler.wants_draft(num_rows, context):
            return Plan(0, np.zeros(num_rows, dtype=np.int64))
        num_slots = self._scheduler.slots(dict.fromkeys(self._ids, self._num_slots + 1), self._num_slots)
        full = torch.full((num_rows,), num_slots)
        facts = RoundFacts(
            num_slots, tuple(self._ids), torch.ones(num_rows, dtype=torch.bool), full, full, self._scheduler.costs
        )
        lengths: Ints = self._scheduler.lengths(_first_slots(confidence, num_slots), facts).numpy()
        return Plan(num_slots, lengths)

    def observe(self, plan: Plan, num_accepted: Ints) -> None:
        lengths = torch.from_numpy(plan.lengths) if plan.num_slots else None
        accepted = torch.from_numpy(num_accepted)
        self._scheduler.observe(accepted, lengths, num_accepted.tolist(), plan.lengths.tolist(), self._ids)


def _first_slots(confidence: Confidence, num_slots: int) -> Confidence:
    def cut(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[:, :num_slots]

    return Confidence(cut(confidence.conditional), cut(confidence.survival))


def bank_for(system: System, drafts: RoundBank, mtp: RoundBank | None) -> RoundBank:
    """Whose rounds a system follows: MTP-1 has a recording of its own, or is the drafter's first slot."""
    return mtp if system.name == MTP and mtp is not None else drafts
