"""What a bench measures: three kinds of cells, and how often each is repeated."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..settings import ComparisonError, ComparisonSettings

CellKind = Literal["main", "batch", "context"]
DEFAULT_POLICIES = ("full",)
# What a drafter's config names, or `full` where that needs a profile that this machine does not have.
OWN_POLICY = "own"


@dataclass(frozen=True)
class Cell:
    """One point of a bench, at which all ways run on the same batches.

    Attributes:
        kind: `main` runs every way on single prompts as they are; sweeps run the ways that are to be swept.
        num_rows: Prompts that share forwards.
        context: Tokens of every prompt; None: as long as it is.
        max_new_tokens: Most new tokens of a prompt.
        stops_at_end: Whether end tokens end a text. Off in sweeps, so that every point makes the same number of tokens.
        num_repeats: Times that each batch runs.
    """

    kind: CellKind
    num_rows: int
    context: int | None
    max_new_tokens: int
    stops_at_end: bool
    num_repeats: int

    @property
    def name(self) -> str:
        """Of its measurements on disk and in tables."""
        if self.kind == "main":
            return "main"
        return f"batch {self.num_rows}" if self.kind == "batch" else f"context {self.context}"


@dataclass(frozen=True)
class BenchSettings:
    """How a bench generates and what it sweeps.

    Attributes:
        temperature, top_p, top_k: As in `ComparisonSettings`.
        max_new_tokens: Most new tokens of a prompt in the main table.
        repeats: Times that each prompt of the main table runs.
        policies: Of every drafter that can follow them: a policy, `own` for the drafter's own, and either of them with
            `:N` for at most N drafts a round.
        prompt_lookup_num_tokens: Drafts that prompt lookup takes from the text before; 0 leaves it out.
        batch_sizes, contexts: Points of the sweeps; none leaves a sweep out.
        sweep_new_tokens, sweep_repeats: As above, of the sweeps.
        seed: Of sampling, of the order of ways, and of the bootstrap.

    Raises:
        ComparisonError: a value breaks its rule.
    """

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int = 64
    repeats: int = 1
    policies: tuple[str, ...] = DEFAULT_POLICIES
    prompt_lookup_num_tokens: int = 10
    batch_sizes: tuple[int, ...] = (1, 4, 16)
    contexts: tuple[int, ...] = (128, 512, 1024)
    sweep_new_tokens: int = 32
    sweep_repeats: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        self.generation()
        for name, least in (("sweep_new_tokens", 2), ("max_new_tokens", 2), ("sweep_repeats", 1)):
            _require(getattr(self, name) >= least, name, getattr(self, name), f">= {least}")
        lookup = self.prompt_lookup_num_tokens
        _require(lookup >= 0, "prompt_lookup_num_tokens", lookup, ">= 0; 0 leaves prompt lookup out")
        _require(bool(self.policies), "policies", self.policies, "one or more")
        _require(len(set(self.policies)) == len(self.policies), "policies", self.policies, "each named once")
        for policy in self.policies:
            split_policy(policy)
        for name in ("batch_sizes", "contexts"):
            points = getattr(self, name)
            _require(all(point >= 1 for point in points), name, points, "whole numbers >= 1")
            object.__setattr__(self, name, tuple(sorted(set(points))))

    def generation(self, policy: str | None = None, num_assistant_tokens: int | None = None) -> ComparisonSettings:
        """Of one call, as `dspark compare` has them."""
        return ComparisonSettings(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_new_tokens=self.max_new_tokens,
            policy=policy,
            num_assistant_tokens=num_assistant_tokens,
            repeats=self.repeats,
            seed=self.seed,
        )

    @property
    def is_greedy(self) -> bool:
        """Whether all ways must give the same text."""
        return self.temperature == 0

    def cells(self) -> Iterator[Cell]:
        """All cells, the main table first."""
        yield Cell("main", 1, None, self.max_new_tokens, stops_at_end=True, num_repeats=self.repeats)
        for size in self.batch_sizes:
            yield Cell("batch", size, None, self.sweep_new_tokens, stops_at_end=False, num_repeats=self.sweep_repeats)
        for context in self.contexts:
            yield Cell("context", 1, context, self.sweep_new_tokens, stops_at_end=False, num_repeats=self.sweep_repeats)


def split_policy(policy: str) -> tuple[str | None, int | None]:
    """Name, None for the drafter's own, and most drafts a round of `name` or `name:N`.

    Raises:
        ComparisonError: it is neither.
    """
    name, separator, number = policy.partition(":")
    is_number = number.isascii() and number.isdigit()
    if separator and not is_number:
        raise ComparisonError(f"policy must be a policy, or a policy and a number of drafts (full:3), got {policy!r}")
    num_drafts = int(number) if separator else None
    name_or_none = None if name == OWN_POLICY else name
    ComparisonSettings(policy=name_or_none, num_assistant_tokens=num_drafts)
    return name_or_none, num_drafts


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise ComparisonError(f"{name} must be {rule}, got {value!r}")
