"""What a comparison is asked for."""

import math
from dataclasses import dataclass

from ..config_rules import VERIFICATION_POLICIES
from ..errors import DSparkError


class ComparisonError(DSparkError, ValueError):
    """A comparison was asked for with a value it cannot work with."""


@dataclass(frozen=True)
class ComparisonSettings:
    """How both paths generate.

    Attributes:
        temperature: 0 is greedy.
        top_p, top_k: Cuts of the target's law; None cuts nothing. Need a temperature above 0.
        max_new_tokens: Most tokens per prompt; an end-of-text token stops earlier.
        policy, threshold, num_assistant_tokens: Of the drafter; None takes the drafter's own.
        repeats: Times each prompt is measured.
        seed: Of sampling and of the bootstrap.

    Raises:
        ComparisonError: a value breaks its rule.
    """

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int = 64
    policy: str | None = None
    threshold: float | None = None
    num_assistant_tokens: int | None = None
    repeats: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        holds = 0 <= self.temperature < math.inf
        _require(holds, "temperature", self.temperature, "a number >= 0; 0 is greedy")
        for name in ("top_p", "top_k"):
            value = getattr(self, name)
            holds = value is None or self.temperature > 0
            _require(holds, name, value, "left out when temperature is 0, which is greedy")
        top_p, threshold = self.top_p, self.threshold
        _require(top_p is None or 0 < top_p <= 1, "top_p", top_p, "above 0 and at most 1")
        _require(self.top_k is None or self.top_k >= 1, "top_k", self.top_k, ">= 1")
        _require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, ">= 1")
        policies = f"one of {', '.join(VERIFICATION_POLICIES)}"
        is_known = self.policy is None or self.policy in VERIFICATION_POLICIES
        _require(is_known, "policy", self.policy, policies)
        holds = threshold is None or 0 <= threshold <= 1
        _require(holds, "threshold", threshold, "a probability, 0 to 1")
        holds = self.num_assistant_tokens is None or self.num_assistant_tokens >= 1
        _require(holds, "num_assistant_tokens", self.num_assistant_tokens, ">= 1")
        _require(self.repeats >= 1, "repeats", self.repeats, ">= 1")
        _require(0 <= self.seed < 2**32, "seed", self.seed, "0 to 2**32 - 1")

    @property
    def is_greedy(self) -> bool:
        """Whether both paths must give the same text."""
        return self.temperature == 0


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise ComparisonError(f"{name} must be {rule}, got {value!r}")
