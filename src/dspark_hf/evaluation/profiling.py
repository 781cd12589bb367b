"""Throughput profiles of loaded models: the modules that decoding runs, timed on this machine."""

import copy
import time
from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from .._compat import CACHE_KEY
from ..decoding.prefixes import Prefixes
from ..decoding.report import record_speculation
from ..decoding.row_drafter import RowDrafter
from ..decoding.row_target import RowTarget, why_not_together
from ..decoding.target_refusals import refuse_target
from ..errors import ThroughputProfileError
from ..fitting.fingerprint import Fingerprint
from ..fitting.measuring import ProfilePlan, measure, num_measurements
from ..fitting.throughput import ThroughputProfile
from ..model.row_attention import attending_by_rows
from ..modeling_dspark import DSparkDraftModel
from .provenance import collect_provenance

# Steps of one plain generate() call whose median is one measurement.
PLAIN_STEPS = 2
SHORT_PROMPT_TOKENS = 8


def profile_pair(
    target: PreTrainedModel,
    drafter: DSparkDraftModel,
    plan: ProfilePlan | None = None,
    *,
    target_name: str,
    drafter_name: str | None,
    show_progress: bool = False,
) -> ThroughputProfile:
    """Measure what rounds of a pair cost on this machine. Nothing is written; the random state is left as it was.

    Args:
        target, drafter: Loaded, on their devices, in eval mode.
        plan: What to measure; the default takes about two minutes of one CPU core for a target of 135M parameters.
        target_name, drafter_name: To be shown, and for the command that renews the profile. No drafter's
            name stands for the one that `dspark profile` takes by default.
        show_progress: Whether to show a progress bar on stderr, if that is a terminal.

    Raises:
        ThroughputProfileError: rows of this target cannot share forwards, or the plan asks for more than it can hold.
        IncompatibleTargetError: the drafter was made for another target.
    """
    plan = plan or ProfilePlan()
    refuse_target(target, drafter)
    _refuse(target, drafter, plan)
    grid = plan.grid(drafter.config.block_size)
    devices = [target.device] if target.device.type == "cuda" else []
    bar = tqdm(
        total=num_measurements(plan, grid),
        desc="profiling",
        unit="measurement",
        disable=None if show_progress else True,
    )
    with torch.random.fork_rng(devices=devices), torch.no_grad(), bar:
        torch.manual_seed(plan.seed)
        try:
            measured = measure(PairBench(target, drafter, max(grid.contexts)), plan, grid, bar.update)
        except torch.OutOfMemoryError as error:
            raise ThroughputProfileError(
                f"the device has too little memory for {max(grid.num_rows)} rows at context {max(grid.contexts)}; "
                "leave out the largest batch sizes or contexts"
            ) from error
    provenance = collect_provenance(target.device, target.dtype, seed=plan.seed, n=plan.num_repeats)
    return ThroughputProfile(
        fingerprint=Fingerprint.of(target, drafter),
        target=target_name,
        drafter=drafter_name,
        grid=grid,
        num_repeats=plan.num_repeats,
        provenance=asdict(provenance),
        **measured._asdict(),
    )


def _refuse(target: PreTrainedModel, drafter: DSparkDraftModel, plan: ProfilePlan) -> None:
    if reason := why_not_together(target):
        raise ThroughputProfileError(
            f"rows of {type(target).__name__} do not share forwards with a drafter: {reason}. There is no batch to "
            "profile; generate without a policy that needs a profile"
        )
    if not drafter.drafts_rows_together:
        raise ThroughputProfileError(
            f"{drafter.config.model_type!r} drafters draft for one row at a time, so no policy weighs their drafts "
            "against step times; profile a DSpark drafter"
        )
    most = getattr(target.config, "max_position_embeddings", None)
    longest = max(plan.contexts) + _num_new(drafter)
    if most is not None and longest > most:
        raise ThroughputProfileError(
            f"context {max(plan.contexts)} and a block make {longest} tokens, and the target has positions for {most}; "
            "choose a smaller context"
        )


def _num_new(drafter: DSparkDraftModel) -> int:
    """Most tokens that a measurement puts behind its context."""
    return max(drafter.config.block_size + 1, PLAIN_STEPS + 2)


class PairBench:
    """Times the modules of `decoding/` that rows of a batch run through; only here is known how they are called.

    Tokens are random. Keys and values before a step are zeros, as no step depends on what they hold for its time.
    One row is measured as a batch of one, though generate() runs a single row on a cache of transformers' own.

    Args:
        max_context: Largest context that will be asked for.
    """

    def __init__(self, target: PreTrainedModel, drafter: DSparkDraftModel, max_context: int) -> None:
        self._target: Any = target  # PreTrainedModel does not declare generate()
        self._drafter = drafter
        self._capacity = max_context + _num_new(drafter)
        self._num_slots = drafter.config.block_size
        self._caches: dict[int, DynamicCache] = {}  # one row of each context, for plain generation
        self._num_rows = 0
        self._rows: RowTarget
        self._drafts: RowDrafter
        self._features: Any  # outputs of a step as wide as any

    # -- what is timed ------------------------------------------------------------------------------------------

    def open(self, num_rows: int) -> None:
        """Make empty caches for `num_rows` rows, and run everything once at its largest."""
        self._num_rows = num_rows
        config = GenerationConfig(
            max_length=self._capacity, do_sample=False, num_return_sequences=1, verification_policy="full"
        )
        self._drafts = RowDrafter(
            self._drafter, self._target, config, LogitsProcessorList(), {}, self._capacity, num_rows
        )
        self._rows = RowTarget(self._target, num_rows, self._capacity, self._drafts.model_kwargs_overrides)
        context = self._capacity - _num_new(self._drafter)
        self._features = self._step(self._num_slots + 1, context)
        self.draft_s(context)

    def step_s(self, tokens_per_row: int, context: int) -> float:
        """Seconds of `RowTarget.forward`."""
        return self._seconds(lambda: self._step(tokens_per_row, context))

    def draft_s(self, context: int, num_slots: int | None = None) -> float:
        """Seconds of `RowDrafter.propose_rows`, which first takes in the features of a whole block."""
        num_slots = num_slots or self._num_slots
        positions = self._positions(self._num_slots + 1, max(0, context - self._num_slots - 1))
        self._drafts.observe_rows(self._features, positions, torch.ones_like(positions, dtype=torch.bool))
        ids = self._tokens(context + 1)
        ends = torch.full((self._num_rows,), context + 1, device=ids.device)
        prefixes = Prefixes(ids, ends, (context + 1,) * self._num_rows, tuple(range(self._num_rows)))
        room = torch.full_like(ends, self._num_slots)
        return self._seconds(
            lambda: self._drafts.propose_rows(
                prefixes,
                ends - 1,
                room,
                torch.ones_like(ends, dtype=torch.bool),
                max_context=context,
                num_to_go=dict.fromkeys(range(self._num_rows), num_slots + 1),
            )
        )

    def plain_step_s(self, context: int) -> float:
        """Seconds between two tokens of plain generate() on a dynamic cache: the median of a few."""
        if context not in self._caches:
            cache = DynamicCache(config=self._target.config.get_text_config(decoder=True))
            self._target(self._tokens(context)[:1], use_cache=True, **{CACHE_KEY: cache})
            self._caches[context] = cache
        cache = copy.deepcopy(self._caches[context])
        cache.batch_repeat_interleave(self._num_rows)
        stopwatch = _Stopwatch(self._synchronize)
        self._generate(
            self._tokens(context + 1),
            PLAIN_STEPS + 1,
            stopping_criteria=StoppingCriteriaList([stopwatch]),
            **{CACHE_KEY: cache},
        )
        return stopwatch.median_s()

    def overhead_s(self) -> float:
        """Seconds of acceptance, commit and bookkeeping, per round of a short generation with the drafter."""
        # A hook, so that waiting for an accelerator is booked under the step, not under acceptance, which reads it.
        hook = self._target.register_forward_hook(lambda *_: self._synchronize())
        try:
            with record_speculation() as report:
                self._generate(
                    self._tokens(SHORT_PROMPT_TOKENS),
                    self._num_slots + 2,  # room for a whole block in the first round
                    assistant_model=self._drafter,
                    verification_policy="full",
                )
        finally:
            hook.remove()
        num_rounds = report.num_target_forwards  # the prompt's has an acceptance behind it as well
        return (report.accept_s + report.other_s) / num_rounds

    # -- parts --------------------------------------------------------------------------------------------------

    def _step(self, tokens_per_row: int, context: int) -> Any:
        positions = self._positions(tokens_per_row, context)
        is_real = torch.ones_like(positions, dtype=torch.bool)
        with attending_by_rows(self._target):
            return self._rows.forward(
                self._tokens(tokens_per_row), positions, is_real, num_columns=context + tokens_per_row
            )

    def _generate(self, ids: Tensor, max_new_tokens: int, **kwargs: Any) -> None:
        """Greedy generation to the full length, whatever the text."""
        self._target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=None,
            pad_token_id=0,
            **kwargs,
        )

    def _tokens(self, length: int) -> Tensor:
        """Random ids, int64 `[rows, length]`."""
        vocab_size = self._drafter.config.vocab_size
        return torch.randint(1, vocab_size, (self._num_rows, length), device=self._target.device)

    def _positions(self, length: int, start: int) -> Tensor:
        steps = torch.arange(start, start + length, device=self._target.device)
        return steps.expand(self._num_rows, -1)

    def _seconds(self, call: Callable[[], Any]) -> float:
        self._synchronize()
        start_s = time.perf_counter()
        call()
        self._synchronize()
        return time.perf_counter() - start_s

    def _synchronize(self) -> None:
        """Wait for the accelerator, whose work belongs to the call that asked for it."""
        if self._target.device.type != "cpu":
            torch.accelerator.synchronize(self._target.device)


class _Stopwatch(StoppingCriteria):
    """Stops nothing; notes when each token was there."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self._stamps_s: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self._synchronize()
        self._stamps_s.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def median_s(self) -> float:
        """Median seconds between two tokens."""
        stamps = self._stamps_s
        return median(later - earlier for earlier, later in zip(stamps, stamps[1:], strict=False))
