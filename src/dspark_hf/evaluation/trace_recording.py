"""Recording acceptance traces with the models: at every token of a text, or round by round while decoding.

At a token of a text that the target wrote, a whole draft is drawn as decoding would draw it, given how the text goes
on. Greedily that is the drafter's best tokens, accepted while they are the text's. Sampled, it is the law of
speculative sampling read backwards (compare `replay.py`): where the text's next token is `y`, the draft was `y` and was
accepted with probability `min(1, p_draft(y) / p_target(y))`; else it was rejected, and had been drawn from the positive
part of `p_draft - p_target`, whatever `y` is. Behind a rejection slots are drafted from the drafter's own law on the
draft. So rounds at the places that a schedule visits have the law that they have in decoding under that schedule, as
long as it does not look ahead.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..decoding.calibrate import SlotCalibration
from ..model.draft_vocab import draft_index
from ..modeling_dspark import DSparkDraftModel, treat_logits
from ..training.anchors import build_blocks, possible_anchors
from ..training.features import TargetFeatures, TargetReader
from ..training.packed_forward import packed_hidden
from .proposals import RecordingSettings, read_rounds, record_to_file
from .replay import TABLE_NUMBERS, TargetText
from .settings import ComparisonError
from .traces import PromptTrace, prompt_trace

_CHECKED_TOKENS = 64


@torch.no_grad()
def record_positions(
    target: PreTrainedModel,
    drafter: DSparkDraftModel,
    texts: Sequence[TargetText],
    calibration: SlotCalibration | None,
    *,
    seed: int,
    show_progress: bool = False,
) -> tuple[PromptTrace, ...]:
    """A whole draft at every token of each text, layout `positions`.

    Args:
        texts: Answers of the target of at least two tokens.
        seed: Of the draws in texts that were sampled; those of a text depend on its id besides, and on nothing else.

    Raises:
        ComparisonError: the drafter has no confidence head, or a number of it is not finite.
        IncompatibleTargetError: the target's law cannot be read off its hidden states.
    """
    _require_confidence(drafter)
    reader = TargetReader(target, drafter.config)
    reader.check_law(texts[0].input_ids[None, :_CHECKED_TOKENS].to(target.device))
    recorder = _Recorder(drafter, reader, target)
    traces = []
    for text in tqdm(texts, unit="text", desc="traces", disable=None if show_progress else True):
        logits, num_accepted = recorder.record(text, _generator(seed, text.id))
        traces.append(
            prompt_trace(
                text.id,
                logits.numpy(),
                num_accepted.numpy(),
                layout="positions",
                calibration=calibration,
                prompt_length=text.prompt_length,
            )
        )
    return tuple(traces)


class _Recorder:
    """Drafts at every token of a text that has a next one."""

    def __init__(self, drafter: DSparkDraftModel, reader: TargetReader, target: PreTrainedModel) -> None:
        self._drafter = drafter
        self._reader = reader
        self._head = drafter.borrow_head(target.get_output_embeddings(), drafter.config.vocab_size)

    def record(self, text: TargetText, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Confidence logits float32 `[places, slots]` and accepted drafts int64 `[places]`, on the CPU."""
        config = self._drafter.config
        ids = text.input_ids[None].to(self._reader.device)
        mask = torch.zeros_like(ids, dtype=torch.bool)
        mask[:, text.prompt_length :] = True
        features = self._reader.read(ids, torch.zeros_like(mask))
        parts = []
        size = max(1, TABLE_NUMBERS // (config.block_size * config.vocab_size))
        for anchors in possible_anchors(mask[0]).split(size):
            parts.append(self._drafted(text.temperature, ids, mask, anchors, features, generator))
        logits, num_accepted = (torch.cat(part) for part in zip(*parts, strict=True))
        return logits, num_accepted

    def _drafted(
        self,
        temperature: float,
        ids: Tensor,
        mask: Tensor,
        anchors: Tensor,
        features: TargetFeatures,
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor]:
        drafter = self._drafter
        blocks = build_blocks(ids, mask, anchors[None], drafter.config.block_size)
        hidden, anchor_hidden = packed_hidden(drafter, drafter, self._reader.embedding, features.features, blocks)
        base_logits = drafter.base_logits(hidden.to(features.final_hidden.dtype), self._head)
        head = drafter.markov_head
        state: Tensor | None = None
        previous, stands, embeddings = ids[0, anchors], blocks.is_supervised[0, :, 0], []
        kept = []
        for k in range(drafter.config.block_size):
            logits = base_logits[:, k]
            if head is not None:
                embedding = head.embed(previous)
                embeddings.append(embedding)
                if k == 0:
                    state = head.started(embedding, anchor_hidden)
                bias, state = head.step(embedding, hidden[:, k], state)
                logits = logits + bias
            stands = stands & blocks.is_supervised[0, :, k]
            following = blocks.next_tokens[0, :, k]
            if temperature == 0:
                previous = self._token_ids(logits.argmax(dim=-1))
                stands = stands & (previous == following)
            else:
                at = features.final_hidden[0, blocks.law_positions[0, :, k]]
                previous, stands = self._sampled(logits / temperature, at, temperature, following, stands, generator)
            kept.append(stands)
        assert drafter.confidence_head is not None
        confidence = drafter.confidence_head(hidden, torch.stack(embeddings, dim=1) if embeddings else None)
        return confidence.float().cpu(), torch.stack(kept, dim=1).sum(dim=1).cpu()

    def _sampled(
        self,
        draft_scores: Tensor,
        target_hidden: Tensor,
        temperature: float,
        following: Tensor,
        stands: Tensor,
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor]:
        """Draft tokens int64 `[blocks]` of one slot, and whether all up to it are accepted, given the text."""
        config = self._drafter.config
        draft_probs = draft_scores.softmax(dim=-1)
        target_logits = treat_logits(self._reader.head(target_hidden), config)
        target_probs = (target_logits / temperature).softmax(dim=-1)
        at_text = target_probs.gather(-1, following[:, None]).squeeze(-1)
        place = following
        if (token_ids := self._drafter.draft_token_ids) is not None:
            target_probs = target_probs[:, token_ids]
            place = draft_index(token_ids, config.vocab_size)[following]
        drafted = draft_probs.gather(-1, place.clamp(min=0)[:, None]).squeeze(-1) * (place >= 0)
        is_kept = stands & (self._uniforms(stands, generator) * at_text.double() < drafted.double())
        residual = (draft_probs - target_probs).clamp(min=0)
        # Equal laws leave nothing, and then a rejection is rounding.
        is_residual = stands & (residual.sum(dim=-1) > 0)
        law = torch.where(is_residual[:, None], residual, draft_probs).double().cumsum(dim=-1)
        point = self._uniforms(stands, generator)[:, None] * law[:, -1:]
        drawn = torch.searchsorted(law, point, right=True).squeeze(-1).clamp(max=law.shape[-1] - 1)
        return torch.where(is_kept, following, self._token_ids(drawn)), is_kept

    def _token_ids(self, places: Tensor) -> Tensor:
        ids = self._drafter.draft_token_ids
        return places if ids is None else ids[places]

    def _uniforms(self, like: Tensor, generator: torch.Generator) -> Tensor:
        return torch.rand(like.shape, generator=generator, dtype=torch.float64).to(like.device)


def record_rounds(
    target: PreTrainedModel,
    drafter: DSparkDraftModel,
    prompts: Mapping[str, Sequence[int]],
    path: Path,
    settings: RecordingSettings,
    calibration: SlotCalibration | None,
    *,
    num_rounds: int,
    show_progress: bool = False,
) -> tuple[PromptTrace, ...]:
    """The rounds of generate() under policy `full`, layout `rounds`; those that its length limit cut are left out.

    Args:
        prompts: Token ids by id.
        path: Where decoding keeps its rounds, so that an interrupted call goes on.
        num_rounds: Rounds wanted; decoding stops there, or with the last prompt.

    Raises:
        ComparisonError: the drafter has no confidence head.
        CalibrationError: the file holds other rounds, or cannot be read or written.
    """
    _require_confidence(drafter)
    record_to_file(target, drafter, prompts, path, settings, num_proposals=num_rounds, show_progress=show_progress)
    traces = []
    for one in read_rounds(path, prompts):
        whole = [place for place, n in enumerate(one.num_verified) if n == drafter.config.block_size]
        if whole:
            traces.append(
                prompt_trace(
                    one.id,
                    [one.logits[place] for place in whole],
                    [one.num_accepted[place] for place in whole],
                    layout="rounds",
                    calibration=calibration,
                    prompt_length=len(prompts[one.id]),
                )
            )
    return tuple(traces)


def _require_confidence(drafter: DSparkDraftModel) -> None:
    if drafter.confidence_head is None:
        raise ComparisonError(
            "traces hold confidences, and this drafter has no confidence head; record with one that has"
        )


def _generator(seed: int, name: str) -> torch.Generator:
    drawn = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(drawn[:7], "big"))
