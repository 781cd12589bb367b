"""Per-call knobs: what the generate() call says, else what the drafter's config says."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from transformers import GenerationConfig

from .._compat import MERGED_CONFIDENCE_THRESHOLD, MERGED_NUM_ASSISTANT_TOKENS
from ..config_rules import VERIFICATION_POLICIES
from ..configuration_autoregressive import AutoregressiveConfig
from ..configuration_dspark import DSparkConfig
from ..errors import UnsupportedGenerationError
from .policies.facts import VerificationPolicy
from .policies.registry import COST_POLICIES, policy_factory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SpeculationSettings:
    """What one generate() call asks of the drafter.

    Attributes:
        num_draft_tokens: gamma for this call, 1 to the drafter's block size.
        new_policy: Makes the policy that says how much of a draft is verified; one for each generate() call, since a
            policy may remember past rounds.
    """

    num_draft_tokens: int
    new_policy: Callable[[], VerificationPolicy]


def resolve_settings(
    config: DSparkConfig,
    generation_config: GenerationConfig,
    *,
    why_no_costs: str | None = None,
    profile_command: str = "dspark profile",
) -> SpeculationSettings:
    """Read `num_assistant_tokens`, `verification_policy` and `assistant_confidence_threshold` of a call.

    transformers fills the first and the last with its own defaults (20 and 0.4) when the user says nothing; those
    two values therefore mean "the drafter's default".

    Args:
        why_no_costs: Why step times of this machine are not at hand. A policy that weighs drafts against time is then
            refused when the call asks for it; as a drafter's default it gives way to `full`, with one warning, since
            a drafter travels and a profile does not. None: they are.
        profile_command: What makes them be at hand.

    Raises:
        UnsupportedGenerationError: a knob has a value that this drafter cannot honour.
    """
    return SpeculationSettings(
        num_draft_tokens=_num_draft_tokens(config, generation_config),
        new_policy=_new_policy(config, generation_config, why_no_costs, profile_command),
    )


def weighs_costs(config: DSparkConfig, generation_config: GenerationConfig) -> bool:
    """Whether this call's policy weighs drafts against step times."""
    return _policy_name(config, generation_config) in COST_POLICIES


def _policy_name(config: DSparkConfig, generation_config: GenerationConfig) -> str:
    return getattr(generation_config, "verification_policy", None) or config.verification_policy


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


def _new_policy(
    config: DSparkConfig, generation_config: GenerationConfig, why_no_costs: str | None, profile_command: str
) -> Callable[[], VerificationPolicy]:
    asked = getattr(generation_config, "verification_policy", None)
    name = _policy_name(config, generation_config)
    if name not in VERIFICATION_POLICIES:
        raise UnsupportedGenerationError(
            f"verification_policy must be one of {VERIFICATION_POLICIES}, got {name!r}; leave it out for the drafter's "
            "own"
        )
    new_policy = policy_factory(name, _threshold(config, generation_config), config.min_drafts_every)
    policy = new_policy()
    if policy.needs_confidence and not config.enable_confidence_head:
        raise UnsupportedGenerationError(
            f"verification_policy={name!r} needs a drafter with a confidence head and this one has none; "
            "use verification_policy='full'"
        )
    if policy.needs_costs and isinstance(config, AutoregressiveConfig):
        raise UnsupportedGenerationError(
            f"verification_policy={name!r} weighs drafts against step times, which are profiled for drafters that "
            f"draft rows together, and {config.model_type!r} drafters draft for one row at a time; use "
            "verification_policy='full', with num_assistant_tokens for fewer drafts"
        )
    if policy.needs_costs and why_no_costs is not None:
        if asked:
            raise UnsupportedGenerationError(
                f"verification_policy={name!r} weighs drafts against step times of this machine, and {why_no_costs}; "
                f"make one with `{profile_command}`, or use verification_policy='full' or 'threshold'"
            )
        _warn_of_missing_costs(name, why_no_costs, profile_command)
        return policy_factory("full", 0.0)
    return new_policy


@functools.cache
def _warn_of_missing_costs(name: str, why: str, profile_command: str) -> None:
    """Once per policy, reason and pair: a loop over prompts would repeat it at each call."""
    logger.warning(
        "this drafter's verification_policy %r weighs drafts against step times of this machine, and %s; every draft "
        "is verified instead. Make a profile with `%s`",
        name,
        why,
        profile_command,
    )


def _threshold(config: DSparkConfig, generation_config: GenerationConfig) -> float:
    """The one the call names, else the drafter's; read under the policies that have one."""
    asked = generation_config.assistant_confidence_threshold
    is_unset = asked is None or asked == MERGED_CONFIDENCE_THRESHOLD
    return config.confidence_threshold if is_unset else asked
