"""What would have come of shorter drafts: proposal lengths, and thresholds on the confidence.

A cut keeps the first drafts of a block, some number of them or those before the first whose `c_k` is below a
threshold, and verifies only these. The block itself is drafted whole, as generate() does with `num_assistant_tokens`
and with policy `threshold`, so a cut changes no draft; it changes where the next round starts. Replayed texts are
walked anew for every cut, which gives the rounds that this cut would have had (`rewalked`). Of decoded prompts only
the rounds of whole drafts are there, and these are cut one by one (`recorded`): their anchors are those of policy
`full`.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..decoding.calibrate import SlotCalibration, calibrate

CutKind = Literal["length", "threshold", "calibrated"]

# Those of the paper's Figure 5.
THRESHOLDS = tuple(k / 10 for k in range(10))


@dataclass(frozen=True)
class Cut:
    """One way of shortening drafts.

    Attributes:
        kind: `length`: a number of drafts. `threshold`: on the raw `c_k`; `calibrated`: on the calibrated one.
        value: Drafts kept, or the threshold.
    """

    kind: CutKind
    value: float


@dataclass(frozen=True)
class CutPlan:
    """All cuts of one drafter.

    Attributes:
        num_slots: gamma.
        thresholds: On `c_k`; none for a drafter without confidences.
        calibration: The drafter's, of the mode in question; None: it has none.
    """

    num_slots: int
    thresholds: tuple[float, ...] = ()
    calibration: SlotCalibration | None = None

    @property
    def cuts(self) -> list[Cut]:
        """Lengths 1 to gamma, the thresholds, and with a calibration the thresholds again."""
        kinds: list[CutKind] = ["threshold"] if self.calibration is None else ["threshold", "calibrated"]
        lengths = [Cut("length", k) for k in range(1, self.num_slots + 1)]
        return lengths + [Cut(kind, value) for kind in kinds for value in self.thresholds]

    def kept(self, logits: Tensor | None, num_blocks: int) -> Tensor:
        """Which drafts each cut keeps, bool `[cuts, blocks, slots]`, true up to some slot.

        Args:
            logits: Raw confidence logits `[blocks, slots]`; None without thresholds.
            num_blocks: Blocks.
        """
        shape = (num_blocks, self.num_slots)
        slots = torch.arange(self.num_slots)
        parts = [(slots < k).expand(shape)[None] for k in range(1, self.num_slots + 1)]
        if self.thresholds:
            assert logits is not None, "thresholds need confidences"
            maps: list[SlotCalibration | None] = [None] if self.calibration is None else [None, self.calibration]
            for one in maps:
                conditional = calibrate(logits.float(), one).conditional
                assert conditional is not None, "logits give confidences"
                keeps = conditional >= torch.tensor(self.thresholds)[:, None, None]
                parts.append(keeps.long().cumprod(dim=-1).bool())
        return torch.cat(parts)


@dataclass(frozen=True)
class CutSums:
    """What the rounds of one text come to under each cut; expected numbers where the text is replayed.

    Attributes:
        num_tokens, num_rounds, num_verified, num_accepted: float64 `[cuts]`; drafts without bonus tokens.
        reached, accepted: float64 `[cuts, slots]`, verified drafts whose predecessors were all accepted, and those of
            them that were accepted.
    """

    num_tokens: Tensor
    num_rounds: Tensor
    num_verified: Tensor
    num_accepted: Tensor
    reached: Tensor
    accepted: Tensor


def walk(survival: Tensor) -> Tensor:
    """Probability that a round starts at each block of a text.

    Args:
        survival: `[..., blocks, slots]`, probability that drafts 1..k of the block are accepted, one block per token.

    Returns:
        float64 `[..., blocks]`; the first block has 1.
    """
    *shape, num_blocks, size = survival.shape
    survival = survival.double()
    # Probability that exactly n drafts are accepted, n = 0..size; the next round starts n + 1 tokens on.
    exactly = torch.cat([survival.new_ones(*shape, num_blocks, 1), survival], dim=-1)
    exactly[..., :-1] -= survival
    starts = survival.new_zeros(*shape, num_blocks + size + 1)
    starts[..., 0] = 1.0
    for block in range(num_blocks):
        starts[..., block + 1 : block + size + 2] += starts[..., block, None] * exactly[..., block, :]
    return starts[..., :num_blocks]


def slots_inside(num_blocks: int, num_slots: int) -> Tensor:
    """bool `[blocks, slots]`: whether a block's slot drafts a token of the text, whose blocks start at every token."""
    return torch.arange(num_blocks, 0, -1)[:, None] > torch.arange(num_slots)


@dataclass(frozen=True)
class TextDrafts:
    """What was drafted at every token of a text.

    Attributes:
        acceptance: float64 `[blocks, slots]`, as in `ReplayedText`.
        logits: float32 `[blocks, slots]`, raw confidence logits on the text's own prefix; None without a head.
        rejected_logits: The same on a draft that leaves the text at its first rejected slot; likewise.
        first_rejected: int64 `[blocks]`, that slot, from 0; any where nothing is rejected.
    """

    acceptance: Tensor
    logits: Tensor | None
    rejected_logits: Tensor | None
    first_rejected: Tensor | None


def rewalked(plan: CutPlan, drafts: TextDrafts) -> CutSums:
    """Every cut's own rounds on a replayed text."""
    num_blocks, size = drafts.acceptance.shape
    kept = plan.kept(drafts.logits, num_blocks)
    survival = (drafts.acceptance * kept).cumprod(dim=-1)
    visits = walk(survival)
    weight = visits[..., None] * slots_inside(num_blocks, size)
    reached = weight * _before(survival) * kept
    accepted = reached * drafts.acceptance
    num_verified = (reached + weight * _behind_rejection(plan, drafts, kept)).sum(dim=(1, 2))
    return CutSums(
        num_tokens=torch.full_like(num_verified, num_blocks),
        num_rounds=visits.sum(dim=1),
        num_verified=num_verified,
        num_accepted=accepted.sum(dim=(1, 2)),
        reached=reached.sum(dim=1),
        accepted=accepted.sum(dim=1),
    )


def _behind_rejection(plan: CutPlan, drafts: TextDrafts, kept: Tensor) -> Tensor:
    """Probability `[cuts, blocks, slots]` that a slot is verified although a draft before it is rejected."""
    num_blocks, size = drafts.acceptance.shape
    survival = drafts.acceptance.cumprod(dim=-1)
    by_length = kept * (1 - _before(survival))  # lengths do not look at what was drafted
    if drafts.rejected_logits is None or drafts.first_rejected is None:
        return by_length
    is_behind = torch.arange(size) > drafts.first_rejected[:, None]
    share_rejected = (1 - survival[:, -1:]).clamp(min=0)
    by_confidence = plan.kept(drafts.rejected_logits, num_blocks) * is_behind * share_rejected
    is_length = torch.tensor([cut.kind == "length" for cut in plan.cuts])[:, None, None]
    return torch.where(is_length, by_length, by_confidence)


def _before(survival: Tensor) -> Tensor:
    """Probability that all slots before each one are accepted, of the survival `[..., slots]` up to each one."""
    return torch.cat([torch.ones_like(survival[..., :1]), survival[..., :-1]], dim=-1)


def recorded(
    plan: CutPlan, logits: Tensor | None, num_verified: Tensor, num_accepted: Tensor, num_tokens: Tensor, num_plain: int
) -> CutSums:
    """Every cut of the rounds of one decoded prompt.

    Args:
        logits: `[rounds, slots]`, raw confidence logits; None without a confidence head.
        num_verified, num_accepted: int64 `[rounds]`, of whole drafts.
        num_tokens: int64 `[rounds]`, committed; fewer than were accepted and one where a stop cut them off.
        num_plain: Rounds besides, in which nothing was drafted.
    """
    slots = torch.arange(plan.num_slots)
    kept = plan.kept(logits, len(num_verified)) & (slots < num_verified[:, None])
    is_accepted = slots < num_accepted[:, None]
    accepted = kept & is_accepted
    # Behind the first slot that is not accepted a verified draft is not reached.
    reached = kept & (slots <= num_accepted[:, None])
    tokens = torch.minimum(accepted.sum(dim=-1) + 1, num_tokens)
    return CutSums(
        num_tokens=(tokens.sum(dim=1) + num_plain).double(),
        num_rounds=torch.full((len(plan.cuts),), float(len(num_verified) + num_plain), dtype=torch.float64),
        num_verified=kept.sum(dim=(1, 2)).double(),
        num_accepted=accepted.sum(dim=(1, 2)).double(),
        reached=reached.sum(dim=1).double(),
        accepted=accepted.sum(dim=1).double(),
    )
