"""`compare`: plain and speculative generation of the same prompts, interleaved, timed alike."""

import copy
import math
import time
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from .._compat import MERGED_CONFIDENCE_THRESHOLD
from ..configuration_dspark import DSparkConfig
from ..decoding.report import GenerateDSparkOutput, SpeculationReport
from ..decoding.scheduler import policy_without_a_word
from ..decoding.target_refusals import refuse_target
from ..modeling_dspark import DSparkDraftModel
from ..prompts import Prompt, encode_prompt
from .agreement import explain_difference
from .identity import PairFacts
from .provenance import collect_provenance
from .results import (
    ComparisonInterrupted,
    ComparisonReport,
    DrafterKind,
    GenerationTiming,
    PromptResult,
    RunPair,
    pooled_numbers,
)
from .settings import ComparisonError, ComparisonSettings

WARM_UP_TOKENS = 8


def compare(
    target: PreTrainedModel,
    drafter: DSparkDraftModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    settings: ComparisonSettings | None = None,
    *,
    target_name: str | None = None,
    drafter_name: str | None = None,
    drafter_kind: DrafterKind = "given",
    pair: PairFacts | None = None,
    show_progress: bool = False,
) -> ComparisonReport:
    """Run `target.generate` without and with `assistant_model=drafter` on each prompt.

    Both paths are warmed up first; then they take turns prompt by prompt, and in who goes first.
    Both return the same kind of output, so that bookkeeping costs the same. The caller's random
    state is left as it was.

    Args:
        target, drafter, tokenizer: Loaded, on their devices, in eval mode.
        prompts: At least one.
        settings: How to generate; greedy by default.
        target_name, drafter_name, drafter_kind, pair: For the report.
        show_progress: Whether to show a progress bar on stderr, if that is a terminal.

    Raises:
        ComparisonError: a setting, or the list of prompts, cannot be worked with.
        IncompatibleTargetError: the drafter was made for another target.
        UnsupportedGenerationError: the drafter cannot do what the settings ask for.
        ComparisonInterrupted: Ctrl-C; holds what was measured so far.
    """
    settings = settings or ComparisonSettings()
    refuse_target(target, drafter)
    bench = _Bench(target, drafter, settings)
    encoded = [(prompt.id, _encode(tokenizer, prompt).to(target.device)) for prompt in prompts]
    if not encoded:
        raise ComparisonError("the list of prompts is empty; a comparison needs at least one")
    results: list[PromptResult] = []

    def report() -> ComparisonReport:
        return ComparisonReport(
            target=target_name or str(target.name_or_path),
            drafter=drafter_name or str(drafter.name_or_path),
            drafter_kind=drafter_kind,
            settings=settings,
            policy=bench.policy,
            num_draft_tokens=bench.num_draft_tokens,
            num_planned=len(encoded),
            prompts=tuple(results),
            provenance=collect_provenance(target.device, target.dtype, seed=settings.seed, n=len(results)),
            pair=pair,
            **pooled_numbers(tuple(results), is_greedy=settings.is_greedy, seed=settings.seed),
        )

    try:
        with torch.random.fork_rng(devices=_devices_with_rng(target)):
            bench.warm_up(encoded[0][1])
            bar = tqdm(encoded, "comparing", unit="prompt", disable=None if show_progress else True)
            for index, (prompt_id, ids) in enumerate(bar):
                results.append(bench.measure(index, prompt_id, ids))
    except KeyboardInterrupt as stop:
        raise ComparisonInterrupted(report() if results else None) from stop
    return report()


class _Bench:
    """Target and drafter with the generation configs of both paths."""

    def __init__(self, target: PreTrainedModel, drafter: DSparkDraftModel, settings: ComparisonSettings) -> None:
        self._target: Any = target  # PreTrainedModel does not declare generate()
        self._drafter = drafter
        self._settings = settings
        self.policy = settings.policy or policy_without_a_word(target, drafter)
        self.num_draft_tokens = settings.num_assistant_tokens or drafter.config.block_size
        self._plain_config = plain_config(target, settings)
        self._dspark_config = copy.deepcopy(self._plain_config)
        self._dspark_config.update(**drafter_arguments(drafter.config, settings, self.policy))

    def warm_up(self, ids: Tensor) -> None:
        """Run both paths for a few tokens: first calls pick kernels, allocate and fill caches."""
        num_tokens = min(WARM_UP_TOKENS, self._settings.max_new_tokens)
        for is_speculative in (False, True):
            self._generate(ids, is_speculative, seed=self._settings.seed, max_new_tokens=num_tokens)

    def measure(self, index: int, prompt_id: str, ids: Tensor) -> PromptResult:
        """Measure one prompt, `repeats` times; texts are compared between the timed calls."""
        runs, is_identical, difference = [], True, None
        for repeat in range(self._settings.repeats):
            pair, plain, dspark = self._pair(ids, index * self._settings.repeats + repeat)
            runs.append(pair)
            if self._settings.is_greedy and difference is None:
                difference = explain_difference(self._target, self._plain_config, ids, plain, dspark)
                is_identical = difference is None
        return PromptResult(
            prompt_id=prompt_id,
            num_prompt_tokens=ids.shape[1],
            runs=tuple(runs),
            is_identical=is_identical if self._settings.is_greedy else None,
            difference=difference,
        )

    def _pair(self, ids: Tensor, number: int) -> tuple[RunPair, list[int], list[int]]:
        """Both paths once, and their new tokens; `number` counts pairs and says who goes first."""
        order = (False, True) if number % 2 == 0 else (True, False)
        done = {spec: self._generate(ids, spec, self._settings.seed + number) for spec in order}
        (plain, plain_timing, _), (dspark, dspark_timing, speculation) = done[False], done[True]
        assert speculation is not None, "a drafter's output carries its report"
        first: Literal["plain", "dspark"] = "dspark" if order[0] else "plain"
        return RunPair(first, plain_timing, dspark_timing, speculation), plain, dspark

    def _generate(
        self, ids: Tensor, is_speculative: bool, seed: int, max_new_tokens: int | None = None
    ) -> tuple[list[int], GenerationTiming, SpeculationReport | None]:
        """One timed call: new tokens, timing and, of the speculative path, its report."""
        config = self._dspark_config if is_speculative else self._plain_config
        if max_new_tokens is not None:
            config = copy.deepcopy(config)
            config.max_new_tokens = max_new_tokens
        assistant = {"assistant_model": self._drafter} if is_speculative else {}
        mask = torch.ones_like(ids)
        torch.manual_seed(seed)
        self._synchronize()
        start_s = time.perf_counter()
        output = self._target.generate(ids, attention_mask=mask, generation_config=config, **assistant)
        self._synchronize()
        latency_s = time.perf_counter() - start_s
        new = output.sequences[0, ids.shape[1] :].tolist()
        report = output.speculation if isinstance(output, GenerateDSparkOutput) else None
        return new, GenerationTiming(len(new), latency_s), report

    def _synchronize(self) -> None:
        """Wait for the accelerator, whose work belongs to the call that asked for it."""
        if self._target.device.type == "cuda":
            torch.cuda.synchronize(self._target.device)


def plain_config(target: PreTrainedModel, settings: ComparisonSettings) -> GenerationConfig:
    """The target's own config (end-of-text ids, penalties), length and sampling as set."""
    config: GenerationConfig = copy.deepcopy(target.generation_config)
    # Neutral values, not None: None would be filled from the target's own config. Of top_k that is
    # 0, but greedy search warns unless it is what transformers itself fills in.
    config.update(
        do_sample=not settings.is_greedy,
        temperature=settings.temperature or 1.0,
        top_p=settings.top_p or 1.0,
        top_k=settings.top_k or (50 if settings.is_greedy else 0),
        max_new_tokens=settings.max_new_tokens,
        return_dict_in_generate=True,
    )
    if config.pad_token_id is None:  # else generate() chooses one, and says so at each call
        eos = config.eos_token_id
        config.pad_token_id = eos[0] if isinstance(eos, list) else eos
    return config


def drafter_arguments(config: DSparkConfig, settings: ComparisonSettings, policy: str) -> dict[str, Any]:
    """What the speculative call's generation config has beyond the plain one's.

    Raises:
        ComparisonError: the drafter cannot honour a setting.
    """
    num_tokens, threshold = settings.num_assistant_tokens, settings.threshold
    if num_tokens is not None and num_tokens > config.block_size:
        raise ComparisonError(
            f"num_assistant_tokens must be at most {config.block_size}, this drafter's block, got {num_tokens}"
        )
    if threshold is not None and policy != "threshold":
        raise ComparisonError(
            f"threshold={threshold} needs the policy 'threshold', and the policy is {policy!r}; "
            "set the policy too, or leave the threshold out"
        )
    # Named only if the settings name it: a drafter's own may give way where there is no profile of this machine.
    arguments: dict[str, Any] = {} if settings.policy is None else {"verification_policy": settings.policy}
    if num_tokens is not None:
        arguments["num_assistant_tokens"] = num_tokens
    if threshold is not None:
        # transformers merges this value into every config, so it reads as "the drafter's own".
        is_merged_value = threshold == MERGED_CONFIDENCE_THRESHOLD
        arguments["assistant_confidence_threshold"] = math.nextafter(threshold, 1.0) if is_merged_value else threshold
    return arguments


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> Tensor:
    """Token ids `[1, length]` of a prompt.

    Raises:
        ComparisonError: the tokenizer makes nothing of it.
    """
    ids = encode_prompt(tokenizer, prompt)
    if ids.shape[1] == 0:
        raise ComparisonError(
            f"prompt {prompt.id!r} has no tokens after encoding, and generation needs at least one; give it text"
        )
    return ids


def _devices_with_rng(target: PreTrainedModel) -> list[torch.device]:
    return [target.device] if target.device.type == "cuda" else []
