"""Ways of generating that a bench compares: what generate() is called with, and which of them cannot run, and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from ...decoding.policies.registry import COST_POLICIES, policy_factory
from ...decoding.scheduler import policy_without_a_word, usable_profile
from ..compare import drafter_arguments
from ..loading import LoadedDrafter
from ..settings import ComparisonError
from .settings import BenchSettings, Cell, split_policy

WayKind = Literal["plain", "sibling", "prompt lookup", "drafter"]
# What every other way is compared with; its texts are the right ones.
BASELINE = "plain, dynamic cache"
STATIC = "plain, static cache"


@dataclass(frozen=True)
class WayFacts:
    """A way, for reports.

    Attributes:
        drafter: Name of the drafter or of the sibling model; None without one.
        policy: In force; None for what is no drafter of ours.
        num_draft_tokens: Most drafts a round; None where transformers decides.
        num_layers: Of the drafter.
        is_swept: Whether it runs in the sweeps too.
    """

    name: str
    kind: WayKind
    drafter: str | None = None
    policy: str | None = None
    num_draft_tokens: int | None = None
    num_layers: int | None = None
    is_swept: bool = False


@dataclass(frozen=True)
class Way:
    """A way that can run.

    Attributes:
        arguments: Of generate(), beside those that all ways share.
        assistant: Model that drafts; None without one.
        most_rows: Most rows of a batch; None: any number.
    """

    facts: WayFacts
    arguments: Mapping[str, Any] = field(default_factory=dict)
    assistant: Any = None
    most_rows: int | None = None

    @property
    def name(self) -> str:
        """Of its measurements."""
        return self.facts.name

    def runs_in(self, cell: Cell) -> bool:
        """Whether it is measured at this point."""
        if self.most_rows is not None and cell.num_rows > self.most_rows:
            return False
        return cell.kind == "main" or self.facts.is_swept


@dataclass(frozen=True)
class LeftOut:
    """A way that was asked for, or that others would expect, and that does not run."""

    name: str
    reason: str


def plain_ways() -> list[Way]:
    """Plain generation, on its dynamic and on its static cache."""
    return [
        Way(WayFacts(BASELINE, "plain", is_swept=True)),
        Way(WayFacts(STATIC, "plain", is_swept=True), {"cache_implementation": "static"}),
    ]


def lookup_ways(settings: BenchSettings) -> tuple[list[Way], list[LeftOut]]:
    """Prompt lookup, unless the settings leave it out."""
    num_tokens = settings.prompt_lookup_num_tokens
    if num_tokens == 0:
        return [], [LeftOut("prompt lookup", "the settings leave it out")]
    facts = WayFacts("prompt lookup", "prompt lookup", num_draft_tokens=num_tokens, is_swept=True)
    return [Way(facts, {"prompt_lookup_num_tokens": num_tokens}, most_rows=1)], []


def sibling_ways(
    name: str | None, sibling: PreTrainedModel | None, target: PreTrainedModel
) -> tuple[list[Way], list[LeftOut]]:
    """Assisted generation with a small model of the target's family.

    Raises:
        ComparisonError: its vocabulary is another one.
    """
    if name is None or sibling is None:
        reason = "no sibling model was given (--sibling); it needs a smaller model with the target's tokenizer"
        return [], [LeftOut("assisted generation", reason)]
    ours, theirs = (m.config.get_text_config(decoder=True).vocab_size for m in (target, sibling))
    if ours != theirs:
        raise ComparisonError(
            f"the sibling {name!r} has a vocabulary of {theirs} tokens, and the target one of {ours}; name a smaller "
            "model of the target's family, or leave --sibling out"
        )
    facts = WayFacts("assisted generation", "sibling", drafter=name)
    return [Way(facts, {"assistant_model": sibling}, assistant=sibling, most_rows=1)], []


def drafter_ways(
    drafters: Mapping[str, LoadedDrafter], target: PreTrainedModel, settings: BenchSettings, swept: Sequence[str]
) -> tuple[list[Way], list[LeftOut]]:
    """Each drafter under each policy that it can follow on this machine.

    Args:
        drafters: By name.
        swept: Names of those that run in the sweeps.

    Raises:
        ComparisonError: a drafter can follow none of the policies.
    """
    most_rows = max((cell.num_rows for cell in settings.cells()), default=1)
    ways: list[Way] = []
    left_out: list[LeftOut] = []
    for name, drafter in drafters.items():
        before = len(ways)
        for policy in settings.policies:
            way_name = f"{name}, {policy}"
            rows = most_rows if name in swept else 1
            found = _drafter_way(way_name, name, drafter, policy, target, settings, rows, is_swept=name in swept)
            if isinstance(found, LeftOut):
                left_out.append(found)
            elif not any(found.assistant is way.assistant and found.arguments == way.arguments for way in ways):
                ways.append(found)
        if len(ways) == before:
            reasons = "; ".join(f"{one.name}: {one.reason}" for one in left_out if one.name.startswith(f"{name}, "))
            raise ComparisonError(
                f"drafter {name!r} can follow none of the policies {', '.join(settings.policies)} ({reasons}); add "
                "--policy full, which every drafter can follow"
            )
    return ways, left_out


def _drafter_way(
    way_name: str,
    name: str,
    drafter: LoadedDrafter,
    policy: str,
    target: PreTrainedModel,
    settings: BenchSettings,
    most_rows: int,
    *,
    is_swept: bool,
) -> Way | LeftOut:
    asked, num_drafts = split_policy(policy)
    config = drafter.model.config
    num_slots: int = config.block_size
    if num_drafts is not None and num_drafts > num_slots:
        return LeftOut(way_name, f"its block has {num_slots} drafts")
    in_force = asked or policy_without_a_word(target, drafter.model, most_rows)
    has_confidence = getattr(config, "enable_confidence_head", False)
    if policy_factory(in_force, 0.0)().needs_confidence and not has_confidence:
        return LeftOut(way_name, f"policy {in_force} needs a confidence head, and it has none")
    if in_force in COST_POLICIES:
        found = usable_profile(target, drafter.model, most_rows)
        if found.profile is None:
            return LeftOut(way_name, f"policy {in_force} needs a throughput profile: {found.why_none}")
    arguments = drafter_arguments(config, settings.generation(in_force, num_drafts), in_force)
    facts = WayFacts(
        way_name,
        "drafter",
        drafter=name,
        policy=in_force,
        num_draft_tokens=num_drafts or num_slots,
        num_layers=getattr(config, "num_hidden_layers", None),
        is_swept=is_swept,
    )
    model: torch.nn.Module = drafter.model
    return Way(facts, {"assistant_model": model} | arguments, assistant=model)
