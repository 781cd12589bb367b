"""Answers of a target in batches: a row whose answer is finished makes room for the next prompt.

Rows are padded at the left and share the columns of one cache. Once a quarter of the rows is finished, they leave the
cache, the next prompts run as one forward of their own, and both caches become one.
"""

import hashlib
import logging
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, LogitsProcessorList

from .._compat import CACHE_KEY, TargetModel
from ..decoding.sampling import law, sample
from ..errors import TrainingDataError
from .row_cache import can_refill, merge_caches, new_cache, takes_argument

logger = logging.getLogger(__name__)

# Share of the rows that must be finished before the cache is rebuilt: each rebuilding copies the cache once.
REFILL_SHARE = 0.25
# Tokens of one prefill forward, padding counted: small groups of similar length pad less, and take less memory.
PREFILL_TOKENS = 2048


@dataclass(frozen=True)
class AnswerRequest:
    """One answer to be made.

    Attributes:
        id: Of the prompt.
        prompt_ids: Token ids, at least one.
        temperature: 0 is greedy.
        seed: Of this answer's uniforms, in [0, 2**63).
    """

    id: str
    prompt_ids: tuple[int, ...]
    temperature: float
    seed: int


@dataclass(frozen=True)
class Answer:
    """A request and the tokens that the target wrote, the stop token included where it was reached."""

    request: AnswerRequest
    response_ids: tuple[int, ...]


@dataclass
class _Row:
    request: AnswerRequest
    response_ids: list[int] = field(default_factory=list)
    is_finished: bool = False


def answer_seed(seed: int, prompt_id: str, temperature: float) -> int:
    """Seed in [0, 2**63) of one answer, the same in every run, batch and process."""
    digest = hashlib.sha256(f"{seed}\0{temperature!r}\0{prompt_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def stop_token_ids(target: TargetModel) -> frozenset[int]:
    """The stop tokens that `target.generate` would use; empty if there are none."""
    found = target.generation_config.eos_token_id
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)


def answer_requests(
    target: TargetModel, requests: Sequence[AnswerRequest], *, max_new_tokens: int, batch_size: int
) -> Iterator[Answer]:
    """Answer every request, in the order in which the answers are finished.

    Only the target's law at the request's temperature counts: penalties, top-k and the like in the target's
    generation config are left out. In float32 an answer does not depend on batch size, order or neighbours; in
    bfloat16 rounding may change it, not its law.

    Args:
        target: A decoder-only language model in eval mode.
        requests: Best in an order in which neighbours have prompts of similar length.
        max_new_tokens: Most tokens of an answer, >= 1.
        batch_size: Rows of a forward, >= 1.

    Raises:
        TrainingDataError: the device is out of memory.
    """
    try:
        if can_refill(target):
            yield from _RefillingBatch(target, requests, max_new_tokens, batch_size).answers()
        else:
            logger.info(
                "%s has a cache whose rows cannot be exchanged: batches run until their longest answer is finished",
                type(target).__name__,
            )
            for start in range(0, len(requests), batch_size):
                yield from _generate_batch(target, requests[start : start + batch_size], max_new_tokens)
    except torch.OutOfMemoryError as error:
        raise TrainingDataError(
            f"{target.device} is out of memory with batch_size {batch_size}; pass a smaller batch_size or "
            "max_prompt_tokens, finished answers are kept"
        ) from error


class _RefillingBatch:
    """Rows in one cache. `mask` int64 `[rows, columns]` covers what is cached; each row's last token is not yet."""

    def __init__(
        self, target: TargetModel, requests: Sequence[AnswerRequest], max_new_tokens: int, batch_size: int
    ) -> None:
        self._target = target
        self._pending = deque(requests)
        self._max_new_tokens = max_new_tokens
        self._batch_size = batch_size
        self._stop_ids = stop_token_ids(target)
        self._device = target.device
        # Leaving out all columns but the last spares the head's work on every prompt token.
        self._last_only = {"logits_to_keep": 1} if takes_argument(target, "logits_to_keep") else {}
        self._rows: list[_Row] = []
        self._cache = new_cache(target)
        self._mask = torch.empty(0, 0, dtype=torch.int64, device=self._device)
        self._draws = _Draws([], max_new_tokens, self._device)

    def answers(self) -> Iterator[Answer]:
        while self._pending or not all(row.is_finished for row in self._rows):
            finished = self._rebuild() if self._should_rebuild() else self._step()
            for row in finished:
                yield Answer(row.request, tuple(row.response_ids))

    def _should_rebuild(self) -> bool:
        num_live = sum(not row.is_finished for row in self._rows)
        if self._pending:
            return self._batch_size - num_live >= math.ceil(self._batch_size * REFILL_SHARE)
        return len(self._rows) - num_live >= math.ceil(len(self._rows) * REFILL_SHARE)

    @torch.inference_mode()
    def _step(self) -> list[_Row]:
        """One token for every row; what finished rows get is thrown away."""
        tokens = torch.tensor([row.response_ids[-1:] for row in self._rows], device=self._device)
        # A finished row would run behind the last position that the target knows.
        lengths = [len(row.request.prompt_ids) + len(row.response_ids) for row in self._rows]
        positions = torch.tensor(lengths, device=self._device)[:, None] - 1
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        logits = self._forward(tokens, self._mask, positions, self._cache)
        return self._commit(self._rows, logits, self._draws)

    @torch.inference_mode()
    def _rebuild(self) -> list[_Row]:
        """Drop finished rows, prefill the next requests and give each its first token."""
        kept = [i for i, row in enumerate(self._rows) if not row.is_finished]
        parts = [(self._cache, self._mask, torch.tensor(kept, dtype=torch.int64, device=self._device))] if kept else []
        rows = [self._rows[i] for i in kept]
        finished: list[_Row] = []
        num_free = self._batch_size - len(rows)
        for group in self._next_groups(num_free):
            cache, mask, logits = self._prefill(group)
            finished += self._commit(group, logits, _Draws(group, self._max_new_tokens, self._device))
            parts.append((cache, mask, torch.arange(len(group), device=self._device)))
            rows += group
        self._rows = rows
        self._cache, self._mask = merge_caches(self._target, parts)
        self._draws = _Draws(rows, self._max_new_tokens, self._device)
        return finished

    def _next_groups(self, num_free: int) -> Iterator[list[_Row]]:
        group: list[_Row] = []
        width = 0
        for _ in range(min(num_free, len(self._pending))):
            width = max(width, len(self._pending[0].prompt_ids))
            if group and width * (len(group) + 1) > PREFILL_TOKENS:
                yield group
                group, width = [], len(self._pending[0].prompt_ids)
            group.append(_Row(self._pending.popleft()))
        if group:
            yield group

    def _prefill(self, group: list[_Row]) -> tuple[DynamicCache, Tensor, Tensor]:
        ids, mask = pad_left([row.request.prompt_ids for row in group], self._device)
        cache = new_cache(self._target)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = self._forward(ids, mask, positions, cache)
        assert cache.get_seq_length() == ids.shape[1], "one column of the cache per token"
        return cache, mask, logits

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        """Logits `[rows, vocab]` behind the last column."""
        outputs = self._target(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            return_dict=True,
            **{CACHE_KEY: cache},
            **self._last_only,
        )
        logits: Tensor = outputs.logits[:, -1]
        return logits

    def _commit(self, rows: list[_Row], logits: Tensor, draws: "_Draws") -> list[_Row]:
        """Append one token to each unfinished row; those that finish by it."""
        steps = torch.tensor([len(row.response_ids) for row in rows], device=self._device)
        finished = []
        tokens: list[int] = draws.choose(logits, steps.clamp(max=self._max_new_tokens - 1)).tolist()
        for row, token in zip(rows, tokens, strict=True):
            if row.is_finished:
                continue
            row.response_ids.append(token)
            row.is_finished = token in self._stop_ids or len(row.response_ids) == self._max_new_tokens
            if row.is_finished:
                finished.append(row)
        return finished


class _Draws:
    """Chooses tokens: the best one for greedy rows, for others one drawn with the row's own uniforms."""

    def __init__(self, rows: Sequence[_Row], max_new_tokens: int, device: torch.device) -> None:
        # A device without float64 gets float32 uniforms, as `sample` sums in.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        sampled = [i for i, row in enumerate(rows) if row.request.temperature > 0]
        self._sampled = torch.tensor(sampled, dtype=torch.int64, device=device)
        self._temperatures = torch.tensor([rows[i].request.temperature for i in sampled], device=device)[:, None]
        # Drawn on the CPU: the same numbers on every device.
        uniforms = [
            torch.rand(
                max_new_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(rows[i].request.seed)
            )
            for i in sampled
        ]
        self._uniforms = torch.stack(uniforms).to(device, dtype) if uniforms else None

    def choose(self, logits: Tensor, steps: Tensor) -> Tensor:
        """int64 `[rows]`, from `logits` `[rows, vocab]` and the rows' numbers of tokens so far, int64 `[rows]`."""
        tokens = logits.argmax(dim=-1)
        if self._uniforms is not None:
            probs = law(logits[self._sampled].float() / self._temperatures)
            uniforms = self._uniforms.gather(1, steps[self._sampled][:, None]).squeeze(1)
            tokens[self._sampled] = sample(probs, uniforms)
        return tokens


class _ForceChoice(LogitsProcessor):
    """Makes greedy generate() take the tokens that `draws` chooses."""

    def __init__(self, draws: _Draws, prompt_width: int) -> None:
        self._draws = draws
        self._prompt_width = prompt_width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        steps = torch.full((len(scores),), input_ids.shape[1] - self._prompt_width, device=scores.device)
        tokens = self._draws.choose(scores, steps)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)


def _generate_batch(target: TargetModel, requests: Sequence[AnswerRequest], max_new_tokens: int) -> Iterator[Answer]:
    """Answers by generate(), for targets whose cache only transformers itself knows how to fill."""
    rows = [_Row(request) for request in requests]
    ids, mask = pad_left([request.prompt_ids for request in requests], target.device)
    stop_ids = stop_token_ids(target)
    choice = _ForceChoice(_Draws(rows, max_new_tokens, target.device), ids.shape[1])
    own_config = target.generation_config
    # generate() fills what a call leaves open from the target's own config, penalties among it.
    target.generation_config = GenerationConfig(eos_token_id=sorted(stop_ids) or None, pad_token_id=0)
    try:
        generated = target.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            logits_processor=LogitsProcessorList([choice]),
        )
    finally:
        target.generation_config = own_config
    for request, tokens in zip(requests, generated[:, ids.shape[1] :].tolist(), strict=True):
        length = next((i + 1 for i, token in enumerate(tokens) if token in stop_ids), len(tokens))
        yield Answer(request, tuple(tokens[:length]))


def pad_left(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids, 0 where padded, and mask, both int64 `[rows, longest]`."""
    width = max(map(len, sequences))
    ids = [[0] * (width - len(sequence)) + list(sequence) for sequence in sequences]
    mask = [[0] * (width - len(sequence)) + [1] * len(sequence) for sequence in sequences]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
