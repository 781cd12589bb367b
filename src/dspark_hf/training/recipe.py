"""What a training run is asked to do, and the defaults that follow from the target's size."""

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .._machine import one_or_more
from ..config_rules import DRAFTER_TYPES
from ..configuration_autoregressive import AutoregressiveConfig
from ..configuration_dspark import DSparkConfig
from ..errors import TrainingDataError
from ..model.draft_vocab import offsets_of
from ..modeling_autoregressive import AutoregressiveDraftModel
from ..modeling_dspark import DSparkDraftModel
from .records import TrainingSequence

# Targets up to this many parameters get a shallow drafter: five layers would cost a large share of their forward.
SMALL_TARGET_PARAMETERS = 1_000_000_000
# Tokens below this id are common in any text with a byte-pair vocabulary; unseen ones fill the draft vocabulary last.
UNSEEN_TOKEN_COUNT = 1.0


# Held-out prompts that an evaluation decodes.
NUM_DECODE_PROMPTS = 4
KINDS = ("dspark", *DRAFTER_TYPES)
_ONLY_DSPARK = ("num_hidden_layers", "markov_rank", "markov_head_type")


@dataclass(frozen=True)
class TrainingRequest:
    """One call of `dspark train`; None leaves a choice to [`drafter_overrides`] or to the estimate.

    Attributes:
        target: Folder, Hub id or zoo name.
        data: Files or folders of answers; a single one may be given without a tuple.
        output: Folder of the drafter; checkpoints and features lie below it.
        drafter_type: `dspark`, or a baseline: `mtp` or `eagle3`.
        num_hidden_layers, block_size, markov_rank, markov_head_type: Fields of `DSparkConfig`.
        draft_vocab_size: Likewise; 0 means the whole vocabulary.
        epochs: Passes over the data; each draws its anchors anew. Ignored with `max_steps` or `minutes`.
        max_steps: Optimiser steps.
        minutes: Wall-clock time to fill, from the measured seconds per step.
        batch_size: Sequences per step.
        max_anchors: Blocks per sequence and step.
        learning_rate: Peak rate, reached after 4 % of the steps.
        head_learning_rate_multiplier: Of the sequential and confidence head.
        decay_fraction: Share of the steps, at the end, in which the rate falls to 0; before, it is constant.
        max_length: Tokens kept of a sequence.
        held_out_fraction: Share of the prompts that is evaluated, never trained on.
        num_evaluations: Evenly spaced, the last at the end; None: as many as take a fifth of the training's time.
        num_decode_prompts: Held-out prompts that each evaluation really decodes, greedy and at temperature 1; 0: none.
        features: `cache` or `online`.
        feature_cache: Folder of the cache; runs on the same data and target may share one. None: below `output`.
        max_cache_gb: Limit of the cache.
        dtype: Of the target and of products in training: bfloat16 or float32.
        device: As for `dspark compare`.
        initial_drafter: Folder to start from instead of the target's layers.
        restart: Forget the checkpoints below `output`.
        seed: Of weights, data order and anchors.
    """

    target: str
    data: tuple[str, ...]
    output: Path
    drafter_type: str = "dspark"
    num_hidden_layers: int | None = None
    block_size: int | None = None
    markov_rank: int | None = None
    markov_head_type: str | None = None
    draft_vocab_size: int | None = None
    epochs: float = 10.0
    max_steps: int | None = None
    minutes: float | None = None
    batch_size: int = 4
    max_anchors: int = 64
    learning_rate: float | None = None
    head_learning_rate_multiplier: float = 1.0
    decay_fraction: float = 0.25
    max_length: int = 2048
    held_out_fraction: float = 0.05
    num_evaluations: int | None = None
    num_decode_prompts: int = NUM_DECODE_PROMPTS
    features: str = "cache"
    feature_cache: Path | None = None
    max_cache_gb: float = 20.0
    dtype: str = "bfloat16"
    device: str = "auto"
    initial_drafter: str | None = None
    restart: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        self._read_paths()
        rules = [
            ("data", bool(self.data), "must name at least one file or folder"),
            ("drafter_type", self.drafter_type in KINDS, f"must be one of {KINDS}"),
            ("epochs", 0 < self.epochs < math.inf, "must be > 0 and finite"),
            ("max_steps", self.max_steps is None or self.max_steps >= 1, "must be >= 1"),
            ("minutes", self.minutes is None or 0 < self.minutes < math.inf, "must be > 0 and finite"),
            ("minutes", self.minutes is None or self.max_steps is None, "excludes max_steps; give one of them"),
            ("batch_size", self.batch_size >= 1, "must be >= 1"),
            ("max_anchors", self.max_anchors >= 1, "must be >= 1"),
            ("learning_rate", self.learning_rate is None or 0 < self.learning_rate < math.inf, "must be > 0"),
            ("head_learning_rate_multiplier", self.head_learning_rate_multiplier > 0, "must be > 0"),
            ("decay_fraction", 0 <= self.decay_fraction <= 0.96, "must lie between 0 and 0.96"),
            ("num_evaluations", self.num_evaluations is None or self.num_evaluations >= 1, "must be >= 1"),
            ("num_decode_prompts", self.num_decode_prompts >= 0, "must be >= 0"),
            ("max_length", self.max_length >= 4, "must be >= 4"),
            ("held_out_fraction", 0 < self.held_out_fraction < 1, "must lie between 0 and 1, both excluded"),
            ("features", self.features in ("cache", "online"), "must be cache or online"),
            ("max_cache_gb", 0 < self.max_cache_gb < math.inf, "must be > 0 and finite"),
            ("seed", 0 <= self.seed < 2**32, "must lie between 0 and 2**32 - 1"),
            ("num_hidden_layers", self.num_hidden_layers is None or self.num_hidden_layers >= 1, "must be >= 1"),
            ("block_size", self.block_size is None or self.block_size >= 1, "must be >= 1"),
            ("dtype", self.dtype in ("bfloat16", "float32"), "must be bfloat16 or float32"),
            ("draft_vocab_size", (self.draft_vocab_size or 0) >= 0, "must be >= 0; 0 means the whole vocabulary"),
        ]
        for name, holds, rule in rules:
            if not holds:
                raise TrainingDataError(f"{name} {rule}, got {getattr(self, name)!r}")
        shaped = ("num_hidden_layers", "block_size", "markov_rank", "markov_head_type", "draft_vocab_size")
        given = [name for name in shaped if getattr(self, name) is not None]
        foreign = [name for name in given if name in _ONLY_DSPARK]
        if self.drafter_type != "dspark" and foreign:
            raise TrainingDataError(
                f"{', '.join(foreign)} cannot be chosen for drafter_type {self.drafter_type!r}, which has one layer "
                "and no sequential head; leave that out"
            )
        if self.drafter_type == "mtp" and self.block_size not in (None, 1):
            raise TrainingDataError(f"block_size must be 1 for drafter_type 'mtp', got {self.block_size}; leave it out")
        if self.drafter_type != "dspark":
            given.append("drafter_type")
        if self.initial_drafter is not None and given:
            raise TrainingDataError(
                f"initial_drafter {self.initial_drafter!r} fixes {', '.join(given)}; leave that out, or start anew"
            )

    def _read_paths(self) -> None:
        data, output = one_or_more(self.data), one_or_more(self.output)
        if data is None:
            raise TrainingDataError(f"data must be a path, or a list of paths, got {self.data!r}")
        if output is None or len(output) != 1:
            raise TrainingDataError(f"output must be the path of a folder, got {self.output!r}")
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "output", Path(output[0]))
        if self.feature_cache is not None:
            object.__setattr__(self, "feature_cache", Path(self.feature_cache))

    @property
    def features_folder(self) -> Path:
        """Where the feature cache lies."""
        return self.output / "features" if self.feature_cache is None else self.feature_cache

    def must_not_change(self) -> dict[str, Any]:
        """The settings that a resumed run has to share with the run it continues."""
        free = {
            "target", "data", "output", "epochs", "max_steps", "minutes", "features", "feature_cache", "max_cache_gb",
            "device", "initial_drafter", "restart", "num_evaluations", "num_decode_prompts",
            "drafter_type",  # the drafter's config, compared too, says it
        }  # fmt: skip
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in free}


def drafter_overrides(request: TrainingRequest, target: PreTrainedModel) -> dict[str, Any]:
    """Fields of `DSparkConfig` that the request fixes or the target's size suggests."""
    num_parameters = sum(parameter.numel() for parameter in target.parameters())
    is_small = num_parameters <= SMALL_TARGET_PARAMETERS
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    overrides = _backbone_overrides(request, is_small=is_small, is_cpu=target.device.type == "cpu")
    if _has_attention_bias(target):
        overrides["attention_bias"] = True
    wanted = request.draft_vocab_size
    if wanted is None:
        wanted = min(8192 if is_small else 32768, vocab_size)
    if wanted > vocab_size:
        raise TrainingDataError(
            f"draft_vocab_size must be at most the target's vocabulary of {vocab_size}, or 0 for all, got {wanted}"
        )
    overrides["draft_vocab_size"] = wanted if 0 < wanted < vocab_size else None
    return overrides


def _backbone_overrides(request: TrainingRequest, *, is_small: bool, is_cpu: bool) -> dict[str, Any]:
    # A CPU pays for each further token of a step earlier than a GPU does.
    block_size = request.block_size or (5 if is_cpu else 7)
    if request.drafter_type == "mtp":
        return {"drafter_type": "mtp"}
    if request.drafter_type == "eagle3":
        return {"drafter_type": "eagle3", "block_size": block_size}
    overrides: dict[str, Any] = {
        "num_hidden_layers": request.num_hidden_layers or (2 if is_small else 5),
        "block_size": block_size,
        "markov_rank": (128 if is_small else 256) if request.markov_rank is None else request.markov_rank,
        "markov_head_type": request.markov_head_type or "vanilla",
    }
    if overrides["markov_rank"] == 0:
        overrides["confidence_head_with_markov"] = False
    return overrides


def _has_attention_bias(target: PreTrainedModel) -> bool:
    """Whether the target's query projections have biases, which copied draft layers then need too (Qwen 2)."""
    layers: Any = getattr(target.base_model, "layers", None)
    attention = getattr(layers[-1], "self_attn", None) if layers is not None and len(layers) else None
    return getattr(getattr(attention, "q_proj", None), "bias", None) is not None


def peak_learning_rate(request: TrainingRequest, target: PreTrainedModel) -> float:
    """The request's, or by the target's size: measured on SmolLM2-135M, and the released recipe's for large ones."""
    if request.learning_rate is not None:
        return request.learning_rate
    num_parameters = sum(parameter.numel() for parameter in target.parameters())
    return 3e-3 if num_parameters <= SMALL_TARGET_PARAMETERS else 6e-4


def new_drafter(
    request: TrainingRequest,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sequences: list[TrainingSequence],
) -> DSparkDraftModel:
    """A float32 drafter for `target` with random weights and its draft vocabulary chosen from `sequences`."""
    is_block = request.drafter_type == "dspark"
    config_class = DSparkConfig if is_block else AutoregressiveConfig
    config = config_class.from_target(target.config, tokenizer=tokenizer, **drafter_overrides(request, target))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(request.seed)
        drafter = DSparkDraftModel(config) if is_block else AutoregressiveDraftModel(config)
    if config.draft_vocab_size is not None:
        stop_ids = target.generation_config.eos_token_id if target.generation_config else None
        ids = choose_draft_vocabulary(sequences, config.vocab_size, config.draft_vocab_size, stop_ids)
        drafter.d2t.copy_(offsets_of(ids))
    return drafter


def choose_draft_vocabulary(
    sequences: list[TrainingSequence],
    vocab_size: int,
    draft_vocab_size: int,
    stop_ids: int | list[int] | None = None,
) -> Tensor:
    """Stop tokens, what answers use most, then the lowest ids; int64 `[draft_vocab_size]`, increasing.

    Low ids of byte-pair vocabularies are the frequent ones of the tokenizer's own, much larger text.
    """
    prior = UNSEEN_TOKEN_COUNT * torch.arange(vocab_size, 0, -1, dtype=torch.float64) / (vocab_size + 1)
    score = answer_counts(sequences, vocab_size) + prior
    if stop_ids is not None:  # processors speak of them
        score[[stop_ids] if isinstance(stop_ids, int) else stop_ids] = torch.inf
    return score.topk(draft_vocab_size).indices.sort().values


def coverage(sequences: list[TrainingSequence], token_ids: Tensor, vocab_size: int) -> float:
    """Share of the answers' tokens that are among `token_ids`."""
    counts = answer_counts(sequences, vocab_size)
    return float(counts[token_ids].sum() / counts.sum())


def answer_counts(sequences: list[TrainingSequence], vocab_size: int) -> Tensor:
    """How often each token occurs in the answers, float64 `[vocab]`."""
    tokens = torch.cat([sequence.input_ids[sequence.loss_mask] for sequence in sequences])
    return torch.bincount(tokens, minlength=vocab_size).double()
