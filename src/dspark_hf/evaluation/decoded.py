"""Drafters judged by decoding prompts with generate(): of any kind, and under any sampling.

Every round of policy `full` is kept as it ends. Where a drafter's rounds can be replayed on texts of the target, the
replay needs less time for the same numbers and averages over what sampling leaves to chance; decoding needs nothing
of a drafter but that generate() takes it.
"""

import re
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..decoding.calibrate import SlotCalibration, calibration_for
from ..errors import CalibrationError
from ..fitting.proposals import Proposals
from ..prompts import Prompt
from ..training.response_prompts import load_prompt_dataset
from .calibration_quality import SlotQuality, slot_qualities
from .cuts import CutPlan, recorded
from .evaluation_request import DecodingRequest
from .proposals import RecordingSettings, proposals_of_rounds, record_rounds
from .replay import ReplayedText
from .rounds_file import PromptRounds
from .settings import ComparisonError


@dataclass(frozen=True)
class DecodedDrafter:
    """What one drafter did at one temperature.

    Attributes:
        texts: By prompt, in the order of the prompts.
        plan: The cuts that their sums are of.
        rounds: The same as recorded.
    """

    texts: list[ReplayedText]
    plan: CutPlan
    rounds: list[PromptRounds]

    def reliability(self, *, seed: int) -> list[SlotQuality] | None:
        """Predicted against realised survival by slot (paper, Figure 6); None without confidences."""
        if not any(any(one.logits) for one in self.rounds):
            return None
        found = proposals_of_rounds(self.rounds, "this evaluation")
        size = self.plan.num_slots  # files have a place for every slot of the drafter, verified or not
        proposals = Proposals(
            found.logits[:, :size], found.is_accepted[:, :size], found.is_verified[:, :size], found.prompt
        )
        own = self.plan.calibration or SlotCalibration(torch.ones(size), torch.zeros(size))
        return slot_qualities(proposals, own, seed=seed)


def load_eval_prompts(request: DecodingRequest) -> list[Prompt]:
    """Prompts of all sources; ids without a data set before a slash get their source's name there.

    Raises:
        TrainingDataError: as for `load_prompt_dataset`.
        ComparisonError: two prompts have the same id.
    """
    prompts: dict[str, Prompt] = {}
    for source in request.prompts:
        name = Path(source).expanduser().stem
        for prompt in load_prompt_dataset(source, split=request.split, max_prompts=request.num_prompts):
            known = prompt.id if "/" in prompt.id else f"{name}/{prompt.id}"
            if known in prompts and prompts[known].messages != prompt.messages:
                raise ComparisonError(f"two prompts have the id {known!r}; give each data set a name of its own")
            prompts[known] = Prompt(known, prompt.messages)
    return list(prompts.values())


def decode_drafter(
    target: PreTrainedModel,
    drafter: Any,
    name: str,
    prompts: Mapping[str, Sequence[int]],
    request: DecodingRequest,
    temperature: float,
    *,
    thresholds: tuple[float, ...],
    folder: Path,
    seed: int,
    show_progress: bool = False,
) -> DecodedDrafter:
    """Decode all prompts with one drafter.

    Args:
        target, drafter: Loaded; the drafter is anything that generate() takes through this package.
        name: Of the drafter, for its file.
        prompts: Token ids by id.
        request: How to decode.
        temperature: Of this run.
        thresholds: To be tried.
        folder: For the file of rounds.
        seed: Of sampling.

    Raises:
        CalibrationError: as for `record_rounds`.
    """
    is_sampled = temperature > 0
    settings = RecordingSettings(
        temperature=temperature,
        top_p=request.top_p if is_sampled else None,
        top_k=request.top_k if is_sampled else None,
        max_new_tokens=request.max_new_tokens,
        batch_size=request.batch_size,
        seed=seed,
    )
    path = folder / f"{slug(name)}-t{temperature:g}.jsonl"
    found = record_rounds(target, drafter, prompts, path, settings, show_progress=show_progress)
    by_id = {one.id: one for one in found}
    rounds = [by_id[name] for name in prompts]
    num_slots = max((n for one in rounds for n in one.num_verified), default=0)
    if num_slots == 0:
        raise CalibrationError(f"{name} drafted nothing for {len(rounds)} prompts; allow more new tokens")
    has_confidence = any(any(one.logits) for one in rounds)
    calibration = None
    if has_confidence:
        calibration = calibration_for(drafter.config, settings.generation_config(target))
    plan = CutPlan(num_slots, thresholds if has_confidence else (), calibration)
    return DecodedDrafter([decoded_text(one, plan, has_confidence) for one in rounds], plan, rounds)


def decoded_text(rounds: PromptRounds, plan: CutPlan, has_confidence: bool) -> ReplayedText:
    """One prompt's rounds in the form that replayed texts have: what happened in place of what was expected.

    Raises:
        CalibrationError: the rounds come from an older release, which did not count tokens.
    """
    if rounds.num_new_tokens is None:
        raise CalibrationError("the rounds were recorded by an older release, without tokens; name another folder")
    size, num_rounds = plan.num_slots, len(rounds.num_verified)
    verified, accepted = (torch.tensor(n, dtype=torch.long) for n in (rounds.num_verified, rounds.num_accepted))
    slots = torch.arange(size)
    acceptance = (slots < accepted[:, None]).double()
    weight = ((slots < verified[:, None]) & (slots <= accepted[:, None])).double()
    logits = None
    if has_confidence:
        logits = torch.tensor(rounds.logits, dtype=torch.float32).reshape(num_rounds, -1)[:, :size]
        logits = logits if num_rounds else logits.new_zeros(0, size)
    num_tokens = max(0, rounds.num_new_tokens - 1)  # the first comes with the prompt's forward
    tokens = _tokens_by_round(accepted, num_tokens - rounds.num_plain)
    return ReplayedText(
        id=rounds.id,
        num_tokens=num_tokens,
        num_rounds=float(num_rounds + rounds.num_plain),
        reached=weight.sum(dim=0),
        accepted=(weight * acceptance).sum(dim=0),
        confidence=None if logits is None else logits.sigmoid(),
        acceptance=acceptance,
        label=acceptance,
        weight=weight,
        cuts=recorded(plan, logits, verified, accepted, tokens, rounds.num_plain),
    )


def _tokens_by_round(num_accepted: Tensor, num_tokens: int) -> Tensor:
    """Tokens int64 `[rounds]` that rounds committed, `num_tokens` in all: a stop cuts the last ones off."""
    end = (num_accepted + 1).cumsum(dim=0)
    return end.clamp(max=num_tokens) - (end - num_accepted - 1).clamp(max=num_tokens)


@contextmanager
def folder_for(rounds_folder: Path | None) -> Iterator[Path]:
    """The folder of rounds, or one that is gone afterwards."""
    if rounds_folder is not None:
        yield rounds_folder.expanduser()
        return
    with tempfile.TemporaryDirectory(prefix="dspark-rounds-") as name:
        yield Path(name)


def slug(name: str) -> str:
    """A drafter's name as part of a file's name, different for different names."""
    plain = re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.").lower()
    return plain if plain == name else f"{plain or 'drafter'}-{zlib.crc32(name.encode()):08x}"
