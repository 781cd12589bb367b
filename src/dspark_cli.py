"""The `dspark` command.

A module beside the package, since importing anything inside `dspark_hf` imports torch and
transformers: help and usage errors come without that wait.
"""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dspark_hf.evaluation import ComparisonReport, ComparisonSettings
    from dspark_hf.prompts import Prompt

EXIT_DONE = 0
EXIT_NOT_LOSSLESS = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    help="Lossless speculative decoding with DSpark drafters.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

TargetOption = Annotated[str, typer.Option(help="Folder, Hub id, or smollm2-135m-instruct.")]
DrafterOption = Annotated[
    str | None,
    typer.Option(help="Drafter's folder or Hub id. Default: the bundled one, else untrained."),
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(help="JSONL; a line has `prompt`, `messages` or `turns`. Default: shipped ones."),
]
NumPromptsOption = Annotated[int | None, typer.Option(help="Only the first N. Default: all.")]
TemperatureOption = Annotated[float, typer.Option(help="0 is greedy; above 0 samples.")]
TopPOption = Annotated[float | None, typer.Option(help="Default: no cut.")]
TopKOption = Annotated[int | None, typer.Option(help="Default: no cut.")]
MaxNewTokensOption = Annotated[int, typer.Option(help="Most new tokens per prompt.")]
DtypeOption = Annotated[str, typer.Option(metavar="bfloat16|float32|auto", help="auto: the checkpoint's.")]
DeviceOption = Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="auto: CUDA where there is one.")]
PolicyOption = Annotated[
    str | None,
    typer.Option(
        metavar="full|threshold",
        help="How much of a draft is verified. Default: the drafter's own.",
    ),
]
ThresholdOption = Annotated[
    float | None,
    typer.Option(help="For policy threshold. Default: the drafter's own, usually 0.4."),
]
NumAssistantTokensOption = Annotated[int | None, typer.Option(help="Drafts per round. Default: the drafter's block.")]
RepeatsOption = Annotated[int, typer.Option(help="Times each prompt is measured.")]
SeedOption = Annotated[int, typer.Option(help="Of sampling, intervals, untrained weights.")]
ThreadsOption = Annotated[int | None, typer.Option(help="CPU threads. Default: torch's choice.")]
JsonOption = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write every number, with provenance, to FILE."),
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def main() -> None:
    """Entry point of the console script."""
    app()


@app.callback()
def _root() -> None:
    # A callback keeps `compare` a subcommand though it is the only one.
    pass


@app.command("compare")
def compare_command(
    target: TargetOption = "smollm2-135m-instruct",
    drafter: DrafterOption = None,
    prompts_file: PromptsOption = None,
    num_prompts: NumPromptsOption = None,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    max_new_tokens: MaxNewTokensOption = 64,
    dtype: DtypeOption = "bfloat16",
    device: DeviceOption = "auto",
    policy: PolicyOption = None,
    threshold: ThresholdOption = None,
    num_assistant_tokens: NumAssistantTokensOption = None,
    repeats: RepeatsOption = 1,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
    debug: DebugOption = False,
) -> None:
    """Run plain and DSpark generation side by side: tokens/s, tau, and whether the texts agree.

    Exit codes: 0 done, 1 greedy texts differ where they must not, 2 bad input, 130 interrupted.
    """
    with _readable_errors(debug):
        from dspark_hf.evaluation import ComparisonSettings

        settings = ComparisonSettings(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_new_tokens=max_new_tokens,
            policy=policy,
            threshold=threshold,
            num_assistant_tokens=num_assistant_tokens,
            repeats=repeats,
            seed=seed,
        )
        _check_output(json_file)
        _set_up_torch(threads)
        prompts = _read_prompts(prompts_file, num_prompts)
        report, is_interrupted = _measure(target, drafter, dtype, device, prompts, settings)
        _show(report, json_file)
    if is_interrupted:
        typer.echo("interrupted: the numbers cover the prompts finished before", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)
    raise typer.Exit(EXIT_NOT_LOSSLESS if report.losslessness_errors else EXIT_DONE)


def _measure(
    target: str,
    drafter: str | None,
    dtype: str,
    device: str,
    prompts: "list[Prompt]",
    settings: "ComparisonSettings",
) -> "tuple[ComparisonReport, bool]":
    """The report, and whether Ctrl-C cut it short."""
    from dspark_hf.evaluation import ComparisonInterrupted, compare
    from dspark_hf.evaluation.loading import load_drafter, load_target

    model, tokenizer = load_target(target, dtype, device)
    loaded = load_drafter(drafter, model, target, tokenizer, seed=settings.seed)
    try:
        report = compare(
            model,
            loaded.model,
            tokenizer,
            prompts,
            settings,
            target_name=target,
            drafter_name=loaded.name,
            drafter_kind=loaded.kind,
            show_progress=True,
        )
    except ComparisonInterrupted as stop:
        if stop.report is None:
            raise
        return stop.report, True
    return report, False


def _read_prompts(prompts_file: Path | None, num_prompts: int | None) -> "list[Prompt]":
    from dspark_hf.prompts import load_prompts, quickstart_prompts

    _require(num_prompts is None or num_prompts >= 1, "num_prompts", num_prompts, ">= 1")
    prompts = quickstart_prompts() if prompts_file is None else load_prompts(prompts_file)
    return prompts[:num_prompts]


def _set_up_torch(threads: int | None) -> None:
    import torch
    import transformers

    _require(threads is None or threads >= 1, "threads", threads, ">= 1")
    if threads is not None:
        torch.set_num_threads(threads)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()


def _check_output(json_file: Path | None) -> None:
    if json_file is not None:
        from dspark_hf.evaluation.provenance import check_can_write

        check_can_write(json_file)


def _show(report: "ComparisonReport", json_file: Path | None) -> None:
    from rich.console import Console

    from dspark_hf.evaluation.provenance import write_json
    from dspark_hf.evaluation.render import render

    if json_file is not None:  # first: whatever happens to the terminal, the numbers are kept
        write_json(json_file, report.to_dict())
    render(report, Console())


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        from dspark_hf.evaluation import ComparisonError

        raise ComparisonError(f"{name} must be {rule}, got {value!r}")


@contextmanager
def _readable_errors(debug: bool) -> Iterator[None]:
    """Turn errors that a user can mend into one line on stderr, and Ctrl-C into its exit code."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted before any prompt was finished", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except Exception as error:
        if not _is_users_to_mend(error):
            raise
        if debug:
            traceback.print_exc()
        typer.echo(f"dspark: error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(EXIT_BAD_INPUT) from None


def _is_users_to_mend(error: Exception) -> bool:
    # Looked up, not imported: an unsupported transformers makes the import itself fail, with
    # one of these errors.
    errors = sys.modules.get("dspark_hf.errors")
    ours = (OSError,) if errors is None else (OSError, errors.DSparkError)
    return isinstance(error, ours)


if __name__ == "__main__":
    main()
