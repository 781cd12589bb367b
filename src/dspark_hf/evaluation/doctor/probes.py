"""The same drafter with one setting changed, on the same texts of the target: what accepts more?

Every token that the target wrote is an anchor, so a few prompts give thousands of drafts, and both variants draft the
same slots. The number compared is acceptance a draft, behind the target's own tokens, so that late slots count as much
as slot 1. A draft counts by the probability that the drafter's law gives the target's token, which varies less than
whether its best token is that.
"""

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ...errors import IncompatibleTargetError
from ...layer_rules import DRAFT_LAYOUTS
from ...modeling_dspark import DSparkDraftModel
from ...target_traits import choose_mask_token_id
from ..replay import Replay, ReplayedText
from .case import Case
from .evidence import Evidence, jackknife, stretches
from .findings import NotExamined

MAX_MASK_CANDIDATES = 8
# Features that raise acceptance by less than this, in points, are not read, however sure the gain is.
NEGLIGIBLE_POINTS = 1.0
# Of the one-sided test whether features help at all: 99 %.
_FEW_STANDARD_ERRORS = 2.33


@dataclass(frozen=True)
class Change:
    """One field of a drafter's config, and the value to try."""

    field: str
    value: Any

    def on(self, drafter: DSparkDraftModel) -> DSparkDraftModel:
        """A drafter with the same weights and the changed field; `drafter` stays as it is."""
        changed = copy.copy(drafter)
        changed.config = copy.deepcopy(drafter.config)
        setattr(changed.config, self.field, self.value)
        return changed


@dataclass(frozen=True)
class Cure:
    """A change that accepts more, and how much more."""

    change: Change
    before: Any
    gain: Evidence
    num_tried: int


@dataclass(frozen=True)
class Probing:
    """What probing found.

    Attributes:
        cures: Changes that accept more, the best first; each on top of those before it.
        tried: Every change tried on the drafter as it is, and its gain.
        best: The drafter with all cures.
        reads_features: Whether the drafter, cured, accepts more with the features of the right positions than with
            those of others.
        feature_gain: How much more.
    """

    cures: tuple[Cure, ...]
    tried: tuple[tuple[Change, Evidence], ...]
    best: DSparkDraftModel
    reads_features: bool
    feature_gain: Evidence

    @property
    def num_drafts(self) -> int:
        """Drafts of each variant that were compared."""
        return self.feature_gain.num_drafts


def probing_of(case: Case) -> Probing:
    """What [`probe`] finds, found once."""
    if case.probing is None:
        case.probing = probe(case)
    found: Probing = case.probing
    return found


def probe(case: Case) -> Probing:
    """Try changes one at a time, take over the best that surely accepts more, and try again.

    Raises:
        NotExamined: the pair does not run, or the texts cannot be replayed.
    """
    texts = case.greedy.texts
    if not texts:
        raise NotExamined("the target answers no prompt with two tokens or more")
    try:
        return _probe(case, Replay(case.target, texts, is_soft=True))
    except IncompatibleTargetError as error:
        raise NotExamined(f"drafts cannot be replayed: {error}") from error


def _probe(case: Case, replay: Replay) -> Probing:
    base = case.drafter
    cures: list[Cure] = []
    tried: list[tuple[Change, Evidence]] = []
    while True:
        done = {cure.change.field for cure in cures}
        changes = [change for change in changes_of(case, base) if change.field not in done]
        (own,) = replay.run_all([base])
        reads, feature_gain = _reads_features(case, base, own)
        alone = [(change,) for change in changes]
        gains, found = _best(case, replay, base, own, alone)
        tried = tried or list(zip(changes, gains, strict=True))
        if not found and not reads:  # two settings that are both wrong: neither may help alone
            both = [(a, b) for a, b in itertools.combinations(changes, 2) if a.field != b.field]
            _, found = _best(case, replay, base, own, both)
        if not found:
            return Probing(tuple(cures), tuple(tried), base, reads, feature_gain)
        cures += found
        base = _changed(base, [cure.change for cure in found])


def _best(
    case: Case,
    replay: Replay,
    base: DSparkDraftModel,
    own: Sequence[ReplayedText],
    candidates: Sequence[tuple[Change, ...]],
) -> tuple[list[Evidence], list[Cure]]:
    """Each candidate's gain, and the changes, made together, that accept most.

    They must surely accept more, and the features must count then; else there is no best.
    """
    variants = replay.run_all([_changed(base, changes) for changes in candidates]) if candidates else []
    kinds = [tuple(change.field for change in changes) for changes in candidates]
    gains = [
        gain(variant, own, num_comparisons=kinds.count(kind)) for variant, kind in zip(variants, kinds, strict=True)
    ]
    sure = [i for i, one in enumerate(gains) if one.is_above_zero]
    best = max(sure, key=lambda i: gains[i].value or 0.0, default=None)
    if best is None or not _reads_features(case, _changed(base, candidates[best]), variants[best])[0]:
        return gains, []
    return gains, [
        Cure(change, getattr(base.config, change.field), gains[best], kinds.count(kinds[best]))
        for change in candidates[best]
    ]


def _changed(drafter: DSparkDraftModel, changes: Sequence[Change]) -> DSparkDraftModel:
    for change in changes:
        drafter = change.on(drafter)
    return drafter


def changes_of(case: Case, drafter: DSparkDraftModel) -> list[Change]:
    """Every change worth trying: the other layout, feature layers one off, other mask ids."""
    config = drafter.config
    changes = [Change("draft_layout", layout) for layout in DRAFT_LAYOUTS if layout != config.draft_layout]
    depth = case.target.config.get_text_config(decoder=True).num_hidden_layers
    for shift in (-1, 1):
        ids = [layer_id + shift for layer_id in config.target_layer_ids]
        if ids[0] >= -1 and ids[-1] <= depth - 2:
            changes.append(Change("target_layer_ids", ids))
    masks = mask_candidates(case.tokenizer, config.vocab_size)
    return changes + [Change("mask_token_id", mask) for mask in masks if mask != config.mask_token_id]


def mask_candidates(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[int]:
    """Ids that people take for the mask: what this package would choose, the last one, and special tokens."""
    named = [getattr(tokenizer, f"{name}_token_id", None) for name in ("mask", "pad", "eos", "bos", "unk")]
    added = sorted(tokenizer.added_tokens_decoder)
    found = [choose_mask_token_id(vocab_size, tokenizer), vocab_size - 1, len(tokenizer), *named, 0, *added[::-1]]
    ids = dict.fromkeys(mask for mask in found if isinstance(mask, int) and 0 <= mask < vocab_size)
    return list(ids)[:MAX_MASK_CANDIDATES]


def gain(variant: Sequence[ReplayedText], base: Sequence[ReplayedText], *, num_comparisons: int = 1) -> Evidence:
    """How much higher, in points (percent), the variant's acceptance of a draft is, on the same drafts."""
    more = [100 * (a.acceptance - b.acceptance).mean(dim=1) for a, b in zip(variant, base, strict=True)]
    columns = {
        "more": [part for one in more for part in stretches(one)],
        "blocks": [part for one in more for part in stretches(torch.ones_like(one))],
    }
    return jackknife(
        columns,
        lambda sums: sums["more"] / sums["blocks"],
        num_drafts=num_drafts(base),
        num_prompts=len(base),
        num_comparisons=num_comparisons,
    )


def num_drafts(texts: Sequence[ReplayedText]) -> int:
    """Drafts that were compared with the target's tokens."""
    return sum(text.acceptance.numel() for text in texts)


def block_tokens(text: ReplayedText) -> Tensor:
    """Tokens that a round from each anchor would commit, float64 `[blocks]`."""
    return 1 + text.acceptance.cumprod(dim=1).sum(dim=1)


def _reads_features(case: Case, drafter: DSparkDraftModel, own: Sequence[ReplayedText]) -> tuple[bool, Evidence]:
    """Whether acceptance needs the features to be those of their positions.

    Blocks are taken for independent, which makes small gains count: who gains nothing by that measure reads nothing,
    and neither does who surely gains next to nothing.
    """
    replay = Replay(case.target, case.greedy.texts, alter_features=_misplaced, is_soft=True)
    other = replay.run(drafter)
    differences = torch.cat([(a.acceptance - b.acceptance).sum(dim=1) for a, b in zip(own, other, strict=True)])
    evidence = gain(own, other)
    if len(differences) < 2:
        return True, evidence
    error = float(differences.std()) / math.sqrt(len(differences))
    is_something = evidence.high is None or evidence.high > NEGLIGIBLE_POINTS
    return is_something and float(differences.mean()) > _FEW_STANDARD_ERRORS * error, evidence


def _misplaced(features: Tensor) -> Tensor:
    """The features of other positions of the same text."""
    return features.roll(max(1, features.shape[1] // 2), dims=1)
