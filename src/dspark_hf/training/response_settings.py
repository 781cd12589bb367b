"""How answers are made, and what came of it."""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import TrainingDataError

# Of greedy answers where the mix is not given: what most speculative decoding is used and measured with.
GREEDY_SHARE = 0.7


@dataclass(frozen=True)
class ResponseSettings:
    """How answers are made.

    Attributes:
        temperatures: The mix; 0 is greedy, others sample from the full law, without top-k or top-p.
        shares: Weight of each temperature, in proportion. None: 70 % for 0, the rest equally; without 0 all equally.
        answers_per_prompt: Of each prompt, at as many different temperatures; id and seed decide which.
        max_new_tokens: Most tokens of an answer, the stop token counted.
        max_prompt_tokens: Longer prompts are skipped, chat template counted.
        batch_size: Prompts that are answered at a time. The answers do not depend on it.
        seed: Of the choice of temperatures and of sampling.

    Raises:
        TrainingDataError: a value breaks its rule.
    """

    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    shares: tuple[float, ...] | None = None
    answers_per_prompt: int = 1
    max_new_tokens: int = 256
    max_prompt_tokens: int = 1024
    batch_size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_prompt_tokens", "batch_size", "answers_per_prompt"):
            _require(_is_integer(getattr(self, name), 1), f"{name} must be an integer >= 1", getattr(self, name))
        _require(_is_integer(self.seed, 0), "seed must be an integer >= 0", self.seed)
        values = self.temperatures
        _require(
            bool(values) and len(set(values)) == len(values) and all(t == 0 or 0.01 <= t <= 100 for t in values),
            "temperatures must be different numbers, each 0 or from 0.01 to 100",
            values,
        )
        _require(
            self.shares is None
            or (len(self.shares) == len(values) and all(math.isfinite(s) and s > 0 for s in self.shares)),
            f"shares must be {len(values)} positive numbers, one per temperature, or None",
            self.shares,
        )
        _require(
            self.answers_per_prompt <= len(values),
            f"answers_per_prompt must be at most the number of temperatures, {len(values)}; add temperatures for more",
            self.answers_per_prompt,
        )

    def resolved_shares(self) -> tuple[float, ...]:
        """Share of each temperature, adding up to 1."""
        num_others = len(self.temperatures) - 1
        shares = self.shares
        if shares is None and num_others and 0 in self.temperatures:
            rest = round(1 - GREEDY_SHARE, 6) / num_others
            return tuple(GREEDY_SHARE if t == 0 else rest for t in self.temperatures)
        shares = shares or (1.0,) * len(self.temperatures)
        return tuple(share / sum(shares) for share in shares)

    def temperatures_for(self, prompt_id: str) -> list[float]:
        """The prompt's `answers_per_prompt` temperatures: drawn by shares, without replacement, the same every time."""
        keyed = []
        for temperature, share in zip(self.temperatures, self.resolved_shares(), strict=True):
            digest = hashlib.sha256(f"temperature\0{self.seed}\0{temperature!r}\0{prompt_id}".encode()).digest()
            uniform = (int.from_bytes(digest[:8], "big") + 1) / (2**64 + 1)
            # The smallest of such exponential variables belongs to each temperature with its share.
            keyed.append((-math.log(uniform) / share, temperature))
        return [temperature for _, temperature in sorted(keyed)[: self.answers_per_prompt]]


@dataclass(frozen=True)
class ResponseSummary:
    """What a call did.

    Attributes:
        output: File with the answers.
        num_prompts: Prompts given.
        num_skipped_unusable: Of them without text, or refused by the chat template.
        num_skipped_long: Of them longer than `max_prompt_tokens`, or than the target has positions for.
        num_answers: Answers made by this call.
        num_resumed: Answers that an earlier call had made.
        num_stopped: Of this call's answers those that ended with a stop token, not at the limit.
        num_response_tokens: In this call's answers.
        duration_s: Of making them, loading excluded.
    """

    output: Path
    num_prompts: int
    num_skipped_unusable: int
    num_skipped_long: int
    num_answers: int
    num_resumed: int
    num_stopped: int
    num_response_tokens: int
    duration_s: float

    @property
    def tokens_per_s(self) -> float:
        """Answer tokens per second, 0 if nothing was made."""
        return self.num_response_tokens / self.duration_s if self.num_answers else 0.0


def _is_integer(value: Any, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _require(holds: bool, rule: str, value: object) -> None:
    if not holds:
        raise TrainingDataError(f"{rule}, got {value!r}")
