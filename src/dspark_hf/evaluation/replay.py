"""A drafter's accepted length on texts of the target, without generating them again.

Given that the token after a verified prefix comes out as `y`, speculative sampling had accepted a draft of it with
probability `min(1, p_draft(y) / p_target(y))`: drafting `y` and accepting it has probability `min(p_draft, p_target)`,
and `y` comes out with probability `p_target(y)`. Greedily it had accepted exactly when the drafter's best token is
`y`. So on a text that the target wrote by itself every round can be replayed from one target forward and one drafter
forward over all anchors, with the expected number of rounds in place of one random outcome. The law of the rounds is
that of generate() with policy `full`; tests compare the two.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..model.draft_vocab import draft_index
from ..modeling_dspark import DSparkDraftModel, treat_logits
from ..training.anchors import AnchorBlocks, build_blocks, possible_anchors
from ..training.features import TargetFeatures, TargetReader
from ..training.packed_forward import packed_hidden
from .cuts import CutPlan, CutSums, TextDrafts, rewalked, slots_inside, walk
from .rejected_drafts import BlockLaws, Drafted, Rejected, follow_rejected


@dataclass(frozen=True)
class TargetText:
    """What the target wrote after a prompt.

    Attributes:
        id: Of the prompt.
        input_ids: int64 `[length]`, prompt and answer.
        prompt_length: Tokens of the prompt.
        temperature: 0: greedy; the drafter is replayed at the same temperature.
    """

    id: str
    input_ids: Tensor
    prompt_length: int
    temperature: float


@dataclass(frozen=True)
class ReplayedText:
    """How one text would have been drafted.

    Attributes:
        id: Of the prompt.
        num_tokens: Tokens that rounds committed: the answer without its first token, which the prompt's forward gives.
        num_rounds: Expected number of rounds.
        reached: float64 `[slots]`, expected number of rounds in which a slot's predecessors were all accepted.
        accepted: float64 `[slots]`, expected number of rounds in which the slot was accepted too.
        confidence: float32 `[blocks, slots]`, `c_k` on the text's own prefix; None without a confidence head.
        acceptance: float64 `[blocks, slots]`, probability that the slot was accepted, given the text.
        label: float64 `[blocks, slots]`, `c*_k`: the same before the token is known.
        weight: float64 `[blocks, slots]`, expected number of rounds that come to this block and reach this slot.
        cuts: What shorter drafts would have come to; None where nobody asked.
    """

    id: str
    num_tokens: int
    num_rounds: float
    reached: Tensor
    accepted: Tensor
    confidence: Tensor | None
    acceptance: Tensor
    label: Tensor
    weight: Tensor
    cuts: CutSums | None = None

    @property
    def tau(self) -> float:
        """Accepted length, bonus counted."""
        return self.num_tokens / self.num_rounds


# Numbers of one table over the draft vocabulary that exist at once; a few such tables do.
TABLE_NUMBERS = 2**24
_CHECKED_TOKENS = 64


class Replay:
    """Replays drafters on texts of a target.

    Args:
        target: The target that wrote the texts.
        texts: Answers of at least two tokens.
        alter_features: Changes the features `[1, length, width]` of each text before drafters see them; for probes.
        is_soft: Of greedy texts, whether acceptance is the probability that the drafter's law at temperature 1 gives
            the text's token, instead of 0 or 1: less noise where drafters are compared.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        texts: Sequence[TargetText],
        *,
        alter_features: Callable[[Tensor], Tensor] | None = None,
        is_soft: bool = False,
    ) -> None:
        self._target = target
        self._texts = texts
        self._alter_features = alter_features
        self._is_soft = is_soft

    def run(self, drafter: DSparkDraftModel) -> list[ReplayedText]:
        """Each text's rounds with one drafter; errors as for [`run_all`]."""
        return self.run_all([drafter])[0]

    @torch.no_grad()
    def run_all(
        self,
        drafters: Sequence[DSparkDraftModel],
        *,
        plans: Sequence[CutPlan] | None = None,
        show_progress: bool = False,
    ) -> list[list[ReplayedText]]:
        """Each text's rounds with each drafter; drafters that read the same layers share the target's forward.

        Args:
            drafters: Made for the target.
            plans: Cuts to be tried, one plan per drafter; None: none.
            show_progress: Whether to show a progress bar.

        Raises:
            IncompatibleTargetError: the target's law cannot be read off its hidden states.
        """
        readers = {tuple(d.config.target_layer_ids): TargetReader(self._target, d.config) for d in drafters}
        for reader in readers.values() if self._texts else ():
            reader.check_law(self._texts[0].input_ids[None, :_CHECKED_TOKENS].to(self._target.device))
        target_head = self._target.get_output_embeddings()
        heads = [drafter.borrow_head(target_head, drafter.config.vocab_size) for drafter in drafters]
        results: list[list[ReplayedText]] = [[] for _ in drafters]
        for text in tqdm(self._texts, unit="text", desc="replay", disable=not show_progress):
            ids = text.input_ids[None].to(self._target.device)
            read = {layers: reader.read(ids, torch.zeros_like(ids).bool()) for layers, reader in readers.items()}
            if self._alter_features is not None:
                read = {k: replace(v, features=self._alter_features(v.features)) for k, v in read.items()}
            for i, (drafter, head) in enumerate(zip(drafters, heads, strict=True)):
                layers = tuple(drafter.config.target_layer_ids)
                plan = None if plans is None else plans[i]
                results[i].append(
                    _replay(drafter, readers[layers], head, text, read[layers], is_soft=self._is_soft, plan=plan)
                )
        return results


def _replay(
    drafter: DSparkDraftModel,
    reader: TargetReader,
    head: Callable[[Tensor], Tensor],
    text: TargetText,
    features: TargetFeatures,
    *,
    is_soft: bool = False,
    plan: CutPlan | None = None,
) -> ReplayedText:
    ids = text.input_ids[None].to(features.features.device)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, text.prompt_length :] = True
    size = drafter.config.block_size
    final_hidden = features.final_hidden[0]
    # Of this text's rejected drafts; the same in every run, whatever was replayed before.
    generator = torch.Generator(ids.device).manual_seed(zlib.crc32(text.id.encode()))
    parts = []
    for anchors in possible_anchors(mask[0]).split(max(1, TABLE_NUMBERS // (size * drafter.config.vocab_size))):
        blocks = build_blocks(ids, mask, anchors[None], size)
        drafted = _draft(drafter, reader, head, features, blocks)
        if is_soft and text.temperature == 0:
            acceptance = label = _at_tokens(drafter, drafted.logits.softmax(dim=-1), blocks).double()
            laws = BlockLaws(drafted.logits, None, None)
        else:
            acceptance, label, laws = _acceptance(
                drafter, reader, drafted.logits, final_hidden, blocks, text.temperature
            )
        confidence = _confidence(drafter, drafted.hidden, drafted.embeddings)
        rejected = None
        if plan is not None and plan.thresholds:
            rejected = follow_rejected(drafter, drafted, laws, blocks, acceptance, generator)
        parts.append(_Part(acceptance, label, confidence, rejected))
    return _rounds(text, parts, plan)


class _Part(NamedTuple):
    """Some blocks of a text, in order."""

    acceptance: Tensor
    label: Tensor
    confidence_logits: Tensor | None
    rejected: Rejected | None


def _draft(
    drafter: DSparkDraftModel,
    reader: TargetReader,
    head: Callable[[Tensor], Tensor],
    features: TargetFeatures,
    blocks: AnchorBlocks,
) -> Drafted:
    """All blocks drafted on the text's own tokens."""
    hidden, anchor_hidden = packed_hidden(drafter, drafter, reader.embedding, features.features, blocks)
    base_logits = drafter.base_logits(hidden.to(features.final_hidden.dtype), head)
    if drafter.markov_head is None:
        return Drafted(hidden, anchor_hidden, base_logits, base_logits, None)
    embeddings = drafter.markov_head.embed(blocks.previous_tokens[0])
    codes = drafter.markov_head.codes(embeddings, hidden, anchor_hidden)
    return Drafted(hidden, anchor_hidden, base_logits, base_logits + drafter.markov_head.markov_w2(codes), embeddings)


def _confidence(drafter: DSparkDraftModel, hidden: Tensor, embeddings: Tensor | None) -> Tensor | None:
    """Raw confidence logits float32 `[blocks, slots]`; None without a confidence head."""
    if drafter.confidence_head is None:
        return None
    logits: Tensor = drafter.confidence_head(hidden, embeddings)
    return logits.float()


def _acceptance(
    drafter: DSparkDraftModel,
    reader: TargetReader,
    draft_logits: Tensor,
    target_hidden: Tensor,
    blocks: AnchorBlocks,
    temperature: float,
) -> tuple[Tensor, Tensor, BlockLaws]:
    """Acceptance given the text, and before its token is known, both float64 `[blocks, slots]`, and the laws.

    Slots behind the text's end have acceptance 0.
    """
    ids = drafter.draft_token_ids
    tokens = blocks.next_tokens[0]
    is_inside = blocks.is_supervised[0]
    if temperature == 0:
        best = draft_logits.argmax(dim=-1)
        best = best if ids is None else ids[best]
        is_hit = ((best == tokens) & is_inside).double()
        return is_hit, is_hit, BlockLaws(draft_logits, None, None)
    draft_probs = (draft_logits / temperature).softmax(dim=-1)
    target_logits = treat_logits(reader.head(target_hidden[blocks.law_positions[0]]), drafter.config)
    target_probs = (target_logits / temperature).softmax(dim=-1)
    at_token = target_probs.gather(-1, tokens[..., None]).squeeze(-1)
    if ids is not None:
        target_probs = target_probs[..., ids]
    drafted = _at_tokens(drafter, draft_probs, blocks)
    acceptance = (drafted.double() / at_token.double().clamp(min=1e-300)).clamp(max=1.0)
    label = torch.minimum(draft_probs, target_probs).sum(dim=-1).double() * is_inside
    return acceptance, label, BlockLaws(draft_logits, draft_probs, target_probs, temperature)


def _at_tokens(drafter: DSparkDraftModel, draft_probs: Tensor, blocks: AnchorBlocks) -> Tensor:
    """Probability of each slot's token under the draft law, float32 `[blocks, slots]`; 0 behind the text's end."""
    tokens = blocks.next_tokens[0]
    if (ids := drafter.draft_token_ids) is not None:
        tokens = draft_index(ids, drafter.config.vocab_size)[tokens]
    drafted = draft_probs.gather(-1, tokens.clamp(min=0)[..., None]).squeeze(-1)
    return drafted * (tokens >= 0) * blocks.is_supervised[0]


def _rounds(text: TargetText, parts: list[_Part], plan: CutPlan | None) -> ReplayedText:
    """Expected rounds: blocks are visited forwards, each with the probability that a round starts there."""
    acceptance = torch.cat([part.acceptance.cpu() for part in parts])
    label = torch.cat([part.label.cpu() for part in parts])
    found = [part.confidence_logits.cpu() for part in parts if part.confidence_logits is not None]
    logits = torch.cat(found) if found else None
    num_blocks, size = acceptance.shape
    survival = acceptance.cumprod(dim=1)
    visits = walk(survival)[:, None]
    reached = torch.cat([torch.ones(num_blocks, 1), survival[:, :-1]], dim=1) * visits
    # A slot behind the end of the text is drafted by no round that could still commit it.
    weight = reached * slots_inside(num_blocks, size)
    return ReplayedText(
        id=text.id,
        num_tokens=num_blocks,
        num_rounds=float(visits.sum()),
        reached=weight.sum(dim=0),
        accepted=(weight * acceptance).sum(dim=0),
        confidence=None if logits is None else logits.sigmoid(),
        acceptance=acceptance,
        label=label,
        weight=weight,
        cuts=None if plan is None else rewalked(plan, _text_drafts(parts, acceptance, logits)),
    )


def _text_drafts(parts: list[_Part], acceptance: Tensor, logits: Tensor | None) -> TextDrafts:
    rejected = [part.rejected for part in parts if part.rejected is not None]
    if not rejected:
        return TextDrafts(acceptance, logits, None, None)
    behind, first = (torch.cat([one[i].cpu() for one in rejected]) for i in (0, 1))
    return TextDrafts(acceptance, logits, behind, first)
