"""The table of checks, and the examination that makes them in order."""

from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...configuration_dspark import DSparkConfig
from ...modeling_dspark import DSparkDraftModel
from ...prompts import Prompt
from ..provenance import collect_provenance
from ..settings import ComparisonError
from . import calibration, drafting, fit, machine, prompting, weights
from .case import Case
from .findings import Examination, Finding, NotExamined, Outcome

Check = Callable[[Case], tuple[str, list[Finding]]]

# In this order: a check may rely on what those before it found.
CHECKS: dict[str, Check] = {
    "sizes": fit.check_sizes,
    "weights": weights.check_numbers_of_weights,
    "norms": weights.check_norms,
    "dtypes": fit.check_dtypes,
    "vocabulary": fit.check_vocabulary,
    "stored copies": weights.check_stored_copies,
    "training report": weights.check_training_report,
    "overflow": drafting.check_overflow,
    "layout": drafting.check_layout,
    "feature layers": drafting.check_layer_ids,
    "mask token": drafting.check_mask,
    "prompt form": prompting.check_prompt_form,
    "features": drafting.check_features,
    "acceptance": drafting.check_acceptance,
    "calibration": calibration.check_calibration,
    "profile": machine.check_profile,
    "payoff": machine.check_payoff,
    "bfloat16": machine.check_bfloat16,
    "memory": machine.check_memory,
    "speed": machine.check_speed,
}


def examine_pair(
    target: PreTrainedModel,
    drafter: DSparkDraftModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    source: Path | None = None,
    max_new_tokens: int = 128,
    seed: int = 0,
    with_speed: bool = True,
    target_name: str | None = None,
    drafter_name: str | None = None,
    show_progress: bool = False,
) -> Examination:
    """Make every check of a pair; nothing is changed, and the random state is left as it was.

    Args:
        target, drafter, tokenizer: Loaded, on one device, in eval mode. The drafter may be of another target.
        prompts: At least one; verdicts by interval need two, and eight make them sharp.
        source: The drafter's folder, for what its files hold besides weights.
        max_new_tokens: Of each prompt.
        seed: Of sampling and resampling.
        with_speed: Whether plain and speculative generation are timed.
        target_name, drafter_name: For the report, and for commands that it names.
        show_progress: Whether to show a progress bar on stderr, if that is a terminal.

    Raises:
        ComparisonError: no prompt can be used, a setting is out of range, or the drafter drafts no blocks.
    """
    if drafter.config.model_type != DSparkConfig.model_type:
        raise ComparisonError(
            f"doctor knows the faults of drafters that draft blocks, and this one's model_type is "
            f"{drafter.config.model_type!r}; pass a DSpark or DFlash drafter, or compare this one with `dspark compare`"
        )
    for name, value, least in (("max_new_tokens", max_new_tokens, 2), ("number of prompts", len(prompts), 1)):
        if value < least:
            raise ComparisonError(f"{name} must be >= {least}, got {value!r}")
    case = Case(
        target=target,
        drafter=drafter,
        tokenizer=tokenizer,
        prompts=prompts,
        source=source,
        max_new_tokens=max_new_tokens,
        seed=seed,
        with_speed=with_speed,
        target_name=target_name or str(target.name_or_path),
        drafter_name=drafter_name or str(drafter.name_or_path),
    )
    num_prompts = len(case.encoded)
    outcomes = []
    for name, check in tqdm(CHECKS.items(), "examining", unit="check", disable=None if show_progress else True):
        try:
            outcomes.append(Outcome.of(name, *check(case)))
        except NotExamined as reason:
            outcomes.append(Outcome(name, "not examined", str(reason)))
    return Examination(
        target=case.target_name,
        drafter=case.drafter_name,
        outcomes=tuple(outcomes),
        measured=case.measured,
        provenance=collect_provenance(target.device, target.dtype, seed=seed, n=num_prompts),
    )
