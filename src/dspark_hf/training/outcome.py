"""What a training run leaves behind: the drafter, its report and its curves."""

import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..evaluation.identity import checkpoint_folder, pair_facts
from ..evaluation.provenance import collect_provenance, write_json
from ..evaluation.report_files import REPORTS_FOLDER, keep_report
from .anchors import possible_anchors
from .answer_facts import answer_facts, described
from .curves import plot_curves
from .feature_cache import target_fingerprint
from .prepare import Prepared
from .recipe import TrainingRequest
from .records import TrainingSequence, data_digest
from .trainer import DSparkTrainer

REPORT_NAME = "training"
_PARTIAL_PREFIX = ".partial-"


@dataclass(frozen=True)
class TrainingOutcome:
    """What a call of [`train_drafter`] left behind.

    Attributes:
        folder: The drafter's.
        is_finished: False after Ctrl-C; the folder then holds the drafter of the last step.
        num_steps: Optimiser steps over all runs.
        spent_s: Seconds of training over all runs.
        metrics: Of the last evaluation.
    """

    folder: Path
    is_finished: bool
    num_steps: int
    spent_s: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class CompletedSteps:
    """A run up to now: what was asked for, with what, how far it came, and the seconds it took over all its parts."""

    request: TrainingRequest
    prepared: Prepared
    trainer: DSparkTrainer
    spent_s: float
    is_finished: bool


def final_metrics(trainer: DSparkTrainer) -> dict[str, float]:
    """The evaluation of the last step, made now unless it was made then."""
    last = trainer.state.log_history[-2:]  # the last step may have been evaluated; the run's own summary follows it
    evaluated = [entry for entry in last if "eval_loss" in entry and entry["step"] == trainer.state.global_step]
    found = evaluated[-1] if evaluated else trainer.evaluate()
    return {name: value for name, value in found.items() if name.startswith("eval_")}


def write_drafter(run: CompletedSteps) -> None:
    """Put drafter, report and curves into the output folder, each file whole or not at all."""
    request, drafter = run.request, run.prepared.drafter
    for left_over in request.output.glob(f"{_PARTIAL_PREFIX}*"):  # of a run that was killed here
        shutil.rmtree(left_over, ignore_errors=True)
    dtype = getattr(torch, request.dtype)
    with tempfile.TemporaryDirectory(dir=request.output, prefix=_PARTIAL_PREFIX) as name:
        temporary = Path(name)
        weights = drafter.state_dict()
        state = {name: w.to(dtype) if w.is_floating_point() else w for name, w in weights.items()}
        drafter.save_pretrained(temporary, state_dict=state)
        config = json.loads((temporary / "config.json").read_text())
        config.pop("use_cache", None)  # Trainer's
        write_json(temporary / "config.json", config | {"dtype": request.dtype})
        # config.json last: a folder without it is no drafter.
        for path in sorted(temporary.iterdir(), key=lambda p: p.name == "config.json"):
            os.replace(path, request.output / path.name)
    write_report(run, {})


def write_report(run: CompletedSteps, metrics: dict[str, float]) -> None:
    """Write report and curves; the drafter is there already."""
    figure = keep_report(run.request.output, REPORT_NAME, _report(run, metrics))
    plot_curves(run.trainer.state.log_history, figure)


def _report(run: CompletedSteps, metrics: dict[str, float]) -> dict[str, Any]:
    """Everything that a reader needs to judge or repeat the run."""
    request, prepared, trainer = run.request, run.prepared, run.trainer
    dtype = getattr(torch, request.dtype)
    return {
        "kind": "training",
        "provenance": asdict(
            collect_provenance(prepared.target.device, dtype, seed=request.seed, n=len(prepared.train))
        ),
        "is_finished": run.is_finished,
        "pair": asdict(pair_facts(request.target, prepared.target, prepared.tokenizer, request.output)),
        "target": request.target,
        "initial_drafter": request.initial_drafter,
        "earlier_runs": _earlier_runs(request.initial_drafter),
        "data": described(answer_facts(request.data)),
        "num_sequences": len(prepared.train),
        "num_held_out_sequences": len(prepared.held_out),
        "num_answer_tokens": sum(int(sequence.loss_mask.sum()) for sequence in prepared.train),
        "target_fingerprint": target_fingerprint(prepared.target),
        "data_sha256": data_digest(prepared.sequences, with_prompt_ids=True),
        "num_steps": trainer.state.global_step,
        "num_epochs": trainer.state.epoch,
        "num_anchors": round((trainer.state.epoch or 0) * _anchors_per_epoch(request, prepared.train)),
        "spent_s": run.spent_s,
        "device_hours": run.spent_s * trainer.args.world_size / 3600,
        "cpu_threads": torch.get_num_threads() if trainer.args.device.type == "cpu" else None,
        "settings": request.must_not_change() | {"learning_rate": trainer.args.learning_rate},
        "metrics": metrics,
        "history": trainer.state.log_history,
    }


def _earlier_runs(initial_drafter: str | None) -> list[dict[str, Any]]:
    """Reports of the runs that made the drafter that this one started from, the first one first, without histories."""
    folder = None if initial_drafter is None else checkpoint_folder(initial_drafter, None)
    if folder is None:
        return []
    try:
        report = json.loads((folder / REPORTS_FOLDER / f"{REPORT_NAME}.json").read_text(encoding="utf-8"))
        earlier, last = list(report.pop("earlier_runs", [])), dict(report)
    except (OSError, ValueError, TypeError, AttributeError):  # a drafter from elsewhere has none
        return []
    last.pop("history", None)
    return [*earlier, last]


def _anchors_per_epoch(request: TrainingRequest, sequences: list[TrainingSequence]) -> int:
    return sum(min(request.max_anchors, len(possible_anchors(sequence.loss_mask))) for sequence in sequences)
