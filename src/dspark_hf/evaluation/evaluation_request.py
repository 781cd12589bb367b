"""What `evaluate_drafters` is asked for."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from .cuts import THRESHOLDS
from .settings import ComparisonError

# A name of a drafter before its folder, as in `dflash=runs/a`.
_NAMED = re.compile(r"(?P<name>[\w.+ -]+)=(?P<source>.+)")


@dataclass(frozen=True)
class DrafterSource:
    """A drafter to be loaded.

    Attributes:
        source: As for `load_drafter`.
        name: In the report; None: the source's.
    """

    source: str | None
    name: str | None = None

    @classmethod
    def parse(cls, text: str) -> "DrafterSource":
        """From `NAME=SOURCE` or a source alone; a folder that exists is a source, whatever it is called."""
        found = None if Path(text).expanduser().is_dir() else _NAMED.fullmatch(text)
        return cls(text) if found is None else cls(found["source"], found["name"].strip())


@dataclass(frozen=True)
class DecodingRequest:
    """Prompts that the target is to answer with every drafter in turn.

    Attributes:
        prompts: Sources as for `load_prompt_dataset`.
        split: Of data sets of the Hub, and of those that `datasets` saved in splits.
        num_prompts: Most taken of each source, from its start; None: all.
        temperatures: 0 is greedy; each is measured by itself.
        top_p, top_k: Cuts of both laws where the temperature is above 0; None cuts nothing.
        max_new_tokens: Most new tokens of a prompt.
        max_prompt_tokens: Longer prompts are left out.
        batch_size: Prompts decoded together.
        rounds_folder: Where rounds are kept, so that an interrupted run goes on; None: nowhere.

    Raises:
        ComparisonError: a value breaks its rule.
    """

    prompts: tuple[str, ...]
    split: str = "train"
    num_prompts: int | None = None
    temperatures: tuple[float, ...] = (0.0,)
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int = 128
    max_prompt_tokens: int = 1024
    batch_size: int = 8
    rounds_folder: Path | None = None

    def __post_init__(self) -> None:
        require(bool(self.prompts), "prompts", self.prompts, "at least one source")
        for name in ("num_prompts", "max_prompt_tokens", "batch_size", "top_k"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, ">= 1")
        require(self.max_new_tokens >= 2, "max_new_tokens", self.max_new_tokens, ">= 2, the first needs no draft")
        given = self.temperatures
        holds = bool(given) and len(set(given)) == len(given) and all(0 <= one < math.inf for one in given)
        require(holds, "temperatures", given, "different numbers >= 0; 0 is greedy")
        require(self.top_p is None or 0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        for name in ("top_p", "top_k"):
            value = getattr(self, name)
            holds = value is None or any(one > 0 for one in given)
            require(holds, name, value, "left out where every temperature is 0, which is greedy")


@dataclass(frozen=True)
class EvaluationRequest:
    """Which drafters to evaluate, on what: texts to be replayed or prompts to be decoded.

    Attributes:
        target: As for `load_target`.
        drafters: The last one is the baseline of the paired differences.
        texts: Files or folders of the target's answers, with the columns that `dspark train data` writes.
        decoding: Prompts instead, for drafters of any kind, and any sampling.
        thresholds: On the confidence, to be tried.
        dtype, device: As for `load_target`.
        seed: Of sampling and resampling.

    Raises:
        ComparisonError: a value breaks its rule.
    """

    target: str
    drafters: tuple[DrafterSource, ...] = field(default=(DrafterSource(None),))
    texts: tuple[Path, ...] = ()
    decoding: DecodingRequest | None = None
    thresholds: tuple[float, ...] = THRESHOLDS
    dtype: str = "bfloat16"
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        require(bool(self.drafters), "drafters", self.drafters, "at least one")
        if bool(self.texts) == (self.decoding is not None):
            raise ComparisonError(
                "give either texts of the target (--texts), which are replayed, or prompts (--prompts), which are "
                f"decoded with each drafter; got {'both' if self.texts else 'neither'}"
            )
        names = [one.name for one in self.drafters if one.name is not None]
        require(len(set(names)) == len(names), "names of drafters", names, "different")
        given = self.thresholds
        holds = len(set(given)) == len(given) and all(0 <= one <= 1 for one in given)
        require(holds, "thresholds", given, "different probabilities, 0 to 1")
        require(0 <= self.seed < 2**32, "seed", self.seed, "0 to 2**32 - 1")


def require(holds: bool, name: str, value: object, rule: str) -> None:
    """Raise ComparisonError unless a value holds its rule."""
    if not holds:
        raise ComparisonError(f"{name} must be {rule}, got {value!r}")
