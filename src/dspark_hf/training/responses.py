"""Answers of the target to prompts: the data that a drafter is trained on."""

import logging
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from .._compat import TargetModel
from .._version import __version__
from ..errors import TrainingDataError
from ..evaluation.provenance import command_line
from ..prompts import Prompt, chat_template_of, encode_prompt
from .answer_facts import prompt_source
from .answering import AnswerRequest, answer_requests, answer_seed, stop_token_ids
from .feature_cache import target_fingerprint
from .locks import alone_with
from .response_prompts import load_prompt_dataset
from .response_settings import ResponseSettings, ResponseSummary
from .response_writer import ResponseWriter, check_output, prompt_hash

__all__ = ["ResponseSettings", "ResponseSummary", "load_prompt_dataset", "write_responses"]

logger = logging.getLogger(__name__)

# Batches whose prompts are sorted by length together. More would pad less, and an interrupted run would hold the
# longest prompts only.
BATCHES_PER_WINDOW = 32


def write_responses(
    target: TargetModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    output: str | Path,
    settings: ResponseSettings | None = None,
    *,
    target_name: str | None = None,
    prompt_sources: Sequence[str] | None = None,
    show_progress: bool = True,
) -> ResponseSummary:
    """Let the target answer prompts, and write one row per answer as soon as it is finished.

    A row holds `id`, `temperature`, `prompt_ids` (chat template applied) and `response_ids` (the stop token included
    where it was reached). Started again with the same settings, prompts may be added, a call makes only the answers
    that are missing; only `batch_size` and `max_prompt_tokens` may change. Rows are in the order of finishing.

    Args:
        target: Decoder-only language model, in eval mode.
        tokenizer: The target's.
        prompts: With different ids.
        output: `.jsonl` or `.parquet`; `<output>.settings.json` is written beside it.
        settings: None for the defaults.
        target_name: For the settings file; None for the name it was loaded under.
        prompt_sources: Likewise: where the prompts come from, as for `load_prompt_dataset`.
        show_progress: Whether to draw a progress bar on stderr.

    Raises:
        TrainingDataError: no prompt can be answered, ids repeat, target and tokenizer do not belong together, the
            output was made with other settings or prompts or cannot be written, or memory ran out. Rows finished
            before are kept, as they are when the call is interrupted.
    """
    settings = settings or ResponseSettings()
    output = Path(output).expanduser()
    _require_language_model(target)
    encoded, num_unusable, num_long = _encode(target, tokenizer, prompts, settings)
    check_output(output)
    lock = output.with_name(f".{output.name}.lock")
    run = _run_facts(target, tokenizer, target_name, prompt_sources, settings)
    with (
        alone_with(lock, output),
        ResponseWriter(output, _identity(target, settings), run) as writer,
    ):
        requests = list(_requests(encoded, settings))
        pending = [request for request in requests if not _is_finished(request, writer.finished, output)]
        num_resumed = len(requests) - len(pending)
        with tqdm(
            total=len(requests), initial=num_resumed, unit="answer", desc="answers", disable=not show_progress
        ) as bar:
            tally = _write_answers(target, _in_windows(pending, settings.batch_size), writer, settings, bar)
        writer.finish()
    summary = ResponseSummary(
        output=output,
        num_prompts=len(prompts),
        num_skipped_unusable=num_unusable,
        num_skipped_long=num_long,
        num_resumed=num_resumed,
        **asdict(tally),
    )
    logger.info(
        "%s: %d answers made (%d tokens, %.0f tok/s), %d were there",
        output,
        summary.num_answers,
        summary.num_response_tokens,
        summary.tokens_per_s,
        num_resumed,
    )
    return summary


@dataclass
class _Tally:
    """The part of a summary that grows."""

    num_answers: int = 0
    num_stopped: int = 0
    num_response_tokens: int = 0
    duration_s: float = 0.0


def _write_answers(
    target: TargetModel,
    requests: Sequence[AnswerRequest],
    writer: ResponseWriter,
    settings: ResponseSettings,
    bar: Any,
) -> _Tally:
    tally = _Tally()
    stop_ids = stop_token_ids(target)
    start_s = time.perf_counter()
    try:
        for answer in answer_requests(
            target, requests, max_new_tokens=settings.max_new_tokens, batch_size=settings.batch_size
        ):
            writer.append(answer)
            tally.num_answers += 1
            tally.num_response_tokens += len(answer.response_ids)
            tally.num_stopped += answer.response_ids[-1] in stop_ids
            tally.duration_s = time.perf_counter() - start_s
            bar.set_postfix_str(f"{tally.num_response_tokens / tally.duration_s:.0f} tok/s", refresh=False)
            bar.update()
    except KeyboardInterrupt:
        logger.warning(
            "interrupted: %d of %d answers are in %s; the same call goes on from there",
            bar.total - len(requests) + tally.num_answers,
            bar.total,
            writer.lines_path,
        )
        raise
    return tally


def _encode(
    target: TargetModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], settings: ResponseSettings
) -> tuple[dict[str, tuple[int, ...]], int, int]:
    """Token ids by prompt id, and how many prompts were skipped as unusable and as too long."""
    text_config = target.config.get_text_config(decoder=True)
    limit = settings.max_prompt_tokens
    num_positions = getattr(text_config, "max_position_embeddings", None)
    if num_positions is not None:
        limit = min(limit, num_positions - settings.max_new_tokens)
    encoded: dict[str, tuple[int, ...]] = {}
    seen: set[str] = set()
    num_unusable = num_long = 0
    reason = "no text"
    for prompt in prompts:
        if prompt.id in seen:
            raise TrainingDataError(f"two prompts have the id {prompt.id!r}; give each its own")
        seen.add(prompt.id)
        try:
            ids = encode_prompt(tokenizer, prompt)[0].tolist() if _has_text(prompt) else []
        except Exception as error:  # a chat template raises what it likes about roles that it does not know
            ids, reason = [], (str(error).strip() or type(error).__name__).splitlines()[0]
        if not ids:
            num_unusable += 1
        elif len(ids) > limit:
            num_long += 1
        else:
            encoded[prompt.id] = tuple(ids)
            if max(ids) >= text_config.vocab_size:
                raise TrainingDataError(
                    f"prompt {prompt.id!r} has the token id {max(ids)}, outside the target's vocabulary of "
                    f"{text_config.vocab_size}; pass the target's own tokenizer"
                )
    if num_unusable or num_long or not encoded:
        skipped = (
            f"{num_unusable} of {len(prompts)} prompts are unusable{f' (e.g. {reason})' if num_unusable else ''}, "
            f"{num_long} are longer than {limit} tokens"
        )
        if not encoded:
            way_out = ""
            if num_long and limit == settings.max_prompt_tokens:
                way_out = ", or raise --max-prompt-tokens"
            elif num_long:
                way_out = f", or lower --max-new-tokens: prompt and answer share {num_positions} positions"
            raise TrainingDataError(f"nothing to answer: {skipped}; check the data{way_out}")
        logger.warning("skipped: %s", skipped)
    return encoded, num_unusable, num_long


def _has_text(prompt: Prompt) -> bool:
    return any(message["content"].strip() for message in prompt.messages)


def _requests(encoded: dict[str, tuple[int, ...]], settings: ResponseSettings) -> Iterator[AnswerRequest]:
    for prompt_id, ids in encoded.items():
        for temperature in settings.temperatures_for(prompt_id):
            yield AnswerRequest(prompt_id, ids, temperature, answer_seed(settings.seed, prompt_id, temperature))


def _is_finished(request: AnswerRequest, finished: dict[tuple[str, float], int], output: Path) -> bool:
    found = finished.get((request.id, request.temperature))
    if found is not None and found != prompt_hash(request.prompt_ids):
        raise TrainingDataError(
            f"{output} holds an answer to another prompt of the id {request.id!r} (or it was encoded differently); "
            "give changed prompts new ids, or name another output"
        )
    return found is not None


def _in_windows(requests: Iterable[AnswerRequest], batch_size: int) -> list[AnswerRequest]:
    """Neighbours of similar length, the longest first, inside windows that are samples of the whole."""
    shuffled = sorted(requests, key=lambda request: request.seed)
    size = BATCHES_PER_WINDOW * batch_size
    windows = (shuffled[start : start + size] for start in range(0, len(shuffled), size))
    return [r for window in windows for r in sorted(window, key=lambda r: len(r.prompt_ids), reverse=True)]


def _identity(target: TargetModel, settings: ResponseSettings) -> dict[str, Any]:
    """What determines an answer; prompts are compared one by one."""
    fields = asdict(settings) | {"shares": settings.resolved_shares()}
    for name in ("batch_size", "max_prompt_tokens"):
        del fields[name]
    return fields | {
        "target": target_fingerprint(target),
        "dtype": str(target.dtype).removeprefix("torch."),
        "stop_token_ids": sorted(stop_token_ids(target)),
    }


def _run_facts(
    target: TargetModel,
    tokenizer: PreTrainedTokenizerBase,
    target_name: str | None,
    prompt_sources: Sequence[str] | None,
    settings: ResponseSettings,
) -> dict[str, Any]:
    name = target_name or target.name_or_path
    return {
        # Folders are left out: the file is shared along with the answers.
        "target_name": Path(name).name if Path(name).is_absolute() or Path(name).exists() else name,
        "date_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "dspark_hf": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "device": str(target.device),
        "num_threads": torch.get_num_threads(),
        "batch_size": settings.batch_size,
        "max_prompt_tokens": settings.max_prompt_tokens,
        "command": command_line(),
        "chat_template": asdict(chat_template_of(tokenizer)),
        "prompt_sources": None if prompt_sources is None else [asdict(prompt_source(one)) for one in prompt_sources],
    }


def _require_language_model(target: TargetModel) -> None:
    if target.config.is_encoder_decoder or not target.can_generate():
        raise TrainingDataError(
            f"{type(target).__name__} is no decoder-only language model; load the target with AutoModelForCausalLM"
        )
