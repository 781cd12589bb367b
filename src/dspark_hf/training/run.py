"""`dspark train`: from a target's name and its answers to a drafter's folder, resumable at any point."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PrinterCallback
from transformers.utils import logging as transformers_logging

from ..errors import TrainingDataError
from ..evaluation.provenance import write_json
from ..modeling_dspark import DSparkDraftModel
from .dataset import AnchorDataset
from .estimate import NUM_EVALUATIONS, estimate_run
from .feature_cache import FeatureCache, build_feature_cache, cached_tokens, target_fingerprint
from .initialise import feature_rms
from .outcome import TrainingOutcome, final_metrics, write_drafter
from .prepare import Echo, Prepared, prepare
from .progress import GracefulStop, SpentTime, TauProgress
from .recipe import TrainingRequest, peak_learning_rate
from .records import TrainingSequence, data_digest
from .settings import DSparkTrainingArguments
from .trainer import DSparkTrainer

logger = logging.getLogger(__name__)

RUN_NAME = "run.json"
_NUM_SAVES = 20


def train_drafter(request: TrainingRequest, echo: Echo = logger.info) -> TrainingOutcome:
    """Train a drafter, or go on where an earlier call with the same `output` stopped.

    Args:
        request: What to do.
        echo: Takes one line of text at a time.

    Raises:
        TrainingDataError: data, features or settings cannot be used, or `output` belongs to another run.
        ComparisonError, ZooError: target or initial drafter cannot be loaded.
    """
    prepared = prepare(request, echo)
    checkpoints = request.output / "checkpoints"
    if request.restart and checkpoints.exists():
        shutil.rmtree(checkpoints)
    run = _claim_output(request, prepared, checkpoints)
    length = {"epochs": request.epochs, "max_steps": request.max_steps, "minutes": request.minutes}
    estimate = estimate_run(
        request,
        prepared,
        num_cached_tokens=cached_tokens(request.output / "features"),
        num_steps=run["num_steps"] if run.get("length") == length else None,
    )
    run |= {"length": length, "num_steps": estimate.num_steps}
    write_json(checkpoints / RUN_NAME, run)
    for line in estimate.lines():
        echo(line)
    cache = _features(request, prepared)
    trainer, stop, spent = _make_trainer(request, prepared, cache, checkpoints, run)
    last = latest_checkpoint(checkpoints)
    if last is not None:
        echo(f"going on from {last.name}")
    bars_were_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # one for each checkpoint's file
    try:
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
    except (OSError, RuntimeError) as error:
        if not _is_full_disk(error):
            raise
        raise TrainingDataError(
            f"a checkpoint below {checkpoints} could not be written ({error}); free some space and run the same "
            "command again, it goes on from the last whole checkpoint"
        ) from error
    finally:
        stop.restore()
        if bars_were_on:
            transformers_logging.enable_progress_bar()
    metrics = {} if stop.was_interrupted else final_metrics(trainer)
    write_drafter(request, prepared, trainer, spent.spent_s, metrics, is_finished=not stop.was_interrupted)
    steps = trainer.state.global_step
    return TrainingOutcome(request.output, not stop.was_interrupted, steps, spent.spent_s, metrics)


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
        "data": data_digest(prepared.sequences),
        **{f"config.{key}": value for key, value in _comparable(prepared.drafter).items()},
        **request.must_not_change(),
    }
    identity = json.loads(json.dumps(identity))  # as it will be read back
    path = checkpoints / RUN_NAME
    if path.is_file():
        found: dict[str, Any] = json.loads(path.read_text())
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


def _comparable(drafter: DSparkDraftModel) -> dict[str, Any]:
    config: dict[str, Any] = drafter.config.to_dict()
    return {key: config[key] for key in config if key not in ("transformers_version", "dtype", "_name_or_path")}


def _features(request: TrainingRequest, prepared: Prepared) -> FeatureCache | None:
    if request.features == "online":
        return None
    return build_feature_cache(
        request.output / "features",
        prepared.target,
        prepared.reader,
        prepared.sequences,
        layer_ids=prepared.drafter.config.target_layer_ids,
        max_bytes=int(request.max_cache_gb * 1e9),
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
        _arguments(request, checkpoints, run["num_steps"], prepared.target),
        dataset(prepared.train),
        dataset(prepared.held_out),
        _decode_prompts(prepared.held_out),
        feature_rms(prepared.target, prepared.drafter.config, prepared.sample_ids),
        callbacks=[TauProgress(), stop, spent],
    )
    trainer.remove_callback(PrinterCallback)  # the bar shows what it would print
    return trainer, stop, spent


def _arguments(
    request: TrainingRequest, checkpoints: Path, num_steps: int, target: PreTrainedModel
) -> DSparkTrainingArguments:
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
        max_anchors=request.max_anchors,
        bf16=request.dtype == "bfloat16",
        use_cpu=target.device.type == "cpu",
        logging_steps=max(1, min(50, num_steps // 20)),
        eval_strategy="steps",
        eval_steps=max(1, num_steps // NUM_EVALUATIONS),
        save_strategy="steps",
        save_steps=max(1, num_steps // _NUM_SAVES),
        save_total_limit=2,
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


def _is_full_disk(error: Exception) -> bool:
    return getattr(error, "errno", None) == 28 or "No space left" in str(error) or "os error 28" in str(error)
