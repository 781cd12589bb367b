"""Proposals on disk: the target decodes prompts with the drafter, and every round is kept as it ends.

One JSONL file per mode and part. Its first line says what the rounds were made with, each other one holds the rounds
of one prompt, so that an interrupted run goes on where it stopped. A prompt is known by its id and token ids: prompts
may change between runs, and rounds of others stay in the file without counting.
"""

import copy
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel

from ..decoding.calibrate import law_settings
from ..decoding.observers import EndedRounds
from ..errors import CalibrationError
from ..fitting.proposals import Proposals, record_proposals
from ..modeling_dspark import DSparkDraftModel
from ..training.answering import pad_left
from ..training.feature_cache import target_fingerprint

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


@dataclass(frozen=True)
class PromptRounds:
    """The rounds of one prompt, as one line of the file holds them."""

    id: str
    digest: str  # of the prompt's token ids
    logits: list[list[float]]
    num_verified: list[int]
    num_accepted: list[int]

    @property
    def key(self) -> tuple[str, str]:
        return self.id, self.digest


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
    identity = {
        "format_version": FORMAT_VERSION,
        "target": target_fingerprint(target),
        "drafter": target_fingerprint(drafter),
        "settings": {k: v for k, v in asdict(settings).items() if k != "batch_size"},
        "law": law_settings(settings.generation_config(target)),
    }
    digests = {name: _digest(ids) for name, ids in prompts.items()}
    done = {key: one for key, one in _open(path, identity).items() if digests.get(one.id) == one.digest}
    num_done = sum(len(rounds.logits) for rounds in done.values())
    with tqdm(
        total=num_proposals, initial=num_done, unit="round", desc=path.stem, disable=None if show_progress else True
    ) as bar:
        for names in _batches(prompts, settings):
            batch = {name: prompts[name] for name in names if (name, digests[name]) not in done}
            if num_done >= num_proposals or not batch:
                continue
            rounds = _decode(target, drafter, batch, settings)
            _append(path, rounds)
            done |= {one.key: one for one in rounds}
            num_new = sum(len(one.logits) for one in rounds)
            num_done += num_new
            bar.update(num_new)
    return _proposals(done.values(), path)


def read_proposals(path: Path) -> Proposals:
    """The rounds of a file that `record_to_file` wrote.

    Raises:
        CalibrationError: it cannot be read, or holds no round.
    """
    return _proposals(_read(path)[1].values(), path)


def read_rounds(path: Path, prompts: Mapping[str, Sequence[int]]) -> list[PromptRounds]:
    """What a file that `record_to_file` wrote holds of these prompts, token ids by id, in their order.

    Raises:
        CalibrationError: it cannot be read.
    """
    done = _read(path)[1]
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
    with torch.random.fork_rng(devices=devices), record_proposals() as record:
        torch.manual_seed(draw_seed)
        target.generate(
            ids,
            attention_mask=mask,
            generation_config=settings.generation_config(target),
            assistant_model=drafter,
        )
    rounds = [PromptRounds(name, _digest(batch[name]), [], [], []) for name in names]
    for ended in record.rounds:
        _add(rounds, ended, drafter.config.block_size)
    return rounds


def _digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()[:16]


def _add(rounds: list[PromptRounds], ended: EndedRounds, num_slots: int) -> None:
    assert ended.confidence_logits is not None, "a drafter without confidence head is refused before decoding"
    logits = ended.confidence_logits.tolist()
    for row, values, num_verified, num_accepted in zip(
        ended.rows, logits, ended.num_verified, ended.num_accepted, strict=True
    ):
        rounds[row].logits.append([round(v, 5) for v in values[:num_verified]] + [0.0] * (num_slots - num_verified))
        rounds[row].num_verified.append(num_verified)
        rounds[row].num_accepted.append(num_accepted)


def _proposals(done: Iterable[PromptRounds], path: Path) -> Proposals:
    rounds = [one for one in done if one.logits]
    if not rounds:
        raise CalibrationError(f"{path} holds no round; decode more prompts, or allow more than one new token")
    return Proposals.of(
        [values for one in rounds for values in one.logits],
        [n for one in rounds for n in one.num_verified],
        [n for one in rounds for n in one.num_accepted],
        [number for number, one in enumerate(rounds) for _ in one.logits],
    )


def _open(path: Path, identity: dict[str, Any]) -> dict[tuple[str, str], PromptRounds]:
    """What an earlier run left, by prompt; a new file gets its first line."""
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
            partial.write_text(json.dumps(identity) + "\n", encoding="utf-8")
            os.replace(partial, path)
            return {}
    except OSError as error:
        raise CalibrationError(f"{path} cannot be written ({error}); name another output") from error
    found, done = _read(path)
    differing = sorted(key for key in identity if found.get(key) != identity[key])

    def _told(key: str) -> str:
        then, now = found.get(key), identity[key]
        if not (isinstance(then, dict) and isinstance(now, dict)):
            return key
        parts = [
            f"{part} {then.get(part)}, now {now.get(part)}" for part in {*then, *now} if then.get(part) != now.get(part)
        ]
        return f"{key} ({'; '.join(sorted(parts))})"

    if differing:
        raise CalibrationError(
            f"{path} holds proposals made with other: {', '.join(map(_told, differing))}; name another output, or "
            "remove the file"
        )
    return done


def _read(path: Path) -> tuple[dict[str, Any], dict[tuple[str, str], PromptRounds]]:
    """First line, and rounds by prompt; a last line that an interruption cut short is taken off the file."""
    try:
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        header, *lines = whole.decode("utf-8").splitlines()
        done = {one.key: one for one in (PromptRounds(**json.loads(line)) for line in lines)}
        identity = json.loads(header)
        if len(whole) < len(content):
            os.truncate(path, len(whole))
    except (OSError, ValueError, TypeError) as error:
        raise CalibrationError(f"{path} cannot be read as proposals ({error}); remove it, or name another") from error
    return identity, done


def _append(path: Path, rounds: Sequence[PromptRounds]) -> None:
    lines = "".join(json.dumps(asdict(one)) + "\n" for one in rounds)
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(lines)
    except OSError as error:
        raise CalibrationError(f"{path} cannot be written ({error}); make room and run again") from error
