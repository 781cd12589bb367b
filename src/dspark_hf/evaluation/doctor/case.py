"""The pair under examination, its prompts, and what decoding them gave; each is made once, when first asked for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...decoding.report import SpeculationReport, record_speculation
from ...errors import DSparkError
from ...fitting.proposals import Proposals, record_proposals
from ...fitting.throughput import ThroughputProfile
from ...modeling_dspark import DSparkDraftModel
from ...prompts import Prompt, encode_prompt
from ...training.answering import pad_left, stop_token_ids
from ..proposals import RecordingSettings
from ..replay import TargetText
from ..settings import ComparisonError
from .findings import NotExamined

# Prompts decoded together.
BATCH_SIZE = 8


@dataclass(frozen=True)
class PromptRounds:
    """The rounds of one prompt: raw confidence logits `[slots]` (None without a head), drafts verified and accepted."""

    logits: tuple[list[float] | None, ...]
    num_verified: tuple[int, ...]
    num_accepted: tuple[int, ...]


@dataclass(frozen=True)
class Decoded:
    """What decoding prompts with the drafter gave, every draft verified.

    Attributes:
        texts: Answers of two tokens or more, by temperature as decoded.
        rounds: By prompt, in the order of the prompts.
        report: Of all calls.
    """

    texts: tuple[TargetText, ...]
    rounds: tuple[PromptRounds, ...]
    report: SpeculationReport

    @cached_property
    def proposals(self) -> Proposals:
        """All rounds, for judging confidences.

        Raises:
            NotExamined: no round has confidences.
        """
        flat = [
            (logits, verified, accepted, prompt)
            for prompt, one in enumerate(self.rounds)
            for logits, verified, accepted in zip(one.logits, one.num_verified, one.num_accepted, strict=True)
            if logits is not None
        ]
        if not flat:
            raise NotExamined("no round was drafted with confidences")
        logits, verified, accepted, prompt = zip(*flat, strict=True)
        return Proposals.of(list(logits), verified, accepted, prompt)


@dataclass
class Case:
    """What all checks share.

    Attributes:
        target, drafter, tokenizer: Loaded, on one device, in eval mode; the drafter may be of another target.
        prompts: At least one.
        source: The drafter's folder; None where there is none at hand.
        max_new_tokens: Of each prompt.
        seed: Of sampling.
        target_name, drafter_name: To be shown.
        with_speed: Whether seconds are measured.
        causes: Faults found so far that explain low acceptance.
        measured: What checks measured, for the report.
        misfit: Why the pair cannot run at all.
        probing: What `probes.probing_of` found.
        profile: Of this pair on this machine, where there is one that can be used.
    """

    target: PreTrainedModel
    drafter: DSparkDraftModel
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt]
    source: Path | None = None
    max_new_tokens: int = 64
    seed: int = 0
    target_name: str = ""
    drafter_name: str = ""
    with_speed: bool = True
    causes: list[str] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    misfit: str | None = None
    probing: Any = None
    profile: ThroughputProfile | None = None

    @cached_property
    def encoded(self) -> dict[str, Tensor]:
        """Ids `[length]` of each prompt that has tokens, as users of this target would send it.

        Raises:
            ComparisonError: none has.
        """
        found = {prompt.id: encode_prompt(self.tokenizer, prompt)[0] for prompt in self.prompts}
        found = {name: ids for name, ids in found.items() if len(ids)}
        if not found:
            raise ComparisonError("none of the prompts has tokens after encoding; give prompts with text")
        return found

    @cached_property
    def greedy(self) -> Decoded:
        """The prompts, decoded greedily.

        Raises:
            NotExamined: the pair does not run.
        """
        return self.decode(self.encoded, GREEDY)

    def decode(self, prompts: Mapping[str, Tensor], law: "Law") -> Decoded:
        """Decode prompts, ids `[length]` by id, with every draft verified.

        Raises:
            NotExamined: the pair does not run.
        """
        if self.misfit:
            raise NotExamined(self.misfit)
        settings = RecordingSettings(law.temperature, law.top_p, law.top_k, self.max_new_tokens, BATCH_SIZE, self.seed)
        config = settings.generation_config(self.target)
        names = list(prompts)
        texts: list[TargetText] = []
        rounds: list[PromptRounds] = []
        devices = [self.target.device] if self.target.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices), record_speculation() as report:
                torch.manual_seed(self.seed)
                for start in range(0, len(names), BATCH_SIZE):
                    batch = {name: prompts[name] for name in names[start : start + BATCH_SIZE]}
                    new_texts, new_rounds = self._decode_batch(batch, config, law.temperature)
                    texts += new_texts
                    rounds += new_rounds
        except DSparkError as error:
            self.misfit = str(error)
            raise NotExamined(self.misfit) from error
        return Decoded(tuple(texts), tuple(rounds), report)

    def _decode_batch(
        self, batch: Mapping[str, Tensor], config: GenerationConfig, temperature: float
    ) -> tuple[list[TargetText], list[PromptRounds]]:
        target: Any = self.target  # PreTrainedModel does not declare generate()
        ids, mask = pad_left([one.tolist() for one in batch.values()], self.target.device)
        with record_proposals() as record:
            whole = target.generate(ids, attention_mask=mask, generation_config=config, assistant_model=self.drafter)
        stops = stop_token_ids(target)
        texts = []
        for (name, prompt), row in zip(batch.items(), whole.tolist(), strict=True):
            answer = row[ids.shape[1] :]
            ends = [i for i, token in enumerate(answer) if token in stops]
            answer = answer[: ends[0] + 1] if ends else answer
            if len(answer) >= 2:
                text = torch.cat([prompt.cpu(), torch.tensor(answer, dtype=torch.long)])
                texts.append(TargetText(name, text, len(prompt), temperature))
        by_row: list[list[tuple[list[float] | None, int, int]]] = [[] for _ in batch]
        for ended in record.rounds:
            logits = [None] * len(ended.rows) if ended.confidence_logits is None else ended.confidence_logits.tolist()
            for row, *numbers in zip(ended.rows, logits, ended.num_verified, ended.num_accepted, strict=True):
                by_row[row].append((self._padded(numbers[0]), numbers[1], numbers[2]))
        columns = [tuple(zip(*one, strict=True)) or ((), (), ()) for one in by_row]
        return texts, [PromptRounds(*one) for one in columns]

    def _padded(self, logits: list[float] | None) -> list[float] | None:
        return None if logits is None else logits + [0.0] * (self.drafter.config.block_size - len(logits))


@dataclass(frozen=True)
class Law:
    """How to decode; temperature 0 is greedy."""

    temperature: float
    top_p: float | None = None
    top_k: int | None = None


GREEDY = Law(0.0)
