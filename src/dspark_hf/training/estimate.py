"""How long a training run will take and how much memory it needs, measured before it starts."""

import tempfile
import time
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..modeling_dspark import DSparkDraftModel
from .dataset import AnchorDataset, collate
from .feature_cache import feature_bytes
from .features import TargetReader
from .losses import CHUNK_BYTES
from .recipe import TrainingRequest
from .records import TrainingSequence
from .settings import DSparkTrainingArguments
from .trainer import DSparkTrainer

_BYTES_PER_PARAMETER = 16  # float32 weight, gradient and two moments
_CHUNK_COPIES = 4
_PROBE_TOKENS = 1024


@dataclass(frozen=True)
class Estimate:
    """Measured on this machine, before training.

    Attributes:
        num_steps: Optimiser steps of the run.
        num_anchors_per_step: Blocks in a typical step.
        step_s: Seconds of one.
        features_s: Seconds to compute the feature cache; 0 online, where it is a part of the step.
        memory_bytes: Weights of target and drafter, gradients, moments and logits; batches not counted.
        disk_bytes: Feature cache and two checkpoints.
    """

    num_steps: int
    num_anchors_per_step: int
    step_s: float
    features_s: float
    memory_bytes: int
    disk_bytes: int

    def lines(self) -> list[str]:
        """For people."""
        return [
            f"estimate: {self.num_steps} steps of {self.num_anchors_per_step} blocks at {self.step_s:.2f} s: "
            f"{_duration(self.num_steps * self.step_s)}, target features {_duration(self.features_s)}",
            f"estimate: {self.memory_bytes / 1e9:.1f} GB of memory, {self.disk_bytes / 1e9:.1f} GB of disk",
        ]


def estimate_run(
    request: TrainingRequest,
    drafter: DSparkDraftModel,
    target: PreTrainedModel,
    reader: TargetReader,
    sequences: list[TrainingSequence],
    *,
    num_cached_tokens: int = 0,
    num_steps: int | None = None,
) -> Estimate:
    """Time one batch of the target's features and one step on them; neither changes the drafter.

    Args:
        request: What is planned.
        drafter, target, reader: Ready to train.
        sequences: To train on.
        num_cached_tokens: Tokens whose features lie on disk already.
        num_steps: Steps of a run that is being resumed; None: from the request.
    """
    features_per_token_s, step_s, num_anchors = _probe(request, drafter, target, reader, sequences)
    num_tokens = sum(len(sequence) for sequence in sequences)
    is_online = request.features == "online"
    features_s = 0.0 if is_online else max(0, num_tokens - num_cached_tokens) * features_per_token_s
    if is_online:
        step_s += features_per_token_s * request.batch_size * num_tokens / len(sequences)
    config = drafter.config
    num_parameters = sum(parameter.numel() for parameter in drafter.parameters())
    target_bytes = sum(parameter.numel() * parameter.element_size() for parameter in target.parameters())
    cache_bytes = feature_bytes(num_tokens, len(config.target_layer_ids), config.hidden_size, target.dtype)
    return Estimate(
        num_steps=num_steps or _num_steps(request, len(sequences), step_s, features_s),
        num_anchors_per_step=num_anchors,
        step_s=step_s,
        features_s=features_s,
        memory_bytes=target_bytes + _BYTES_PER_PARAMETER * num_parameters + _CHUNK_COPIES * CHUNK_BYTES,
        disk_bytes=(0 if is_online else cache_bytes) + 2 * 3 * 4 * num_parameters,
    )


def _num_steps(request: TrainingRequest, num_sequences: int, step_s: float, features_s: float) -> int:
    if request.max_steps is not None:
        return request.max_steps
    if request.minutes is not None:
        return max(1, int((request.minutes * 60 - features_s) / step_s))
    return max(1, round(request.epochs * num_sequences / request.batch_size))


def _probe(
    request: TrainingRequest,
    drafter: DSparkDraftModel,
    target: PreTrainedModel,
    reader: TargetReader,
    sequences: list[TrainingSequence],
) -> tuple[float, float, int]:
    """Seconds of target features per token, seconds of a step, and blocks in it."""
    by_length = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    middle = len(by_length) // 2
    typical = by_length[max(0, middle - request.batch_size // 2) :][: request.batch_size]
    dataset = AnchorDataset(sequences, max_anchors=request.max_anchors, seed=request.seed)
    batch = {name: value.to(target.device) for name, value in collate([dataset[i] for i in typical]).items()}
    start = time.perf_counter()
    features = reader.read(batch["input_ids"][:, :_PROBE_TOKENS])
    _wait(target.device)
    features_s = (time.perf_counter() - start) / features.log_normalizer.numel()
    with tempfile.TemporaryDirectory() as folder:
        arguments = DSparkTrainingArguments(
            output_dir=folder, bf16=request.dtype == "bfloat16", use_cpu=target.device.type == "cpu", report_to=[]
        )
        trainer = DSparkTrainer(drafter, target, arguments)
    seconds = []
    for _ in range(2):  # the first one allocates
        inputs = batch | vars(reader.read(batch["input_ids"]))
        start = time.perf_counter()
        with trainer.compute_loss_context_manager():
            trainer.compute_loss(drafter, inputs).backward()
        _wait(target.device)
        seconds.append(time.perf_counter() - start)
    drafter.zero_grad()
    return features_s, seconds[-1], int((batch["anchors"] >= 0).sum())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes >= 120:
        return f"{minutes / 60:.1f} hours"
    return f"{minutes} minutes" if minutes else f"{seconds:.0f} s"
