"""What a visitor has filled in, as a request; boxes that were cleared hold None, and are told."""

import random
from typing import Any

from ..decoding.policies.registry import THRESHOLD_POLICIES
from ..evaluation.settings import ComparisonError, ComparisonSettings
from .service import RaceRequest
from .shelf import Role

OWN_POLICY = "the drafter's own"
PLAIN = "plain"


def race_request(prompt: str | None, drafter: str | None, target: str | None, *settings: Any) -> RaceRequest:
    """One prompt, plain against a drafter."""
    return against_plain((prompt or "",), drafter, target, *settings)


def against_plain(prompts: tuple[str, ...], drafter: str | None, target: str | None, *settings: Any) -> RaceRequest:
    """Plain against a drafter."""
    lanes = ((PLAIN, None), ("DSpark", _name(drafter, "drafter")))
    return RaceRequest(lanes, prompts, comparison(*settings), _name(target, "target"))


def drafters_request(
    prompt: str | None, one: str | None, other: str | None, target: str | None, *settings: Any
) -> RaceRequest:
    """One prompt, two drafters."""
    a, b = _name(one, "drafter"), _name(other, "drafter")
    lanes = ((f"A: {a}", a), (f"B: {b}", b))
    return RaceRequest(lanes, (prompt or "",), comparison(*settings), _name(target, "target"))


def _name(written: str | None, role: Role) -> str:
    """A name as it was chosen or written; a box that was cleared holds None, which would be plain generation."""
    name = (written or "").strip()
    if not name:
        raise ComparisonError(f"no {role} is chosen; choose one, or write a Hub id or folder")
    return name


def comparison(
    max_new_tokens: float | None,
    temperature: float | None,
    policy: str | None,
    num_drafts: float | None,
    threshold: float | None,
) -> ComparisonSettings:
    """The settings of the page; None is of a box that was cleared."""
    if max_new_tokens is None or temperature is None or policy is None or num_drafts is None:
        raise ComparisonError("a setting is empty; fill it in, or load the page again for the defaults")
    chosen = None if policy == OWN_POLICY else policy
    return ComparisonSettings(
        temperature=temperature,
        max_new_tokens=int(max_new_tokens),
        policy=chosen,
        threshold=threshold if chosen in THRESHOLD_POLICIES else None,
        num_assistant_tokens=int(num_drafts) or None,
        seed=random.randrange(2**32),
    )
