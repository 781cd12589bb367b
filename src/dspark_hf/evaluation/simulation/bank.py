"""Recorded rounds of many texts as arrays, so that a round of all rows is a few look-ups."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..settings import ComparisonError
from ..traces import AcceptanceTraces, Layout

Ints = NDArray[np.int64]
Floats32 = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class RoundBank:
    """The rounds of a recording, one text behind the other; see `evaluation/traces.py` for the two layouts.

    A request follows the rounds of its text; behind the last it begins with the first again. Of a round that is cut at
    `ell` drafts, `min(num_accepted, ell)` are accepted, which is exact.

    Attributes:
        conditional: `c_k` as policies see it, float32 `[places, slots]`.
        num_accepted: int64 `[places]`, drafts of the whole block that the target accepted.
        starts: int64 `[texts + 1]`, first place of each text, and the end.
        domains: Of each text.
        prompt_tokens: int64 `[texts]`.
        answer_tokens: int64 `[texts]`, tokens that rounds committed.
        layout: Of the traces.
    """

    conditional: Floats32
    num_accepted: Ints
    starts: Ints
    domains: tuple[str, ...]
    prompt_tokens: Ints
    answer_tokens: Ints
    layout: Layout

    @classmethod
    def of(cls, traces: AcceptanceTraces) -> "RoundBank":
        """The same rounds as arrays."""
        prompts = traces.prompts
        return cls(
            conditional=np.concatenate([prompt.conditional for prompt in prompts]),
            num_accepted=np.concatenate([prompt.num_accepted for prompt in prompts]),
            starts=np.cumsum([0, *map(len, prompts)], dtype=np.int64),
            domains=tuple(prompt.domain for prompt in prompts),
            prompt_tokens=np.array([prompt.prompt_length for prompt in prompts], dtype=np.int64),
            answer_tokens=np.array([prompt.num_tokens for prompt in prompts], dtype=np.int64),
            layout=traces.layout,
        )

    @property
    def num_slots(self) -> int:
        """gamma."""
        return int(self.conditional.shape[1])

    @cached_property
    def survival(self) -> Floats32:
        """`a_k`, float32 `[places, slots]`."""
        return self.conditional.cumprod(axis=1, dtype=np.float32)

    @cached_property
    def logits(self) -> Floats32:
        """Of `conditional`, float32 `[places, slots]`."""
        inside = self.conditional.astype(np.float64).clip(1e-6, 1 - 1e-6)
        return np.log(inside / (1 - inside)).astype(np.float32)

    def slot_survival(self) -> list[float]:
        """Share of places at which drafts 1 to k are all accepted."""
        return [float((self.num_accepted > k).mean()) for k in range(self.num_slots)]

    def first_slots(self, num_slots: int) -> "RoundBank":
        """The same rounds as a drafter of fewer slots had drafted them; texts and answers stay as they are."""
        shorter = np.minimum(self.num_accepted, num_slots)
        return replace(self, conditional=self.conditional[:, :num_slots], num_accepted=shorter)

    def index(self, texts: Ints, num_rounds: Ints, num_tokens: Ints) -> Ints:
        """The place of each row's next round, int64 `[rows]`.

        Args:
            texts, num_rounds, num_tokens: int64 `[rows]`: its text, and what rounds have brought so far.
        """
        start = self.starts[texts]
        passed = num_tokens if self.layout == "positions" else num_rounds
        return start + passed % (self.starts[texts + 1] - start)


def same_texts(drafts: RoundBank, others: RoundBank) -> RoundBank:
    """`others`, a recording of another drafter, for requests that were drawn from `drafts`.

    Raises:
        ComparisonError: they are not of the same texts.
    """
    if drafts.domains != others.domains or not np.array_equal(drafts.prompt_tokens, others.prompt_tokens):
        raise ComparisonError(
            f"both drafters need traces of the same prompts in the same order, got {len(drafts.domains)} and "
            f"{len(others.domains)} prompts that differ in domain or length; record them from one set of texts"
        )
    return replace(others, answer_tokens=drafts.answer_tokens)
