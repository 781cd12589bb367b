"""`dspark doctor`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common import (
    EXIT_DONE,
    EXIT_FAULTS_FOUND,
    DebugOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    TargetOption,
    ThreadsOption,
    check_output,
    readable_errors,
    require,
    set_up_torch,
)

if TYPE_CHECKING:
    from dspark_hf.evaluation.doctor import Examination


def doctor_command(
    target: TargetOption = "smollm2-135m-instruct",
    drafter: Annotated[
        str | None, typer.Option(help="Folder or Hub id. Default: the one shipped for the target.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL; a line has `prompt`, `messages` or `turns`. Default: shipped ones.")
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Only the first N. Default: all.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most new tokens per prompt.")] = 128,
    speed: Annotated[bool, typer.Option("--speed/--no-speed", help="Time plain and DSpark generation too.")] = True,
    dtype: DtypeOption = "bfloat16",
    device: DeviceOption = "auto",
    seed: Annotated[int, typer.Option(help="Of sampling and intervals.")] = 0,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
    debug: DebugOption = False,
) -> None:
    """Find out why a drafter is slow or rarely right with a target, and what mends it.

    Compares files and configs, decodes prompts, and tries other layouts, feature layers, masks, prompt forms and
    calibration maps on the same texts. A verdict needs an interval that excludes chance; give more prompts for a
    sharper one.

    Exit codes: 0 healthy (there may be notes), 1 faults found, 2 bad input, 130 interrupted.
    """
    with readable_errors(debug, "interrupted: nothing was written"):
        from rich.console import Console

        from dspark_hf.evaluation.provenance import write_json
        from dspark_hf.evaluation.render_doctor import render_examination

        require(num_prompts is None or num_prompts >= 1, "num_prompts", num_prompts, ">= 1")
        check_output(json_file)
        set_up_torch(threads)
        report = _examine(target, drafter, prompts, num_prompts, max_new_tokens, speed, dtype, device, seed)
        if json_file is not None:  # first: whatever happens to the terminal, the numbers are kept
            write_json(json_file, report.to_dict())
        render_examination(report, Console())
    raise typer.Exit(EXIT_DONE if report.is_healthy else EXIT_FAULTS_FOUND)


def _examine(
    target: str,
    drafter: str | None,
    prompts_file: Path | None,
    num_prompts: int | None,
    max_new_tokens: int,
    with_speed: bool,
    dtype: str,
    device: str,
    seed: int,
) -> "Examination":
    from dspark_hf.evaluation import ComparisonError
    from dspark_hf.evaluation.doctor import examine_pair
    from dspark_hf.evaluation.loading import load_drafter, load_target
    from dspark_hf.prompts import load_prompts, quickstart_prompts

    prompts = quickstart_prompts() if prompts_file is None else load_prompts(prompts_file)
    model, tokenizer = load_target(target, dtype, device)
    loaded = load_drafter(drafter, model, target, tokenizer, seed=seed, must_fit=False)
    if loaded.kind == "untrained":
        raise ComparisonError(f"no drafter is shipped for target {target!r}; name one with --drafter")
    return examine_pair(
        model,
        loaded.model,
        tokenizer,
        prompts[:num_prompts],
        source=loaded.folder,
        max_new_tokens=max_new_tokens,
        seed=seed,
        with_speed=with_speed,
        target_name=target,
        drafter_name=loaded.name if drafter is None else drafter,
        show_progress=True,
    )
