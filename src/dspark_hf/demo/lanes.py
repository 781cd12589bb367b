"""One generate() call of a race: it tells of every target forward, and between them lets other lanes run."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ..decoding.observers import EndedRounds, observe_rounds
from ..decoding.report import GenerateDSparkOutput, SpeculationReport
from ..evaluation.compare import drafter_arguments, plain_config
from ..evaluation.settings import ComparisonSettings
from ..modeling_dspark import DSparkDraftModel
from .events import Event, LaneDone, Piece, RowRound, StepDone
from .pieces import Detokenizer, conditional, pieces_of_round
from .turns import Turns

# Stages of a DSpark round and the fields of a report that hold their seconds; the rest of a lane's time is "other".
STAGES = {"prompt": "prefill_s", "draft": "draft_s", "verify": "verify_s", "accept": "accept_s"}


@dataclass(frozen=True)
class Job:
    """What all lanes of a race generate.

    Attributes:
        ids, mask: int64 `[rows, length]`, padded on the left.
    """

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    ids: Tensor
    mask: Tensor
    settings: ComparisonSettings

    @property
    def is_batch(self) -> bool:
        """Whether rows share forwards; their text is then not shown as it grows."""
        return self.ids.shape[0] > 1

    def row_ids(self, row: int) -> Tensor:
        """A row's prompt without padding, int64 `[1, length]`."""
        return self.ids[row : row + 1, self.mask[row].bool()]


@dataclass(frozen=True)
class Lane:
    """A lane before it runs.

    Attributes:
        drafter: None for plain generation.
        policy: In force; None for plain generation.
    """

    number: int
    drafter: DSparkDraftModel | None
    policy: str | None


def run_lane(job: Job, lane: Lane, turns: Turns, put: Callable[[Event], None]) -> LaneDone:
    """Generate, telling each event to `put`; called in a thread of the lane's own, within its turn.

    Raises:
        RaceStopped: the race is over.
    """
    config = lane_config(job, lane)
    teller = _Teller(job, lane, config, turns, put)
    arguments: dict[str, Any] = {} if lane.drafter is None else {"assistant_model": lane.drafter}
    if lane.drafter is None or not job.is_batch:
        arguments["streamer"] = teller
    hearing = contextlib.nullcontext() if lane.drafter is None else observe_rounds(teller.hear, with_plain=True)
    torch.manual_seed(job.settings.seed)
    with hearing:
        target: Any = job.target  # PreTrainedModel does not declare generate()
        output = target.generate(job.ids, attention_mask=job.mask, generation_config=config, **arguments)
    device_s = turns.end(lane.number)
    report = output.speculation if isinstance(output, GenerateDSparkOutput) else None
    num_forwards = teller.num_steps if report is None else report.num_target_forwards
    new = tuple(_until_end(row, teller.end_ids) for row in output.sequences[:, job.ids.shape[1] :].tolist())
    if report is None:
        return LaneDone(lane.number, new, device_s, num_forwards)
    return LaneDone(
        lane.number,
        new,
        device_s,
        num_forwards,
        _stage_s(report, device_s),
        tuple(report.reached_per_slot),
        tuple(report.accepted_per_slot),
    )


def lane_config(job: Job, lane: Lane) -> GenerationConfig:
    """The lane's generation config.

    Raises:
        ComparisonError: the drafter cannot honour a setting.
    """
    config = plain_config(job.target, job.settings)
    if lane.drafter is not None:
        assert lane.policy is not None, "a drafter's lane has a policy"
        config = copy.deepcopy(config)
        config.update(**drafter_arguments(lane.drafter.config, job.settings, lane.policy))
    return config


class _Teller(BaseStreamer):
    """Hears of tokens as a streamer and of rounds as an observer, and tells both as [`StepDone`] events."""

    def __init__(
        self, job: Job, lane: Lane, config: GenerationConfig, turns: Turns, put: Callable[[Event], None]
    ) -> None:
        ends = config.eos_token_id
        self.end_ids = frozenset([ends] if isinstance(ends, int) else ends or ())
        self.num_steps = 0
        self._lane = lane
        self._turns = turns
        self._put = put
        self._is_sampled = not job.settings.is_greedy
        self._device = job.target.device
        self._text = None if job.is_batch else Detokenizer(job.tokenizer)
        self._live = list(range(job.ids.shape[0]))
        self._has_prompt = False
        self._new: list[int] = []  # of the round in progress

    def put(self, value: Tensor) -> None:
        """The prompt, then new tokens: one of each row, or one by one of a DSpark round."""
        if not self._has_prompt:
            self._has_prompt = True
        elif self.num_steps and self._lane.drafter is not None:
            self._new.extend(value.tolist())
        else:
            self._tell_tokens(value.tolist())

    def end(self) -> None:
        """Nothing is left to tell."""

    def hear(self, ended: EndedRounds) -> None:
        """A DSpark round is over."""
        if not self.num_steps:  # a batch is not streamed, so its prompts' forward goes unheard
            self._tell([RowRound(row, 1) for row in self._live], (), is_prompt=True)
        counts = list(zip(ended.rows, ended.num_verified, ended.num_accepted, strict=True))
        if self._text is None:
            rows = [RowRound(row, accepted + 1, verified, accepted) for row, verified, accepted in counts]
            self._tell(rows, ())
            return
        (_, num_verified, num_accepted), new = counts[0], self._new
        self._new = []
        drafts = [] if ended.draft_tokens is None else ended.draft_tokens[0].tolist()
        known = None if ended.survival is None else conditional(ended.survival[0].tolist())
        confidences = known or [None] * len(drafts)
        pieces = pieces_of_round(self._text, new, drafts, confidences, num_verified, num_accepted)
        self._tell([RowRound(0, len(new), num_verified, num_accepted)], pieces)

    def _tell_tokens(self, tokens: list[int]) -> None:
        """One token of each row, the target's own."""
        pieces = () if self._text is None else (Piece(self._text.add(tokens[0]), "own"),)
        rows = [RowRound(row, 1) for row in self._live]
        self._live = [row for row in self._live if tokens[row] not in self.end_ids]
        self._tell(rows, pieces, is_prompt=self.num_steps == 0)

    def _tell(self, rows: list[RowRound], pieces: tuple[Piece, ...], *, is_prompt: bool = False) -> None:
        self.num_steps += 1
        device_s = self._turns.mark(self._lane.number)
        self._put(StepDone(self._lane.number, tuple(rows), pieces, device_s, is_prompt))
        state = list(self._random_state())
        if self._turns.pass_on(self._lane.number):
            self._restore(state)

    def _random_state(self) -> Iterator[Tensor]:
        """Lanes share torch's generators; each goes on with its own state."""
        if self._is_sampled:
            yield torch.get_rng_state()
            if self._device.type == "cuda":
                yield torch.cuda.get_rng_state(self._device)

    def _restore(self, state: list[Tensor]) -> None:
        if state:
            torch.set_rng_state(state[0])
        if len(state) > 1:
            torch.cuda.set_rng_state(state[1], self._device)


def _until_end(tokens: list[int], end_ids: frozenset[int]) -> tuple[int, ...]:
    """Up to the first end token, which counts; rows that end early are padded behind it."""
    length = next((i + 1 for i, token in enumerate(tokens) if token in end_ids), len(tokens))
    return tuple(tokens[:length])


def _stage_s(report: SpeculationReport, device_s: float) -> dict[str, float]:
    """Seconds by stage; "other" is the rest, since the report's own clock runs on there while the lane waits."""
    seconds = {stage: float(getattr(report, name)) for stage, name in STAGES.items()}
    return seconds | {"other": max(0.0, device_s - sum(seconds.values()))}
