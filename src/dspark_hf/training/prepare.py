"""What a training run needs before its first step: target, data, and a drafter with its first weights."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..configuration_autoregressive import AutoregressiveConfig
from ..decoding.target_refusals import refuse_target
from ..errors import TrainingDataError
from ..evaluation.loading import load_drafter, load_target
from ..modeling_dspark import DSparkDraftModel
from .features import TargetReader
from .initialise import initialise_from_target
from .recipe import TrainingRequest, coverage, new_drafter
from .records import TrainingSequence, load_sequences, split_held_out

_SAMPLE_SEQUENCES = 8

Echo = Callable[[str], None]


@dataclass(frozen=True)
class Prepared:
    """Everything a run needs before its first step."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: DSparkDraftModel
    sequences: list[TrainingSequence]
    train: list[TrainingSequence]
    held_out: list[TrainingSequence]
    reader: TargetReader
    sample_ids: Tensor  # int64 [1, length], ordinary text


def prepare(request: TrainingRequest, echo: Echo) -> Prepared:
    """Load the target, read and split the data, and make the drafter.

    Raises:
        TrainingDataError: the data cannot be used, or give no held-out part.
        IncompatibleTargetError: no drafter can be trained for this target.
        ComparisonError, ZooError: target or initial drafter cannot be loaded.
    """
    target, tokenizer = load_target(request.target, request.dtype, request.device)
    if target.device.index:
        raise TrainingDataError(
            f"training uses the first visible device, got {target.device}; make it the first one with "
            f"CUDA_VISIBLE_DEVICES={target.device.index}"
        )
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    sequences = load_sequences(list(request.data), vocab_size=vocab_size, max_length=request.max_length)
    train, held_out = split_held_out(sequences, request.held_out_fraction)
    if not train or not held_out:
        raise TrainingDataError(
            f"{len(sequences)} sequences give {len(train)} for training and {len(held_out)} held out; more prompts, or "
            f"another held_out_fraction (--held-out-fraction) than {request.held_out_fraction}, would give both"
        )
    sample = max(train[:_SAMPLE_SEQUENCES], key=len).input_ids[None].to(target.device)
    if request.initial_drafter is None:
        drafter = new_drafter(request, target, tokenizer, train)
        refuse_target(target, drafter)
        drafter.to(target.device)  # type: ignore[arg-type]
        if initialise_from_target(drafter, target, sample):
            echo(f"draft layers start as copies of the target's last {drafter.config.num_hidden_layers}")
    else:
        loaded = load_drafter(request.initial_drafter, target, request.target, tokenizer, seed=request.seed)
        drafter = loaded.model.float()
        drafter.config.calibration = None  # of weights that training is about to change
    for line in _describe(drafter, train, held_out):
        echo(line)
    reader = TargetReader(target, drafter.config)
    reader.check_law(sample)
    return Prepared(target, tokenizer, drafter, sequences, train, held_out, reader, sample)


def _describe(drafter: DSparkDraftModel, train: list[TrainingSequence], held_out: list[TrainingSequence]) -> list[str]:
    config = drafter.config
    num_answer_tokens = sum(int(sequence.loss_mask.sum()) for sequence in train)
    lines = [
        f"{len(train)} sequences with {num_answer_tokens} answer tokens to train on, {len(held_out)} held out",
        f"drafter: {_kind_of(drafter)}, gamma {config.block_size}, "
        f"{sum(p.numel() for p in drafter.parameters()) / 1e6:.1f} M parameters",
    ]
    if (ids := drafter.draft_token_ids) is not None:
        shares = [coverage(part, ids.cpu(), config.vocab_size) for part in (train, held_out)]
        lines.append(
            f"draft vocabulary: {len(ids)} of {config.vocab_size} tokens, {shares[0]:.1%} of the training answers' "
            f"tokens, {shares[1]:.1%} of the held-out answers'"
        )
    return lines


def _kind_of(drafter: DSparkDraftModel) -> str:
    config = drafter.config
    if isinstance(config, AutoregressiveConfig):
        return f"{config.drafter_type}, one layer"
    head = config.markov_head_type if config.markov_rank else "none"
    return f"{config.num_hidden_layers} layers, head {head} of rank {config.markov_rank}"
