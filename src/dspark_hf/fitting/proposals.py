"""What a confidence head is calibrated on: its logits, and which drafts the target accepted."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..decoding.observers import EndedRounds, observe_rounds
from ..errors import CalibrationError


@dataclass(frozen=True)
class Proposals:
    """Rounds of decoding, one a row.

    Attributes:
        logits: float32 `[n, slots]`, raw confidence logits.
        is_accepted: bool `[n, slots]`, whether drafts 1..k were all accepted; so it never rises along a row.
        is_verified: bool `[n, slots]`, whether the target saw draft k. Others say nothing about acceptance.
        prompt: int64 `[n]`, which prompt a round belongs to: rounds of one prompt are not independent.

    Raises:
        CalibrationError: shapes or types differ from these, a logit of a verified slot is not finite, or acceptance
            rises along a row.
    """

    logits: Tensor
    is_accepted: Tensor
    is_verified: Tensor
    prompt: Tensor

    def __post_init__(self) -> None:
        shape = tuple(self.logits.shape)
        others = {name: getattr(self, name) for name in ("is_accepted", "is_verified")}
        if len(shape) != 2 or any(tuple(t.shape) != shape or t.dtype != torch.bool for t in others.values()):
            raise CalibrationError(
                f"proposals need logits [n, slots] and bool is_accepted and is_verified of the same shape, got {shape} "
                f"and {[(tuple(t.shape), t.dtype) for t in others.values()]}; build them with record_proposals()"
            )
        if tuple(self.prompt.shape) != shape[:1]:
            raise CalibrationError(
                f"prompt must have one number per round, {shape[:1]}, got {tuple(self.prompt.shape)}; "
                "build proposals with record_proposals()"
            )
        if not bool(torch.where(self.is_verified, self.logits, 0.0).isfinite().all()):
            raise CalibrationError("logits of verified slots must be finite; leave out rounds whose numbers are not")
        if bool((self.is_accepted[:, 1:] & ~self.is_accepted[:, :-1]).any()):
            raise CalibrationError(
                "is_accepted must never rise along a row, since a draft is accepted only behind accepted ones; "
                "give the acceptance of the prefix up to each slot"
            )

    def __len__(self) -> int:
        return self.logits.shape[0]

    @property
    def num_slots(self) -> int:
        """gamma."""
        return self.logits.shape[1]

    @property
    def num_prompts(self) -> int:
        """Different prompts."""
        return len(self.prompt.unique())

    def select(self, rows: Tensor) -> "Proposals":
        """The rounds of an index or a bool mask."""
        return Proposals(self.logits[rows], self.is_accepted[rows], self.is_verified[rows], self.prompt[rows])

    def split(self, fraction: float, *, seed: int) -> tuple["Proposals", "Proposals"]:
        """Two parts without a prompt in common; the second holds `fraction` of the prompts, one at least.

        Raises:
            CalibrationError: there are fewer than two prompts, or `fraction` is not inside (0, 1).
        """
        if not 0 < fraction < 1:
            raise CalibrationError(f"held_out_fraction must lie inside 0 to 1, got {fraction}")
        prompts = self.prompt.unique()
        if len(prompts) < 2:
            raise CalibrationError(
                f"a held-out part needs proposals of 2 prompts or more, got {len(prompts)}; record more prompts"
            )
        order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed))
        num_held_out = min(len(prompts) - 1, max(1, round(fraction * len(prompts))))
        is_held_out = torch.isin(self.prompt, prompts[order[:num_held_out]])
        return self.select(~is_held_out), self.select(is_held_out)

    @classmethod
    def of(
        cls,
        logits: Sequence[Sequence[float]] | Tensor,
        num_verified: Sequence[int],
        num_accepted: Sequence[int],
        prompt: Sequence[int],
    ) -> "Proposals":
        """From each round's logits and counts of drafts that were verified and accepted."""
        values = torch.as_tensor(logits, dtype=torch.float32)
        slots = torch.arange(values.shape[1])
        return cls(
            logits=values,
            is_accepted=slots < torch.as_tensor(num_accepted)[:, None],
            is_verified=slots < torch.as_tensor(num_verified)[:, None],
            prompt=torch.as_tensor(prompt, dtype=torch.long),
        )


class ProposalRecord:
    """Collects rounds as they end; see [`record_proposals`]."""

    def __init__(self) -> None:
        self.rounds: list[EndedRounds] = []

    def __call__(self, ended: EndedRounds) -> None:
        self.rounds.append(ended)

    def proposals(self) -> Proposals:
        """All rounds so far; each row of each generation counts as a prompt.

        Raises:
            CalibrationError: there is none, or the drafter has no confidence head.
        """
        return proposals_of(self.rounds)


@contextmanager
def record_proposals() -> Iterator[ProposalRecord]:
    """Record every round of the speculative generate() calls of this thread (or asyncio task) inside the block.

    Use `verification_policy="full"`: slots that a policy leaves out are unknown, and the rounds that it cuts short are
    not like the others.
    """
    record = ProposalRecord()
    with observe_rounds(record):
        yield record


def proposals_of(rounds: Sequence[EndedRounds]) -> Proposals:
    """Rounds as [`Proposals`]; slots that a round did not draft count as not verified.

    Raises:
        CalibrationError: there is none, or the drafter has no confidence head.
    """
    logits = [ended.confidence_logits for ended in rounds]
    found = [values.cpu() for values in logits if values is not None]
    if not found or len(found) < len(logits):
        raise CalibrationError(
            f"{len(rounds)} rounds were recorded, {len(found)} of them with confidences; generate with a drafter that "
            "has a confidence head"
        )
    num_slots = max(values.shape[1] for values in found)
    padded = [torch.nn.functional.pad(values, (0, num_slots - values.shape[1])) for values in found]
    texts = [(ended.generation, row) for ended in rounds for row in ended.rows]
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    return Proposals.of(
        torch.cat(padded),
        [n for ended in rounds for n in ended.num_verified],
        [n for ended in rounds for n in ended.num_accepted],
        [numbers[text] for text in texts],
    )
