"""The one loop: every DSpark generation runs here, round by round."""

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, StaticCache
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from .._compat import CACHE_KEY, TargetModel
from ..modeling_dspark import DSparkDraftModel
from .accept import accept
from .autoregressive import generator_class
from .batch import BatchRun
from .candidate_generator import DSparkCandidateGenerator
from .observers import RoundTeller
from .outputs import OutputRecorder
from .prompt_inputs import refuse_chunk_size, refuse_inputs, start_from_empty_cache
from .refusals import refuse_processors
from .report import GenerateDSparkOutput, SpeculationReport, StageClock, publish
from .row_layout import layout_asked_for
from .row_processors import processors_for_rows
from .rows import join_rows, refuse_criteria, refuse_rows, split_rows, why_one_by_one
from .sampling import no_law_error
from .stopping import StopChecker
from .target_refusals import refuse_length
from .types import Acceptance, Proposal, Verification
from .verify import TargetRunner, last_logits

logger = logging.getLogger(__name__)


def dspark_decoding(
    model: TargetModel,
    input_ids: Tensor,
    *,
    drafter: DSparkDraftModel,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None,
    model_kwargs: dict[str, Any],
) -> GenerateDSparkOutput | Tensor:
    """Generate with a drafter; called by the route with what generate() prepared.

    Args:
        model: The target.
        input_ids: int64 `[rows, length]`, the whole prompt, `num_return_sequences` times.

    Returns:
        As plain generate(): int64 `[rows, length + new]`, or a [`GenerateDSparkOutput`].

    Raises:
        UnsupportedGenerationError: before any forward, for inputs that this loop cannot serve.
    """
    refuse_processors(logits_processor)
    refuse_inputs(input_ids, model_kwargs)
    refuse_chunk_size(generation_config)
    layout_asked_for(generation_config)
    refuse_length(model, generation_config.max_length)
    call = _Call(
        model,
        drafter,
        stopping_criteria,
        generation_config,
        functools.cache(_warn_of_unusable_numbers),  # once for all rows of this call
    )
    num_rows = input_ids.shape[0]
    if num_rows == 1 and not _is_static(call, input_ids, model_kwargs):
        run = _run_row(call, logits_processor, streamer, input_ids, model_kwargs)
        publish(run.report)
        return run.result()
    if num_rows > 1:
        refuse_rows(num_rows, streamer, model_kwargs)
        reason = why_one_by_one(model, input_ids, generation_config, model_kwargs, drafter)
        if reason is not None:
            return _one_by_one(call, logits_processor, input_ids, model_kwargs, reason)
    return BatchRun(*call, logits_processor, model_kwargs, input_ids, streamer).run(input_ids)


class _Call(NamedTuple):
    """What all rows of a call have in common."""

    model: TargetModel
    drafter: DSparkDraftModel
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    warn_of_unusable: Callable[[], None]


def _is_static(call: _Call, input_ids: Tensor, model_kwargs: dict[str, Any]) -> bool:
    """Whether one row runs on the caches of a batch, in place of a static cache that nobody will see again."""
    cache = model_kwargs[CACHE_KEY]
    return (
        isinstance(cache, StaticCache)
        and not getattr(cache, "_is_user_defined", False)
        and not call.generation_config.return_dict_in_generate
        and why_one_by_one(call.model, input_ids, call.generation_config, model_kwargs, call.drafter) is None
    )


def _one_by_one(
    call: _Call, logits_processor: LogitsProcessorList, input_ids: Tensor, model_kwargs: dict[str, Any], reason: str
) -> GenerateDSparkOutput | Tensor:
    """Rows that cannot share forwards, one after the other."""
    refuse_criteria(call.stopping_criteria)
    _warn_of_rows(type(call.model).__name__, reason)
    num_rows, num_sequences = input_ids.shape[0], call.generation_config.num_return_sequences
    runs = [
        _run_row(call, processors_for_rows(logits_processor, [row], num_rows, num_sequences), None, ids, kwargs, row)
        for row, (ids, kwargs) in enumerate(split_rows(input_ids, model_kwargs))
    ]
    for run in runs:
        publish(run.report)
    pad = getattr(call.generation_config, "_pad_token_tensor", None)
    return join_rows([run.result() for run in runs], 0 if pad is None else int(pad))


@functools.cache
def _warn_of_rows(target: str, reason: str) -> None:
    """Once per target and reason."""
    logger.warning(
        "the rows of this batch run one after the other: %s (%s); plain generation may be faster",
        reason,
        target,
    )


def _run_row(
    call: _Call,
    logits_processor: LogitsProcessorList,
    streamer: BaseStreamer | None,
    input_ids: Tensor,
    model_kwargs: dict[str, Any],
    row: int = 0,
) -> "_Run":
    """Generate after one prompt `[1, length]`, the `row`-th of its call."""
    config = call.generation_config
    generator = generator_class(call.drafter)(
        call.drafter, call.model, config, logits_processor, model_kwargs, ids_device=input_ids.device
    )
    runner = TargetRunner(call.model, model_kwargs, config, generator.model_kwargs_overrides)
    run = _Run(generator, runner, call.stopping_criteria, config, streamer, call.warn_of_unusable, row)
    runner.refuse_prompt(input_ids)
    # After all refusals that need no forward: it may empty the caller's cache.
    start_from_empty_cache(call.model, input_ids, model_kwargs, config)
    with runner.guarding_cache():
        is_done = run.prompt(input_ids)
        with call.model._optimize_model_for_decode():
            while not is_done:
                is_done = run.round()
    if streamer is not None:
        streamer.end()
    return run


class _Run:
    """One generation in progress."""

    def __init__(
        self,
        generator: DSparkCandidateGenerator,
        runner: TargetRunner,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None,
        warn_of_unusable: Callable[[], None],
        row: int,
    ) -> None:
        self.ids: Tensor
        self.report = SpeculationReport(num_calls=1)
        self.recorder = OutputRecorder(generation_config, runner.cache)
        self._generator = generator
        self._runner = runner
        self._stops = StopChecker(stopping_criteria)
        self._streamer = streamer
        self._warn_of_unusable = warn_of_unusable
        self._do_sample = bool(generation_config.do_sample)
        self._clock = StageClock(self.report)
        self._teller = RoundTeller(generator.drafter, is_sampled=self._do_sample, first_row=row)

    def prompt(self, input_ids: Tensor) -> bool:
        """Run the prompt and commit the target's first token, a round without a draft; True when that was the last."""
        self.ids = input_ids
        outputs = self._runner.prefill(input_ids, self._observe_prompt)
        self._clock.mark("prefill_s")
        drafts = input_ids.new_empty(1, 0)
        verification = self._verification(outputs, drafts)
        acceptance = self._accept(drafts, None, verification)
        num_accepted = self._num_accepted(acceptance)
        num_kept, is_done = self._commit(drafts[:, :num_accepted], acceptance, verification)
        self.recorder.add_prompt(outputs, verification)
        self._runner.commit(outputs, num_kept, 0)
        self._clock.mark("other_s")
        return is_done

    def round(self) -> bool:
        """One round; True when generation is over."""
        # 1-3. draft, calibrate, schedule
        proposal = self._generator.propose(self.ids)
        drafts = self._scheduled(proposal)
        self._clock.mark("draft_s")
        # 4. verify
        context = self.ids.shape[1] - 1
        outputs = self._runner.verify(self.ids, drafts)
        verify_s = self._clock.mark("verify_s")
        self._generator.scheduler.observe_step(1, 1 + drafts.shape[1], context, verify_s)
        # 5. accept
        verification = self._verification(outputs, drafts)
        acceptance = self._accept(drafts, proposal, verification)
        num_accepted = self._num_accepted(acceptance)
        lengths = torch.full_like(acceptance.num_accepted, drafts.shape[1])
        self._generator.scheduler.observe(acceptance.num_accepted, lengths, [num_accepted], [drafts.shape[1]])
        self._clock.mark("accept_s")
        # commit what no stop cuts off, and bring target and drafter up to it
        num_kept, is_done = self._commit(drafts[:, :num_accepted], acceptance, verification)
        self.recorder.add_round(outputs, verification, num_kept)
        width = drafts.shape[1]
        self._runner.commit(outputs, num_kept, width + 1 - num_kept)
        if not is_done:
            self._generator.observe(outputs, num_kept)
        self._count(proposal, width, num_accepted)
        self._clock.mark("other_s")
        return is_done

    def result(self) -> GenerateDSparkOutput | Tensor:
        """What generate() returns."""
        return self.recorder.result(self.ids, self.report)

    # -- parts of a round ---------------------------------------------------------------------------------------

    def _observe_prompt(self, outputs: Any) -> None:
        self.report.num_target_forwards += 1
        self._generator.observe(outputs)

    def _scheduled(self, proposal: Proposal | None) -> Tensor:
        """The drafts that go to verification, int64 `[1, width]`."""
        if proposal is None:
            return self.ids.new_empty(1, 0)
        return proposal.block.tokens[:, : int(proposal.lengths[0])]

    def _verification(self, outputs: Any, drafts: Tensor) -> Verification:
        raw = last_logits(outputs, drafts.shape[1] + 1, self.ids.device)
        return Verification(raw, self._generator.processor.over_block(self.ids, drafts, raw))

    def _accept(self, drafts: Tensor, proposal: Proposal | None, verification: Verification) -> Acceptance:
        rows, width = drafts.shape
        lengths = torch.full((rows,), width, dtype=torch.long, device=drafts.device)
        draft_probs = None if proposal is None else proposal.block.draft_probs
        return accept(drafts, draft_probs, verification.scores, lengths, do_sample=self._do_sample)

    def _num_accepted(self, acceptance: Acceptance) -> int:
        """The round's only read of acceptance from the device.

        Raises:
            RuntimeError: the target's law is none.
        """
        num_accepted, is_valid = torch.stack([acceptance.num_accepted[0], acceptance.is_valid[0].long()]).tolist()
        if not is_valid:
            raise no_law_error(self.ids.shape[1] + num_accepted)
        return int(num_accepted)

    def _commit(self, accepted: Tensor, acceptance: Acceptance, verification: Verification) -> tuple[int, bool]:
        """Append accepted drafts and the target's token up to the first stop; stream them one by one."""
        new = torch.cat([accepted, acceptance.next_token[:, None]], dim=1)
        ids = torch.cat([self.ids, new], dim=1)
        num_kept, is_done = self._stops.first_stop(
            ids, new.shape[1], lambda n: self.recorder.scores_with(verification, n)
        )
        self.ids = ids[:, : self.ids.shape[1] + num_kept]
        self.report.num_new_tokens += num_kept
        if self._streamer is not None:
            for token in new[0, :num_kept].cpu():
                self._streamer.put(token[None])
        return num_kept, is_done

    def _count(self, proposal: Proposal | None, width: int, num_accepted: int) -> None:
        num_drafted = 0 if proposal is None else proposal.block.tokens.shape[1]
        self.report.count_round(num_drafted, width, num_accepted)
        self._teller.tell(proposal, [0], [0], [width], [num_accepted])
        if proposal is not None and int(proposal.block.num_usable[0]) < num_drafted:
            self._warn_of_unusable()
            self.report.num_unusable_rounds += 1


def _warn_of_unusable_numbers() -> None:
    logger.warning(
        "the drafter produced NaN or infinite numbers, or logits processors left it nothing to draft; drafts from "
        "there on are not verified (output is unaffected, speed is lost). In float16 numbers overflow: load the "
        "drafter in bfloat16 or float32. In those dtypes its weights, or the target's head, hold such numbers",
    )
