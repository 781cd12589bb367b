"""`dspark compare`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_NOT_LOSSLESS,
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
    from transformers import PreTrainedModel

    from dspark_hf import DSparkDraftModel
    from dspark_hf.evaluation import ComparisonReport, ComparisonSettings
    from dspark_hf.prompts import Prompt

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
PolicyOption = Annotated[
    str | None,
    typer.Option(
        metavar="full|threshold|survival|goodput|prefix|smoothed|block|lagged",
        help="How much of a draft is verified. Default: the drafter's own.",
    ),
]
ThresholdOption = Annotated[
    float | None,
    typer.Option(help="For policies threshold and survival. Default: the drafter's own, usually 0.4."),
]
NumAssistantTokensOption = Annotated[int | None, typer.Option(help="Drafts per round. Default: the drafter's block.")]
RepeatsOption = Annotated[int, typer.Option(help="Times each prompt is measured.")]
SeedOption = Annotated[int, typer.Option(help="Of sampling, intervals, untrained weights.")]


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
    with readable_errors(debug, "interrupted before any prompt was finished"):
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
        check_output(json_file)
        set_up_torch(threads)
        prompts = read_prompts(prompts_file, num_prompts)
        report, is_interrupted, profile_hint = _measure(target, drafter, dtype, device, prompts, settings)
        _show(report, json_file)
        if profile_hint:
            typer.echo(profile_hint)
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
) -> "tuple[ComparisonReport, bool, str]":
    """The report, whether Ctrl-C cut it short, and what may help where the drafter slows the target down."""
    from dspark_hf.evaluation import ComparisonInterrupted, compare
    from dspark_hf.evaluation.identity import pair_facts
    from dspark_hf.evaluation.loading import load_drafter, load_target

    model, tokenizer = load_target(target, dtype, device)
    loaded = load_drafter(drafter, model, target, tokenizer, seed=settings.seed)
    is_interrupted = False
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
            pair=pair_facts(target, model, tokenizer, loaded.folder),
            show_progress=True,
        )
    except ComparisonInterrupted as stop:
        if stop.report is None:
            raise
        report, is_interrupted = stop.report, True
    ratio = report.speed_ratio.value
    is_slower = loaded.kind != "untrained" and ratio is not None and ratio < 1
    return report, is_interrupted, _profile_hint(model, loaded.model) if is_slower else ""


def _profile_hint(target: "PreTrainedModel", drafter: "DSparkDraftModel") -> str:
    """The command that lets policies skip drafts that do not pay, where no profile does so yet."""
    from dspark_hf.decoding.scheduler import usable_profile

    found = usable_profile(target, drafter, 1)
    if found.profile is not None:
        return ""
    return (
        f"Slower than plain generation, and {found.why_none}: `{found.command}` measures one, and policy block then "
        "verifies only as many drafts as pay, none if need be."
    )


def read_prompts(prompts_file: Path | None, num_prompts: int | None) -> "list[Prompt]":
    """The first prompts of a file, or of the shipped ones."""
    from dspark_hf.prompts import load_prompts, quickstart_prompts

    require(num_prompts is None or num_prompts >= 1, "num_prompts", num_prompts, ">= 1")
    prompts = quickstart_prompts() if prompts_file is None else load_prompts(prompts_file)
    return prompts[:num_prompts]


def _show(report: "ComparisonReport", json_file: Path | None) -> None:
    from rich.console import Console

    from dspark_hf.evaluation.provenance import write_report
    from dspark_hf.evaluation.render import render

    if json_file is not None:  # first: whatever happens to the terminal, the numbers are kept
        write_report(json_file, report.to_dict())
    render(report, Console())
