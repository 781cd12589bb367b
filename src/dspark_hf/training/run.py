"""`dspark train`: from a target's name and its answers to a drafter's folder, resumable at any point."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, PrinterCallback, TrainerState
from transformers.utils import logging as transformers_logging

from ..errors import TrainingDataError
from ..evaluation.provenance import write_json
from ..modeling_dspark import DSparkDraftModel
from .dataset import AnchorDataset
from .estimate import estimate_run
from .feature_cache import (
    FeatureCache,
    build_feature_cache,
    cache_identity,
    cached_tokens,
    layers_to_cache,
    refuse_foreign_cache,
    target_fingerprint,
)
from .features import TargetReader
from .initialise import step_scale_of_features
from .locks import alone_with
from .outcome import CompletedSteps, TrainingOutcome, final_metrics, write_drafter, write_report
from .prepare import Echo, Prepared, prepare
from .progress import GracefulStop, SpentTime, StopWhenBroken, TauProgress
from .recipe import TrainingRequest, peak_learning_rate
from .records import TrainingSequence, data_digest
from .settings import DSparkTrainingArguments
from .trainer import DSparkTrainer

logger = logging.getLogger(__name__)

RUN_NAME = "run.json"
LOCK_NAME = ".lock"
_NUM_SAVES = 20
_FULL_DISK_SIGNS = ("No space left", "os error 28")


def train_drafter(request: TrainingRequest, echo: Echo = logger.info) -> TrainingOutcome:
    """Train a drafter in this process, or go on where an earlier call with the same `output` stopped.

    Args:
        request: What to do.
        echo: Takes one line of text at a time.

    Raises:
        TrainingDataError: data, features or settings cannot be used, `output` belongs to another run or cannot be
            written, or training broke.
        IncompatibleTargetError: no drafter can be trained for this target.
        ComparisonError, ZooError: target or initial drafter cannot be loaded.
    """
    _refuse_several_processes()
    checkpoints = request.output / "checkpoints"
    with (
        alone_with(checkpoints / LOCK_NAME, request.output),
        _readable_full_disk(request.output),
        _quiet_transformers(),
    ):
        prepared = prepare(request, echo)
        run = _plan(request, prepared, checkpoints, echo)
        cache = _features(request, prepared)
        trainer, stop, spent = _make_trainer(request, prepared, cache, checkpoints, run)
        _train(trainer, prepared, stop, latest_checkpoint(checkpoints), echo)
        is_finished = trainer.state.global_step >= run["num_steps"]
        completed = CompletedSteps(request, prepared, trainer, spent.spent_s, is_finished)
        write_drafter(completed)  # before the last evaluation, which may fail or be interrupted
        metrics = final_metrics(trainer) if is_finished else {}
        if metrics:
            write_report(completed, metrics)
    return TrainingOutcome(request.output, is_finished, trainer.state.global_step, spent.spent_s, metrics)


def _plan(request: TrainingRequest, prepared: Prepared, checkpoints: Path, echo: Echo) -> dict[str, Any]:
    """Claim the output folder and fix the number of steps; what is noted about the run."""
    if request.features == "cache":
        refuse_foreign_cache(request.features_folder, _cache_identity(request, prepared))
    if request.restart and checkpoints.exists():
        for path in checkpoints.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK_NAME:
                path.unlink()
    run = _claim_output(request, prepared, checkpoints)
    length = {"epochs": request.epochs, "max_steps": request.max_steps, "minutes": request.minutes}
    estimate = estimate_run(
        request,
        prepared,
        num_cached_tokens=cached_tokens(request.features_folder),
        num_steps=run["num_steps"] if run.get("length") == length else None,
    )
    run |= {"length": length, "num_steps": estimate.num_steps, "num_evaluations": estimate.num_evaluations}
    write_json(checkpoints / RUN_NAME, run)
    for line in estimate.lines():
        echo(line)
    return run


def _train(trainer: DSparkTrainer, prepared: Prepared, stop: GracefulStop, last: Path | None, echo: Echo) -> None:
    if last is not None:
        echo(f"going on from {last.name}")
        state = TrainerState.load_from_json(str(last / "trainer_state.json"))
        if state.global_step >= trainer.args.max_steps:  # Trainer would take one step more
            prepared.drafter.load_state_dict(load_file(last / "model.safetensors"))
            trainer.state = state
            return
    trainer.stop_evaluating = lambda: stop.was_interrupted
    try:
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
    except KeyboardInterrupt:  # the second one
        newest = latest_checkpoint(Path(str(trainer.args.output_dir)))
        if newest is not None:
            echo(f"stopped at once; the last whole checkpoint, usable as a drafter, is {newest}")
        raise
    finally:
        stop.restore()


def _refuse_several_processes() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise TrainingDataError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, and this command trains in one process; for several, use "
            "DSparkTrainer in a script of your own under torchrun or accelerate launch"
        )


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No bar for each file that is read or written, no remark that a longer run has other settings."""
    bars_were_on, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars_were_on:
            transformers_logging.enable_progress_bar()


@contextmanager
def _readable_full_disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own kinds
        if getattr(error, "errno", None) != 28 and not any(sign in str(error) for sign in _FULL_DISK_SIGNS):
            raise
        raise TrainingDataError(
            f"the disk of {folder} is full ({error}); free some space and run the same command again, it goes on from "
            "the last whole checkpoint"
        ) from error


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint; one that a crash cut short lacks the state that is written last."""
    if not folder.is_dir():
        return None
    numbered = [
        (int(path.name.rsplit("-", 1)[1]), path) for path in folder.glob("checkpoint-*") if path.name[11:].isdigit()
    ]
    for _, path in sorted(numbered, reverse=True):
        try:
            json.loads((path / "trainer_state.json").read_text())
        except (OSError, ValueError):
            logger.warning("%s is not whole, an earlier one is used", path)
            continue
        return path
    return None


def _claim_output(request: TrainingRequest, prepared: Prepared, checkpoints: Path) -> dict[str, Any]:
    """Make the output folder this run's, or check that it is; what was noted about the run so far."""
    identity = {
        "target": target_fingerprint(prepared.target),
        "data": data_digest(prepared.sequences, with_prompt_ids=True),
        "draft_vocabulary": _digest(prepared.drafter.draft_token_ids),
        **{f"config.{key}": value for key, value in _comparable(prepared.drafter).items()},
        **request.must_not_change(),
    }
    identity = json.loads(json.dumps(identity))  # as it will be read back
    path = checkpoints / RUN_NAME
    if path.is_file():
        found = _read_run(path)
        differing = sorted(key for key in identity if found["identity"].get(key) != identity[key])
        if differing:
            raise TrainingDataError(
                f"{request.output} holds a run with other {', '.join(differing)}; name another output folder, or pass "
                "--restart to forget that run's checkpoints"
            )
        return found
    if (request.output / "config.json").is_file() and not request.restart:
        raise TrainingDataError(
            f"{request.output} already holds a drafter and no checkpoints to go on from; name another folder, or pass "
            "--restart to replace it"
        )
    checkpoints.mkdir(parents=True, exist_ok=True)
    run = {"identity": identity, "spent_s": 0.0}
    write_json(path, run)
    return run


def _read_run(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        _ = found["identity"].get, found["spent_s"] + 0.0
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainingDataError(
            f"{path} is damaged ({error}); pass --restart to forget that run's checkpoints, or name another output"
        ) from error
    return found


def _digest(ids: Tensor | None) -> str | None:
    return None if ids is None else hashlib.sha256(ids.cpu().numpy().tobytes()).hexdigest()


def _comparable(drafter: DSparkDraftModel) -> dict[str, Any]:
    config: dict[str, Any] = drafter.config.to_dict()
    return {key: config[key] for key in config if key not in ("transformers_version", "dtype", "_name_or_path")}


def _cache_identity(request: TrainingRequest, prepared: Prepared) -> dict[str, Any]:
    layer_ids = layers_to_cache(request.features_folder, prepared.drafter.config)
    return cache_identity(prepared.target, layer_ids, prepared.reader.logit_treatment, prepared.sequences)


def _features(request: TrainingRequest, prepared: Prepared) -> FeatureCache | None:
    if request.features == "online":
        return None
    folder, config = request.features_folder, prepared.drafter.config
    returned = [] if config.reads_final_hidden else config.target_layer_ids
    if cached_tokens(folder) == sum(len(sequence) for sequence in prepared.sequences):
        return FeatureCache(folder, _cache_identity(request, prepared), returned)
    with alone_with(folder / LOCK_NAME, folder):  # runs may share it
        layer_ids = layers_to_cache(folder, config)
        return build_feature_cache(
            folder,
            prepared.target,
            TargetReader(prepared.target, config, layer_ids),
            prepared.sequences,
            layer_ids=layer_ids,
            max_bytes=int(request.max_cache_gb * 1e9),
            returned=returned,
        )


def _make_trainer(
    request: TrainingRequest,
    prepared: Prepared,
    cache: FeatureCache | None,
    checkpoints: Path,
    run: dict[str, Any],
) -> tuple[DSparkTrainer, GracefulStop, SpentTime]:
    places = {id(sequence): i for i, sequence in enumerate(prepared.sequences)}

    def dataset(sequences: list[TrainingSequence]) -> AnchorDataset:
        return AnchorDataset(
            sequences,
            max_anchors=request.max_anchors,
            seed=request.seed,
            cache=cache,
            cache_indices=[places[id(sequence)] for sequence in sequences],
        )

    def save_spent(seconds: float) -> None:
        write_json(checkpoints / RUN_NAME, run | {"spent_s": seconds})

    stop, spent = GracefulStop(), SpentTime(run["spent_s"], save_spent)
    trainer = DSparkTrainer(
        prepared.drafter,
        prepared.target,
        _arguments(request, checkpoints, run, prepared.target),
        dataset(prepared.train),
        dataset(prepared.held_out),
        _decode_prompts(prepared.held_out),
        step_scale_of_features(prepared.target, prepared.drafter, prepared.sample_ids),
        callbacks=[TauProgress(), stop, StopWhenBroken(), spent],
    )
    trainer.remove_callback(PrinterCallback)  # the bar shows what it would print
    return trainer, stop, spent


def _arguments(
    request: TrainingRequest, checkpoints: Path, run: dict[str, Any], target: PreTrainedModel
) -> DSparkTrainingArguments:
    num_steps: int = run["num_steps"]
    return DSparkTrainingArguments(
        output_dir=str(checkpoints),
        max_steps=num_steps,
        per_device_train_batch_size=request.batch_size,
        per_device_eval_batch_size=request.batch_size,
        learning_rate=peak_learning_rate(request, target),
        head_learning_rate_multiplier=request.head_learning_rate_multiplier,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": round(request.decay_fraction * num_steps)},
        warmup_steps=round(0.04 * num_steps),
        weight_decay=0.0,
        bf16=request.dtype == "bfloat16",
        use_cpu=target.device.type == "cpu",
        logging_steps=max(1, min(50, num_steps // 20)),
        eval_strategy="steps",
        eval_steps=max(1, num_steps // run["num_evaluations"]),
        save_strategy="steps",
        save_steps=max(1, num_steps // _NUM_SAVES),
        save_total_limit=2,
        num_decode_prompts=request.num_decode_prompts,
        report_to=[],
        disable_tqdm=True,
        log_level="warning",
        seed=request.seed,
    )


def _decode_prompts(held_out: list[TrainingSequence]) -> list[Tensor]:
    """Prompts of different ids, as they precede the first supervised token."""
    prompts: dict[str, Tensor] = {}
    for sequence in held_out:
        length = int(sequence.loss_mask.long().argmax())
        if length:
            prompts.setdefault(sequence.id, sequence.input_ids[None, :length])
    return list(prompts.values())
