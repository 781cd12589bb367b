"""Stage 3 over the rounds of one generate() call: whether a round drafts, and how much of its drafts is verified."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from .._compat import TargetModel
from ..fitting.profile_store import command_for, find_profile
from ..fitting.step_residuals import residuals_of
from ..fitting.throughput import RoundTimes, ThroughputProfile
from ..modeling_dspark import DSparkDraftModel
from .policies.depth import slots_worth_drafting
from .policies.facts import RoundFacts, StepCosts, VerificationPolicy
from .policies.gate import DraftGate
from .policies.history import RowHistory
from .policies.registry import COST_POLICIES
from .policies.simple import FullPolicy
from .policies.urgency import token_weights
from .schedule import schedule
from .types import Confidence

# Step times are looked up anew when the context has grown by so many tokens.
COSTS_EVERY_TOKENS = 16

# Of so many contexts and numbers of rows step times are kept.
MAX_KNOWN_COSTS = 64


class Scheduler:
    """The policy of one generate() call, and what it may know: step times, and past rounds.

    Args:
        policy: Made for this call.
        num_slots: Most drafts of a round, at most `block_size`.
        block_size: Slots of the drafts that were profiled.
        prior_survival: Share of rounds in which each slot is accepted, as known before the call, `[block_size]`; None:
            nothing is known.
        profile: For policies that weigh drafts against step times.
        device: Of drafts and confidences.
        fills_freed_rows: New rows take the place of those that end, as on a server: then no row holds up the others.
        is_timed: Steps take what the host's clock says, as on a CPU; else [`observe_step`] hears nothing.
    """

    def __init__(
        self,
        policy: VerificationPolicy,
        num_slots: int,
        profile: RoundTimes | None,
        device: torch.device,
        *,
        block_size: int,
        prior_survival: Sequence[float] | None = None,
        fills_freed_rows: bool = False,
        is_timed: bool = False,
    ) -> None:
        self._policy = policy
        self._profile = profile if policy.needs_costs else None
        prior = {} if prior_survival is None else {"prior_acceptance": conditional_shares(prior_survival)}
        self._gate = None if self._profile is None else DraftGate(num_slots, **prior)
        # Steps that a clock times are those of a measured profile.
        measured = cast(ThroughputProfile | None, self._profile if is_timed else None)
        self._residuals = None if measured is None else residuals_of(measured)
        self._history = RowHistory(num_slots, prior_survival)
        # With one number of rows profiled, nobody knows what a row costs.
        knows_rows = self._profile is not None and len(self._profile.grid.num_rows) > 1
        self._weighs_rows = knows_rows and not fills_freed_rows and getattr(policy, "weighs_rows", False)
        self._weights: dict[int, float] | None = None  # of the round in progress, by row
        self._num_slots = num_slots
        self._block_size = block_size
        self._device = device
        self._known_costs: dict[tuple[int, int], StepCosts] = {}
        self._known_shorter: dict[tuple[int, int], StepCosts] = {}  # by the id of costs, and slots left out
        self._costs: StepCosts | None = None  # of the round in progress
        self._round: tuple[Confidence, RoundFacts] | None = None

    @property
    def verifies_all(self) -> bool:
        """Whether every usable draft is verified, whatever the confidences."""
        return isinstance(self._policy, FullPolicy)

    @property
    def costs(self) -> StepCosts | None:
        """Step times of the round in progress."""
        return self._costs

    def wants_draft(self, num_live: int, context: int) -> bool:
        """Whether the round that begins now drafts; called once a round, before anything of it is known.

        Args:
            num_live: Rows that have not ended, >= 1.
            context: Tokens of the longest row.
        """
        self._round, self._weights = None, None
        if self._profile is None or self._gate is None:
            return True
        self._costs = self._costs_of(self._profile, num_live, context)
        return self._gate.wants_draft(num_live, self._costs)

    def slots(self, num_to_go: Mapping[int, int], most: int) -> int:
        """Slots to draft in a round that drafts, at most `most` >= 1; called after [`wants_draft`].

        Args:
            num_to_go: Tokens that each live row may still get, by its id.
        """
        if self._costs is None:
            return most
        shares = self._history.accepted_share(list(num_to_go))
        weights = None
        if len(num_to_go) > 1 and self._weighs_rows:
            to_go = np.array(list(num_to_go.values()), dtype=np.float64)
            weights = token_weights(to_go, 1.0 + shares.sum(axis=1), self._costs)
            self._weights = dict(zip(num_to_go, weights.tolist(), strict=True))
        num_slots = min(most, slots_worth_drafting(self._history, shares, self._costs, weights))
        key = id(self._costs), self._num_slots - num_slots
        if key not in self._known_shorter:  # kept, since policies keep what they derive from costs with them
            self._known_shorter[key] = self._costs.without_slots(key[1])
        self._costs = self._known_shorter[key]
        return num_slots

    def weights(self, row_ids: Sequence[int]) -> Tensor | None:
        """What a token of each row is worth in the round in progress, float `[rows]`; rows that have ended have 1."""
        if self._weights is None or self._costs is None:
            return None
        return self._costs.step_s.new_tensor([self._weights.get(row, 1.0) for row in row_ids])

    def lengths(self, confidence: Confidence, facts: RoundFacts) -> Tensor:
        """Drafts to verify, int64 `[rows]`."""
        self._round = confidence, facts
        return schedule(self._policy, confidence, facts)

    def observe(
        self,
        num_accepted: Tensor,
        lengths: Tensor | None,
        live_accepted: Sequence[int],
        live_lengths: Sequence[int],
        live_rows: Sequence[int] = (0,),
    ) -> None:
        """Take what the round came to; later rounds may depend on it.

        Args:
            num_accepted, lengths: Drafts accepted and verified, int64 `[rows]`; without lengths nothing was drafted.
            live_accepted, live_lengths: The same of the rows that took part, on the host.
            live_rows: Their ids.
        """
        drafted, self._round = self._round, None
        if drafted is not None and lengths is not None:
            self._policy.observe(drafted[0], lengths, num_accepted, drafted[1])
        if self._gate is None or self._costs is None:
            return
        if drafted is None:
            self._gate.observe_plain(len(live_lengths), self._costs)
        else:
            self._gate.observe(live_accepted, live_lengths, self._costs)
            self._history.observe(live_rows, live_accepted, drafted[1].num_slots)

    def observe_step(self, num_rows: int, num_tokens: int, context: int, measured_s: float) -> None:
        """Take what a target step took, so that a profile that no longer holds is warned of; decides nothing.

        Args:
            num_rows: Rows in the step, those that have ended included.
            num_tokens: Tokens that were computed (B).
            context: Tokens of the longest row before its anchor.
            measured_s: Seconds.
        """
        if self._residuals is not None:
            self._residuals.observe(num_rows, num_tokens, context, measured_s)

    def _costs_of(self, profile: RoundTimes, num_live: int, context: int) -> StepCosts:
        key = num_live, context // COSTS_EVERY_TOKENS
        if key not in self._known_costs:
            if len(self._known_costs) >= MAX_KNOWN_COSTS:  # a long text passes many
                self._known_costs.clear()
                self._known_shorter.clear()
            num_rows = max(num_live, profile.grid.num_rows[0])
            measured = profile.step_costs(num_rows, context)
            whole = StepCosts.of(
                measured.step_s.tolist(),
                measured.draft_s,
                profile.overhead_s(num_rows),
                device=self._device,
                dtype=torch.float32 if self._device.type == "mps" else torch.float64,
                slot_s=measured.slot_s,
                row_s=self._row_s(profile, num_rows, context) if self._weighs_rows else 0.0,
            )
            self._known_costs[key] = whole.without_slots(self._block_size - self._num_slots)
        return self._known_costs[key]

    def _row_s(self, profile: RoundTimes, num_rows: int, context: int) -> float:
        few, more = profile.grid.num_rows[:2]
        num_rows = max(num_rows, more)
        alone, together = (float(profile.step_costs(n, context).step_s[n]) for n in (few, num_rows))
        return max(0.0, (together - alone) / (num_rows - few))


def conditional_shares(survival: Sequence[float]) -> list[float]:
    """Of rounds that accepted every slot before, the share that accepted each; 0 behind a slot that none accepted."""
    before = [1.0, *survival[:-1]]
    return [min(1.0, share / reached) if reached > 0 else 0.0 for share, reached in zip(survival, before, strict=True)]


class Found(NamedTuple):
    """A throughput profile, or why there is none and the command that makes one."""

    profile: ThroughputProfile | None
    why_none: str | None = None
    command: str = ""


def usable_profile(target: TargetModel, drafter: DSparkDraftModel, num_rows: int) -> Found:
    """The throughput profile of this pair on this machine for so many rows."""
    profile = find_profile(target, drafter)
    if profile is None:
        return Found(
            None, f"no throughput profile is at hand for {_setup(target, drafter)}", command_for(target, drafter)
        )
    if not profile.covers(num_rows, num_rows):
        known = profile.grid.num_rows
        why = f"the throughput profile knows {known[0]} to {known[-1]} rows, and this call has {num_rows}"
        return Found(None, why, command_for(target, drafter, sorted((*known, num_rows))))
    return Found(profile)


def _setup(target: TargetModel, drafter: DSparkDraftModel) -> str:
    """What a profile is of besides the pair itself; the command measures a drafter in its target's dtype."""
    dtypes = [str(model.dtype).removeprefix("torch.") for model in (target, drafter)]
    threads = f" and {torch.get_num_threads()} threads" if target.device.type == "cpu" else ""
    return f"this pair in {dtypes[0]}, the drafter in {dtypes[1]}, on {target.device.type}{threads}"


def policy_without_a_word(target: TargetModel, drafter: DSparkDraftModel, num_rows: int = 1) -> str:
    """Name of the policy that a generate() call runs which names none: the drafter's own, where that can be had."""
    name: str = drafter.config.verification_policy
    return "full" if name in COST_POLICIES and usable_profile(target, drafter, num_rows).profile is None else name
