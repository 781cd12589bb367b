"""Proposals on disk: the target decodes prompts with the drafter, and every round is kept in a file as it ends."""

import copy
import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..decoding.calibrate import law_settings
from ..decoding.observers import EndedRounds, observe_rounds
from ..errors import CalibrationError
from ..fitting.proposals import Proposals
from ..modeling_dspark import DSparkDraftModel
from ..prompts import Prompt, encode_prompt
from ..training.answering import pad_left
from ..training.feature_cache import target_fingerprint
from .rounds_file import PromptRounds as PromptRounds
from .rounds_file import append_rounds, open_rounds_file, read_rounds_file

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
BATCHES_PER_WINDOW = 8


@dataclass(frozen=True)
class RecordingSettings:
    """How prompts are decoded.

    Attributes:
        temperature: 0 is greedy.
        top_p, top_k: Cuts of both laws; None cuts nothing.
        max_new_tokens: Most new tokens of a prompt.
        batch_size: Prompts decoded together.
        seed: Of the order of the prompts and of sampling.
    """

    temperature: float
    top_p: float | None
    top_k: int | None
    max_new_tokens: int
    batch_size: int
    seed: int

    def generation_config(self, target: PreTrainedModel) -> GenerationConfig:
        """The target's own config (end tokens, penalties), with length and sampling as set, and policy `full`."""
        is_greedy = self.temperature == 0
        config: GenerationConfig = copy.deepcopy(target.generation_config)
        # Neutral values, not None: None would be filled from the target's own config. Of top_k that is 0, but greedy
        # search warns unless it is what transformers itself fills in.
        config.update(
            do_sample=not is_greedy,
            temperature=self.temperature or 1.0,
            top_p=self.top_p or 1.0,
            top_k=self.top_k or (50 if is_greedy else 0),
            max_new_tokens=self.max_new_tokens,
            verification_policy="full",
        )
        if config.pad_token_id is None:  # else generate() chooses one, and says so at each call
            eos = config.eos_token_id
            config.pad_token_id = eos[0] if isinstance(eos, list) else eos
        return config


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], max_prompt_tokens: int
) -> dict[str, tuple[int, ...]]:
    """Token ids by id, of prompts with text that are short enough.

    Raises:
        CalibrationError: none is left of some.
    """
    encoded = {p.id: tuple(encode_prompt(tokenizer, p)[0].tolist()) for p in prompts if p.messages}
    kept = {name: ids for name, ids in encoded.items() if 0 < len(ids) <= max_prompt_tokens}
    if prompts and not kept:
        raise CalibrationError(
            f"none of {len(prompts)} prompts has text and at most {max_prompt_tokens} tokens; raise max_prompt_tokens, "
            "or name other prompts"
        )
    if len(kept) < len(prompts):
        logger.warning(
            "left out: %d prompts without text, or longer than %d tokens", len(prompts) - len(kept), max_prompt_tokens
        )
    return kept


def record_to_file(
    target: PreTrainedModel,
    drafter: DSparkDraftModel,
    prompts: Mapping[str, Sequence[int]],
    path: Path,
    settings: RecordingSettings,
    *,
    num_proposals: int,
    show_progress: bool = False,
) -> Proposals:
    """Decode prompts, in an order drawn by the seed, until the file holds `num_proposals` of their rounds, or all.

    Args:
        prompts: Token ids by id.
        path: JSONL; one that an earlier call left is continued.
        num_proposals: Rounds wanted.

    Returns:
        The file's rounds of these prompts. KeyboardInterrupt leaves those of the batches finished before.

    Raises:
        CalibrationError: the file was made with other settings or models, cannot be read or written, or no round was
            recorded.
    """
    rounds = record_rounds(
        target, drafter, prompts, path, settings, num_proposals=num_proposals, show_progress=show_progress
    )
    return proposals_of_rounds(rounds, str(path))


def record_rounds(
    target: PreTrainedModel,
    drafter: DSparkDraftModel,
    prompts: Mapping[str, Sequence[int]],
    path: Path,
    settings: RecordingSettings,
    *,
    num_proposals: int | None = None,
    show_progress: bool = False,
) -> list[PromptRounds]:
    """`record_to_file` prompt by prompt, also of drafters without confidences; all prompts without `num_proposals`."""
    identity = {
        "format_version": FORMAT_VERSION,
        "target": target_fingerprint(target),
        "drafter": target_fingerprint(drafter),
        "settings": {k: v for k, v in asdict(settings).items() if k != "batch_size"},
        "law": law_settings(settings.generation_config(target)),
    }
    digests = {name: _digest(ids) for name, ids in prompts.items()}
    done = {key: one for key, one in open_rounds_file(path, identity).items() if digests.get(one.id) == one.digest}
    num_done = sum(len(rounds.logits) for rounds in done.values())
    is_all = num_proposals is None
    with tqdm(
        total=len(prompts) if is_all else num_proposals,
        initial=len(done) if is_all else num_done,
        unit="prompt" if is_all else "round",
        desc=path.stem,
        disable=None if show_progress else True,
    ) as bar:
        for names in _batches(prompts, settings):
            batch = {name: prompts[name] for name in names if (name, digests[name]) not in done}
            if (num_proposals is not None and num_done >= num_proposals) or not batch:
                continue
            rounds = _decode(target, drafter, batch, settings)
            append_rounds(path, rounds)
            done |= {one.key: one for one in rounds}
            num_new = sum(len(one.logits) for one in rounds)
            num_done += num_new
            bar.update(len(rounds) if is_all else num_new)
    return list(done.values())


def read_proposals(path: Path) -> Proposals:
    """The rounds of a file that `record_to_file` wrote.

    Raises:
        CalibrationError: it cannot be read, or holds no round.
    """
    return proposals_of_rounds(read_rounds_file(path)[1].values(), str(path))


def read_rounds(path: Path, prompts: Mapping[str, Sequence[int]]) -> list[PromptRounds]:
    """What a file that `record_to_file` wrote holds of these prompts, token ids by id, in their order.

    Raises:
        CalibrationError: it cannot be read.
    """
    done = read_rounds_file(path)[1]
    keys = [(name, _digest(ids)) for name, ids in prompts.items()]
    return [done[key] for key in keys if key in done]


def _batches(prompts: Mapping[str, Sequence[int]], settings: RecordingSettings) -> Iterator[list[str]]:
    """Batches of prompts of similar length, which pad little, in an order drawn by the seed.

    Windows of the drawn order are cut into batches by length, and the batches of a window come in a drawn order too:
    wherever it stops, what was decoded is close to a sample of all lengths.
    """

    def draw(name: str) -> bytes:
        return hashlib.sha256(f"{settings.seed}\0{name}".encode()).digest()

    drawn = sorted(prompts, key=draw)
    size = BATCHES_PER_WINDOW * settings.batch_size
    for window in (drawn[start : start + size] for start in range(0, len(drawn), size)):
        window.sort(key=lambda name: len(prompts[name]))
        batches = [window[start : start + settings.batch_size] for start in range(0, len(window), settings.batch_size)]
        yield from sorted(batches, key=lambda batch: draw(batch[0]))


def _decode(
    target: Any, drafter: DSparkDraftModel, batch: Mapping[str, Sequence[int]], settings: RecordingSettings
) -> list[PromptRounds]:
    ids, mask = pad_left(list(batch.values()), target.device)
    names = list(batch)
    draw_seed = int.from_bytes(hashlib.sha256(f"{settings.seed}\0{names[0]}".encode()).digest()[:7], "big")
    devices = [target.device] if target.device.type == "cuda" else []
    ended: list[EndedRounds] = []
    config = settings.generation_config(target)
    config.return_dict_in_generate = True  # for the tokens of each row
    with torch.random.fork_rng(devices=devices), observe_rounds(ended.append, with_plain=True):
        torch.manual_seed(draw_seed)
        output = target.generate(
            ids,
            attention_mask=mask,
            generation_config=config,
            assistant_model=drafter,
        )
    plain = [one for one in ended if one.draft_tokens is None]
    num_plain = [sum(row in one.rows for one in plain) for row in range(len(names))]
    num_new = [report.num_new_tokens for report in output.speculation_by_row]
    rounds = [
        PromptRounds(name, _digest(batch[name]), [], [], [], num_new[row], num_plain[row])
        for row, name in enumerate(names)
    ]
    for one in ended:
        if one.draft_tokens is not None:
            _add(rounds, one)
    return rounds


def _digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()[:16]


def _add(rounds: list[PromptRounds], ended: EndedRounds) -> None:
    logits = [[]] * len(ended.rows) if ended.confidence_logits is None else ended.confidence_logits.tolist()
    for row, values, num_verified, num_accepted in zip(
        ended.rows, logits, ended.num_verified, ended.num_accepted, strict=True
    ):
        known = [round(v, 5) for v in values[:num_verified]]
        rounds[row].logits.append(known + [0.0] * (ended.drafter.config.block_size - num_verified) if values else [])
        rounds[row].num_verified.append(num_verified)
        rounds[row].num_accepted.append(num_accepted)


def proposals_of_rounds(rounds: Iterable[PromptRounds], source: str) -> Proposals:
    """The rounds of all prompts together.

    Args:
        rounds: Of a drafter with a confidence head.
        source: Of the rounds, for messages.

    Raises:
        CalibrationError: there is no round.
    """
    found = [one for one in rounds if one.logits]
    if not found:
        raise CalibrationError(f"{source} holds no round; decode more prompts, or allow more than one new token")
    return Proposals.of(
        [values for one in found for values in one.logits],
        [n for one in found for n in one.num_verified],
        [n for one in found for n in one.num_accepted],
        [number for number, one in enumerate(found) for _ in one.logits],
    )
