"""Per-call knobs: what the generate() call says, else what the drafter's config says."""

import functools
import logging
from dataclasses import dataclass

from transformers import GenerationConfig

from .._compat import MERGED_CONFIDENCE_THRESHOLD, MERGED_NUM_ASSISTANT_TOKENS
from ..config_rules import VERIFICATION_POLICIES
from ..configuration_dspark import DSparkConfig
from ..errors import UnsupportedGenerationError
from .schedule import FullPolicy, ThresholdPolicy, VerificationPolicy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SpeculationSettings:
    """What one generate() call asks of the drafter.

    Attributes:
        num_draft_tokens: gamma for this call, 1 to the drafter's block size.
        policy: How much of a draft is verified.
    """

    num_draft_tokens: int
    policy: VerificationPolicy


def resolve_settings(config: DSparkConfig, generation_config: GenerationConfig) -> SpeculationSettings:
    """Read `num_assistant_tokens`, `verification_policy` and `assistant_confidence_threshold` of a call.

    transformers fills the first and the last with its own defaults (20 and 0.4) when the user says nothing; those
    two values therefore mean "the drafter's default".

    Raises:
        UnsupportedGenerationError: a knob has a value that this drafter cannot honour.
    """
    return SpeculationSettings(
        num_draft_tokens=_num_draft_tokens(config, generation_config),
        policy=_policy(config, generation_config),
    )


def _num_draft_tokens(config: DSparkConfig, generation_config: GenerationConfig) -> int:
    asked = generation_config.num_assistant_tokens
    if asked is None or asked == MERGED_NUM_ASSISTANT_TOKENS:
        return config.block_size
    if not isinstance(asked, int) or isinstance(asked, bool) or asked < 1:
        raise UnsupportedGenerationError(
            f"num_assistant_tokens must be a whole number >= 1, got {asked!r}; leave assistant_model out for plain "
            "generation"
        )
    if asked > config.block_size:
        _warn_of_cap(asked, config.block_size)
    return min(asked, config.block_size)


@functools.cache
def _warn_of_cap(asked: int, block_size: int) -> None:
    """Once per pair of values: a loop over prompts would repeat it at each call."""
    logger.warning(
        "num_assistant_tokens=%d is more than this drafter's block of %d; drafting %d tokens per round",
        asked,
        block_size,
        block_size,
    )


def _policy(config: DSparkConfig, generation_config: GenerationConfig) -> VerificationPolicy:
    name = getattr(generation_config, "verification_policy", None) or config.verification_policy
    if name not in VERIFICATION_POLICIES:
        raise UnsupportedGenerationError(
            f"verification_policy must be one of {VERIFICATION_POLICIES}, got {name!r}; leave it out for the drafter's "
            "own"
        )
    if name == "full":
        return FullPolicy()
    if not config.enable_confidence_head:
        raise UnsupportedGenerationError(
            f"verification_policy={name!r} needs a drafter with a confidence head and this one has none; "
            "use verification_policy='full'"
        )
    asked = generation_config.assistant_confidence_threshold
    is_unset = asked is None or asked == MERGED_CONFIDENCE_THRESHOLD
    return ThresholdPolicy(config.confidence_threshold if is_unset else asked)
