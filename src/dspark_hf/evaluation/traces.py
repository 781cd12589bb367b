"""Acceptance traces: what a drafter was sure of and what the target accepted, round by round, without the models.

Schedules are compared on them. A draft that is cut at `ell` drafts keeps `min(num_accepted, ell)` of them, exactly,
since a draft is judged from left to right. What comes next depends on the layout:

    positions  a round for every token of a text of the target. A round that commits n tokens goes on n tokens later, so
               that any schedule is replayed on the text as it would run: what a short draft does not reach, the next
               rounds come to.
    rounds     the rounds of one run that verified whole drafts. The next round is the next one recorded, whatever was
               cut: schedules that cut leave out easy stretches, and look a little worse than they are.

One JSONL file per recording: the first line says where the rounds come from and how logits become survival, each other
one holds a prompt.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ..decoding.calibrate import SlotCalibration, calibrate
from .scrub import scrub_all
from .settings import ComparisonError

FORMAT_VERSION = 1
DECIMALS = 5

Layout: TypeAlias = Literal["positions", "rounds"]
Floats: TypeAlias = NDArray[np.float32]
Counts: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class TraceRound:
    """One whole draft.

    Attributes:
        survival: `a_k` of each slot as a policy sees it, after calibration.
        confidence_logits: Raw logits of the confidence head, one a slot.
        num_accepted: Drafts that the target accepted, had it verified all (bonus token not counted).
    """

    survival: tuple[float, ...]
    confidence_logits: tuple[float, ...]
    num_accepted: int

    def kept(self, length: int) -> int:
        """Drafts that are accepted when only the first `length` are verified."""
        return min(self.num_accepted, length)


class Step(NamedTuple):
    """What a round comes to: where the next one begins, drafts accepted, tokens committed."""

    place: int
    num_accepted: int
    num_tokens: int


@dataclass(frozen=True, eq=False)
class PromptTrace:
    """The rounds of one prompt.

    Attributes:
        id, domain: Of the prompt; the domain is the part of the id before the slash unless told otherwise.
        prompt_length: Tokens of the prompt.
        layout: See the module.
        confidence_logits: float32 `[places, slots]`, raw.
        conditional: float32 `[places, slots]`, `c_k` after calibration.
        survival: float32 `[places, slots]`, `a_k`, their products.
        num_accepted: int64 `[places]`, of the whole draft.
    """

    id: str
    domain: str
    prompt_length: int
    layout: Layout
    confidence_logits: Floats
    conditional: Floats
    survival: Floats
    num_accepted: Counts

    def __len__(self) -> int:
        return len(self.num_accepted)

    def __getitem__(self, place: int) -> TraceRound:
        logits, survival = self.confidence_logits[place].tolist(), self.survival[place].tolist()
        return TraceRound(tuple(survival), tuple(logits), int(self.num_accepted[place]))

    @property
    def num_tokens(self) -> int:
        """Tokens that the rounds of whole drafts commit."""
        return len(self) if self.layout == "positions" else len(self) + int(self.num_accepted.sum())

    def num_rounds(self, length: int) -> int:
        """Rounds that verify `length` drafts each, from the first place to the last."""
        place, number = 0, 0
        while place < len(self):
            place, number = self.step(place, length).place, number + 1
        return number

    def step(self, place: int, length: int) -> Step:
        """The round at `place` when `length` of its drafts are verified; the prompt is done at `len(self)`."""
        num_accepted = min(int(self.num_accepted[place]), length)
        if self.layout == "rounds":
            return Step(place + 1, num_accepted, num_accepted + 1)
        following = min(place + num_accepted + 1, len(self))
        return Step(following, num_accepted, following - place)


@dataclass(frozen=True, eq=False)
class AcceptanceTraces:
    """The prompts of one recording.

    Attributes:
        prompts: One at least, all with the same number of slots and the same layout.
        mode: `greedy` or `sampled`.
        calibration: What made survival of logits; None: the logits as they are.
        source: Where they come from: target, drafter, settings, provenance; for JSON.

    Raises:
        ComparisonError: there is no prompt, or they differ in slots or layout.
    """

    prompts: tuple[PromptTrace, ...]
    mode: str
    calibration: SlotCalibration | None = None
    source: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shapes = {(prompt.survival.shape[1], prompt.layout) for prompt in self.prompts}
        if len(shapes) != 1:
            raise ComparisonError(
                f"traces need prompts, all of one number of slots and one layout, got {sorted(shapes)}; record them in "
                "one run"
            )

    @property
    def num_slots(self) -> int:
        """gamma."""
        return int(self.prompts[0].survival.shape[1])

    @property
    def layout(self) -> Layout:
        """Of all prompts."""
        return self.prompts[0].layout

    @property
    def domains(self) -> tuple[str, ...]:
        """Sorted."""
        return tuple(sorted({prompt.domain for prompt in self.prompts}))

    def select(self, keep: Callable[[PromptTrace], bool]) -> "AcceptanceTraces":
        """The prompts that are to be kept; ComparisonError if there is none."""
        return replace(self, prompts=tuple(prompt for prompt in self.prompts if keep(prompt)))

    def halves(self, *, seed: int) -> tuple["AcceptanceTraces", "AcceptanceTraces"]:
        """Two halves of each domain's prompts, to tune on and to judge on.

        Raises:
            ComparisonError: no domain has two prompts.
        """
        rng = np.random.default_rng(seed)
        first: set[str] = set()
        for domain in self.domains:
            ids = [prompt.id for prompt in self.prompts if prompt.domain == domain]
            first.update(ids[i] for i in rng.permutation(len(ids))[: len(ids) // 2])
        if not first:
            raise ComparisonError(
                f"traces of {len(self.prompts)} prompts have no domain with two of them, so none to tune on; record "
                "more"
            )
        return self.select(lambda prompt: prompt.id in first), self.select(lambda prompt: prompt.id not in first)

    def with_calibration(self, calibration: SlotCalibration | None) -> "AcceptanceTraces":
        """The same rounds, seen by policies through another calibration of at least as many slots."""
        prompts = tuple(
            prompt_trace(
                prompt.id,
                prompt.confidence_logits,
                prompt.num_accepted,
                layout=prompt.layout,
                calibration=calibration,
                domain=prompt.domain,
                prompt_length=prompt.prompt_length,
            )
            for prompt in self.prompts
        )
        return replace(self, prompts=prompts, calibration=calibration)


def prompt_trace(
    id: str,
    confidence_logits: Sequence[Sequence[float]] | Floats,
    num_accepted: Sequence[int] | Counts,
    *,
    layout: Layout,
    calibration: SlotCalibration | None = None,
    domain: str | None = None,
    prompt_length: int = 1,
) -> PromptTrace:
    """A prompt from logits `[places, slots]` and accepted drafts `[places]`.

    Raises:
        ComparisonError: shapes do not fit, a logit is not finite, or a count is outside 0 to the number of slots.
    """
    logits = np.array(confidence_logits, dtype=np.float32)
    counts = np.array(num_accepted, dtype=np.int64)
    if logits.ndim != 2 or not logits.size or counts.shape != logits.shape[:1] or not np.isfinite(logits).all():
        raise ComparisonError(
            f"prompt {id!r}: a trace needs finite logits [places, slots] and as many accepted counts, got "
            f"{logits.shape} and {counts.shape}"
        )
    if counts.min() < 0 or counts.max() > logits.shape[1]:
        raise ComparisonError(
            f"prompt {id!r}: accepted drafts must be 0 to {logits.shape[1]}, got {counts.min()} to {counts.max()}"
        )
    confidence = calibrate(torch.from_numpy(logits), calibration)
    assert confidence.conditional is not None and confidence.survival is not None
    return PromptTrace(
        id=id,
        domain=id.split("/")[0] if domain is None else domain,
        prompt_length=prompt_length,
        layout=layout,
        confidence_logits=logits,
        conditional=confidence.conditional.numpy(),
        survival=confidence.survival.numpy(),
        num_accepted=counts,
    )


def save_traces(path: Path, traces: AcceptanceTraces) -> None:
    """Write a recording in one step.

    Raises:
        OSError: it cannot be written.
    """
    header = {
        "kind": "traces",
        "format_version": FORMAT_VERSION,
        "mode": traces.mode,
        "layout": traces.layout,
        "calibration": None if traces.calibration is None else [v.tolist() for v in vars(traces.calibration).values()],
        "source": scrub_all(dict(traces.source)),
    }
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("x", encoding="utf-8") as file:
            for line in (header, *map(_line, traces.prompts)):
                file.write(json.dumps(line) + "\n")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _line(prompt: PromptTrace) -> dict[str, Any]:
    return {
        "id": prompt.id,
        "domain": prompt.domain,
        "prompt_length": prompt.prompt_length,
        "num_accepted": prompt.num_accepted.tolist(),
        "confidence_logits": [[round(v, DECIMALS) for v in values] for values in prompt.confidence_logits.tolist()],
    }


def load_traces(path: Path) -> AcceptanceTraces:
    """Read what `save_traces` wrote.

    Raises:
        ComparisonError: it cannot be read, or is something else.
    """
    try:
        with path.open(encoding="utf-8") as file:
            header = json.loads(next(file, ""))
            if header["kind"] != "traces" or header["format_version"] != FORMAT_VERSION:
                raise ValueError(f"it is {header['kind']!r} of format {header['format_version']!r}")
            if header["layout"] not in ("positions", "rounds"):
                raise ValueError(f"its layout is {header['layout']!r}")
            maps = header["calibration"]
            calibration = (
                None if maps is None else SlotCalibration(*(torch.tensor(v, dtype=torch.float32) for v in maps))
            )
            prompts = tuple(_parsed(file, header["layout"], calibration))
        return AcceptanceTraces(prompts, str(header["mode"]), calibration, dict(header["source"]))
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ComparisonError(f"{path} cannot be read as traces ({what}); write it with `dspark traces`") from error


def _parsed(lines: Iterable[str], layout: Layout, calibration: SlotCalibration | None) -> Iterable[PromptTrace]:
    for line in lines:
        found = json.loads(line)
        yield prompt_trace(
            str(found["id"]),
            found["confidence_logits"],
            found["num_accepted"],
            layout=layout,
            calibration=calibration,
            domain=str(found["domain"]),
            prompt_length=int(found["prompt_length"]),
        )
