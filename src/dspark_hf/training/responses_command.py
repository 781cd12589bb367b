"""What `dspark train data` runs."""

from collections.abc import Sequence
from pathlib import Path

from ..evaluation.loading import load_target
from .response_prompts import load_prompt_dataset
from .response_settings import ResponseSettings, ResponseSummary
from .response_writer import check_output
from .responses import write_responses


def run_train_data(
    target: str,
    prompts: str | Sequence[str],
    output: str | Path,
    *,
    temperatures: Sequence[float] = (0.0, 0.7, 1.0),
    shares: Sequence[float] | None = None,
    answers_per_prompt: int = 1,
    max_new_tokens: int = 256,
    max_prompt_tokens: int = 1024,
    max_prompts: int | None = None,
    batch_size: int = 32,
    seed: int = 0,
    split: str = "train",
    dtype: str = "bfloat16",
    device: str = "auto",
    show_progress: bool = True,
) -> ResponseSummary:
    """Load target and prompts, and write the target's answers.

    What costs no time is checked first: settings, the output's name, the prompts, then the target.

    Args:
        target: Folder, Hub id or zoo name.
        prompts: Source or sources as for `load_prompt_dataset`.
        output: `.jsonl` or `.parquet`.
        temperatures, shares, answers_per_prompt, max_new_tokens, max_prompt_tokens, batch_size, seed: As for
            `ResponseSettings`.
        max_prompts: Most rows taken of each source; None for all.
        split: Of data sets of the Hub.
        dtype: `bfloat16`, `float32` or `auto`, the checkpoint's.
        device: A torch device, or `auto`: CUDA where there is one, else the CPU.
        show_progress: Whether to draw a progress bar on stderr.

    Raises:
        TrainingDataError: as for `ResponseSettings`, `load_prompt_dataset` and `write_responses`.
        ComparisonError, ZooError: the target cannot be loaded.
    """
    settings = ResponseSettings(
        temperatures=tuple(temperatures),
        shares=None if shares is None else tuple(shares),
        answers_per_prompt=answers_per_prompt,
        max_new_tokens=max_new_tokens,
        max_prompt_tokens=max_prompt_tokens,
        batch_size=batch_size,
        seed=seed,
    )
    sources = [prompts] if isinstance(prompts, str) else list(prompts)
    check_output(Path(output))
    loaded_prompts = load_prompt_dataset(sources, split=split, max_prompts=max_prompts)
    model, tokenizer = load_target(target, dtype, device)
    return write_responses(
        model,
        tokenizer,
        loaded_prompts,
        output,
        settings,
        target_name=target,
        prompt_sources=sources,
        show_progress=show_progress,
    )
