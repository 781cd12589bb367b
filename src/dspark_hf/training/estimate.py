"""How long a training run will take and how much memory it needs, measured before it starts."""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .dataset import AnchorDataset, collate
from .feature_cache import feature_bytes, layers_to_cache
from .losses import chunk_bytes
from .prepare import Prepared
from .recipe import TrainingRequest
from .settings import DSparkTrainingArguments
from .trainer import DSparkTrainer

_BYTES_PER_PARAMETER = 16  # float32 weight, gradient and two moments
_CHUNK_COPIES = 4
# Evaluations are evenly spaced; without a number from the user as many as take this share of the training itself.
MAX_EVALUATIONS = 8
EVALUATION_SHARE = 0.2


@dataclass(frozen=True)
class Estimate:
    """Measured on this machine, before training.

    Attributes:
        num_steps: Optimiser steps of the run.
        num_anchors_per_step: Blocks in a typical step.
        step_s: Seconds of one.
        features_s: Seconds to compute the feature cache; 0 online, where it is a part of the step.
        evaluation_s: Seconds of one evaluation.
        num_evaluations: Of the run.
        memory_bytes: Weights of target and drafter, gradients, moments and logits; batches not counted.
        disk_bytes: Feature cache and two checkpoints.
    """

    num_steps: int
    num_anchors_per_step: int
    step_s: float
    features_s: float
    evaluation_s: float
    num_evaluations: int
    memory_bytes: int
    disk_bytes: int

    def lines(self) -> list[str]:
        """For people."""
        return [
            f"estimate: {self.num_steps} steps of {self.num_anchors_per_step} blocks at {self.step_s:.2f} s: "
            f"{_duration(self.num_steps * self.step_s)}, evaluations ({self.num_evaluations}) "
            f"{_duration(self.num_evaluations * self.evaluation_s)}, target features {_duration(self.features_s)}",
            f"estimate: {self.memory_bytes / 1e9:.1f} GB of memory, {self.disk_bytes / 1e9:.1f} GB of disk",
        ]


def estimate_run(
    request: TrainingRequest, prepared: Prepared, *, num_cached_tokens: int = 0, num_steps: int | None = None
) -> Estimate:
    """Time one batch of the target's features, one step on them and one decoded text; none changes the drafter.

    Args:
        request: What is planned.
        prepared: Target, data and drafter.
        num_cached_tokens: Tokens whose features lie on disk already.
        num_steps: Steps of a run that is being resumed; None: from the request.
    """
    probe = _probe(request, prepared)
    num_sequences = len(prepared.train)
    num_tokens = sum(len(sequence) for sequence in prepared.sequences)
    step_s, features_s = probe.step_s, 0.0
    if request.features == "online":
        step_s += probe.features_per_token_s * request.batch_size * num_tokens / len(prepared.sequences)
    else:
        features_s = max(0, num_tokens - num_cached_tokens) * probe.features_per_token_s
    # A step without its backward, for each held-out batch.
    evaluation_s = probe.decode_s + 0.4 * step_s * len(prepared.held_out) / request.batch_size
    config = prepared.drafter.config
    num_parameters = sum(parameter.numel() for parameter in prepared.drafter.parameters())
    target = prepared.target
    target_bytes = sum(parameter.numel() * parameter.element_size() for parameter in target.parameters())
    num_layers = len(layers_to_cache(request.features_folder, config))
    cache_bytes = feature_bytes(num_tokens, num_layers, config.hidden_size, target.dtype)
    if num_steps is None:
        num_steps = _num_steps(request, num_sequences, step_s, features_s)
    num_evaluations = request.num_evaluations or max(
        1, min(MAX_EVALUATIONS, num_steps, int(EVALUATION_SHARE * num_steps * step_s / evaluation_s))
    )
    if request.minutes is not None and request.max_steps is None:
        num_steps = max(1, num_steps - int(num_evaluations * evaluation_s / step_s))
    return Estimate(
        num_steps=num_steps,
        num_anchors_per_step=probe.num_anchors,
        step_s=step_s,
        features_s=features_s,
        evaluation_s=evaluation_s,
        num_evaluations=num_evaluations,
        memory_bytes=target_bytes + _BYTES_PER_PARAMETER * num_parameters + _CHUNK_COPIES * chunk_bytes(target.device),
        disk_bytes=(0 if request.features == "online" else cache_bytes) + 2 * 3 * 4 * num_parameters,
    )


def _num_steps(request: TrainingRequest, num_sequences: int, step_s: float, other_s: float) -> int:
    if request.max_steps is not None:
        return request.max_steps
    if request.minutes is not None:
        return max(1, int((request.minutes * 60 - other_s) / step_s))
    return max(1, round(request.epochs * num_sequences / request.batch_size))


class _Probe(NamedTuple):
    features_per_token_s: float
    step_s: float
    decode_s: float
    num_anchors: int


def _probe(request: TrainingRequest, prepared: Prepared) -> _Probe:
    target, drafter, reader = prepared.target, prepared.drafter, prepared.reader
    by_length = sorted(prepared.train, key=len)
    typical = by_length[max(0, (len(by_length) - request.batch_size) // 2) :][: request.batch_size]
    dataset = AnchorDataset(typical, max_anchors=request.max_anchors, seed=request.seed)
    batch = collate([dataset[i] for i in range(len(typical))])
    batch = {name: value.to(target.device) for name, value in batch.items()}
    with tempfile.TemporaryDirectory() as folder:
        arguments = DSparkTrainingArguments(
            output_dir=folder,
            bf16=request.dtype == "bfloat16",
            use_cpu=target.device.type == "cpu",
            num_decode_prompts=request.num_decode_prompts,
            report_to=[],
        )
        trainer = DSparkTrainer(drafter, target, arguments)

    def step() -> None:
        with trainer.accelerator.autocast():
            trainer.compute_loss(drafter, batch | vars(features)).backward()

    features = reader.read(batch["input_ids"], batch["loss_mask"].bool())
    features_s = _seconds(lambda: reader.read(batch["input_ids"], batch["loss_mask"].bool()), target.device)
    step()  # the first one allocates
    step_s = _seconds(step, target.device)
    drafter.zero_grad()
    num_decoded = 2 * arguments.num_decode_prompts * arguments.decode_new_tokens
    token = batch["input_ids"][:1, :1]
    token_s = _seconds(lambda: target(input_ids=token, use_cache=False), target.device)
    return _Probe(
        features_s / batch["input_ids"].numel(), step_s, num_decoded * token_s, int((batch["anchors"] >= 0).sum())
    )


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes >= 120:
        return f"{minutes / 60:.1f} hours"
    return f"{minutes} minutes" if minutes else f"{seconds:.0f} s"
