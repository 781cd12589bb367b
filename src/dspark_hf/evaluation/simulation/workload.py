"""What users ask for, and when: texts, lengths and arrivals, all from a seed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..settings import ComparisonError
from .bank import RoundBank

LENGTH_LAWS = ("traces", "fixed:PROMPT,ANSWER", "geometric:PROMPT,ANSWER")


@dataclass(frozen=True)
class Request:
    """One answer that a user waits for.

    Attributes:
        id: From 0, in the order in which requests are issued.
        issued_s: When.
        text: Whose recorded rounds it follows.
        prompt_tokens: Before its first round.
        answer_tokens: That rounds deliver; the first token of the answer, which the prompt's forward gives, is not one.
    """

    id: int
    issued_s: float
    text: int
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True)
class TrafficMix:
    """Shares of domains, which may change once.

    Attributes:
        before, after: Weight of each domain; others are not asked for.
        shift_s: When `after` takes over; None: never.
    """

    before: Mapping[str, float]
    after: Mapping[str, float] | None = None
    shift_s: float | None = None

    def at(self, time_s: float) -> Mapping[str, float]:
        """The shares at a time."""
        is_after = self.after is not None and self.shift_s is not None and time_s >= self.shift_s
        return self.after if is_after and self.after is not None else self.before

    @classmethod
    def even(cls, bank: RoundBank) -> "TrafficMix":
        """Every text alike."""
        domains = list(bank.domains)
        return cls({domain: domains.count(domain) for domain in dict.fromkeys(domains)})


@dataclass(frozen=True)
class LengthLaw:
    """Tokens of prompts and answers.

    Attributes:
        kind: `traces`: those of the text; `fixed`; `geometric`: the answer's with the given mean, the prompt's fixed.
        prompt_tokens, answer_tokens: Of the last two.
    """

    kind: str = "traces"
    prompt_tokens: int = 0
    answer_tokens: int = 1

    @classmethod
    def parse(cls, text: str) -> "LengthLaw":
        """From a command line.

        Raises:
            ComparisonError: it is none of `LENGTH_LAWS`.
        """
        kind, _, numbers = text.partition(":")
        values = numbers.split(",")
        if text == "traces":
            return cls()
        if kind not in ("fixed", "geometric") or len(values) != 2 or not all(value.isdecimal() for value in values):
            raise ComparisonError(f"lengths must be one of {'; '.join(LENGTH_LAWS)}, got {text!r}")
        prompt_tokens, answer_tokens = map(int, values)
        if prompt_tokens < 1 or answer_tokens < 1:
            raise ComparisonError(f"prompts and answers need 1 token or more, got {text!r}; try fixed:128,128")
        return cls(kind, prompt_tokens, answer_tokens)

    def draw(self, bank: RoundBank, text: int, rng: np.random.Generator) -> tuple[int, int]:
        """Tokens of prompt and answer."""
        if self.kind == "traces":
            return int(bank.prompt_tokens[text]), int(bank.answer_tokens[text])
        if self.kind == "fixed":
            return self.prompt_tokens, self.answer_tokens
        return self.prompt_tokens, int(rng.geometric(1 / self.answer_tokens))


class RequestStream:
    """Requests one after the other; the n-th is the same for every system, but for the time and the mix it is asked in.

    Raises:
        ComparisonError: a mix that asks for a domain without texts, or for nothing.
    """

    def __init__(self, bank: RoundBank, mix: TrafficMix, lengths: LengthLaw, seed: int) -> None:
        self._bank = bank
        self._mix = mix
        self._lengths = lengths
        self._seed = seed
        self._num_issued = 0
        self._texts = {name: [i for i, own in enumerate(bank.domains) if own == name] for name in set(bank.domains)}
        for weights in (mix.before, mix.after or mix.before):
            wanted = {name for name, weight in weights.items() if weight > 0}
            if not wanted or not wanted <= set(self._texts) or min(weights.values()) < 0:
                raise ComparisonError(
                    f"a mix of traffic needs weights >= 0, one above 0, of domains that were recorded, "
                    f"{', '.join(sorted(self._texts))}; got {dict(weights)}"
                )

    def next(self, issued_s: float) -> Request:
        """The next request."""
        number = self._num_issued
        self._num_issued += 1
        rng = np.random.default_rng((self._seed, number))
        weights = self._mix.at(issued_s)
        total = np.cumsum(list(weights.values()))
        domain = list(weights)[int(np.searchsorted(total, rng.random() * total[-1], side="right"))]
        texts = self._texts[domain]
        text = texts[int(rng.integers(len(texts)))]
        prompt_tokens, answer_tokens = self._lengths.draw(self._bank, text, rng)
        return Request(number, issued_s, text, prompt_tokens, answer_tokens)


class Arrivals(Protocol):
    """When requests are issued."""

    def due_s(self) -> float | None:
        """When the next one is; None: not before another ends."""
        ...

    def take(self) -> None:
        """The next one has been issued."""
        ...

    def finished(self, now_s: float) -> None:
        """A request has ended."""
        ...


class PoissonArrivals:
    """Requests that come whatever happens, `rate_per_s` of them on average.

    Raises:
        ComparisonError: the rate is not above 0.
    """

    def __init__(self, rate_per_s: float, seed: int) -> None:
        if not 0 < rate_per_s < float("inf"):
            raise ComparisonError(f"a rate must be above 0 requests a second, got {rate_per_s!r}")
        self._mean_s = 1 / rate_per_s
        self._rng = np.random.default_rng((seed, 2**31))  # apart from those of requests
        self._due_s = 0.0
        self.take()

    def due_s(self) -> float:
        return self._due_s

    def take(self) -> None:
        self._due_s += float(self._rng.exponential(self._mean_s))

    def finished(self, now_s: float) -> None:
        """Nobody waits for it."""


class ClosedLoop:
    """So many users, each of whom asks again as soon as the answer is there.

    Raises:
        ComparisonError: there is none.
    """

    def __init__(self, concurrency: int) -> None:
        if concurrency < 1:
            raise ComparisonError(f"concurrency must be 1 user or more, got {concurrency!r}")
        self._due_s = [0.0] * concurrency

    def due_s(self) -> float | None:
        return self._due_s[0] if self._due_s else None

    def take(self) -> None:
        self._due_s.pop(0)

    def finished(self, now_s: float) -> None:
        self._due_s.append(now_s)
