"""`dspark eval`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import (
    DebugOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    TargetOption,
    ThreadsOption,
    check_output,
    readable_errors,
    set_up_torch,
)

if TYPE_CHECKING:
    from dspark_hf.evaluation.drafters import DraftersReport
    from dspark_hf.evaluation.evaluation_request import EvaluationRequest


def eval_command(
    texts: Annotated[
        list[Path] | None,
        typer.Option(help="Answers of the target, from `dspark train data`; every round is replayed on them."),
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            help="Instead: prompts that are decoded with each drafter in turn. File (JSONL with `prompt`, `messages` "
            "or `turns`, CSV, Parquet, ...), folder, or data set of the Hub. For drafters of any kind."
        ),
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder or Hub id, or NAME=FOLDER; may be repeated, the last is the baseline. Default: the one "
            "shipped for the target."
        ),
    ] = None,
    target: TargetOption = "smollm2-135m-instruct",
    split: Annotated[str | None, typer.Option(help="Of Hub or saved data sets. Default: train.")] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="Of decoding prompts; may be repeated. Default: 0, greedy.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Likewise, when sampling. Default: no cut.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Likewise. Default: no cut.")] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Most of each source, from its start. Default: all.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Most new tokens of a prompt. Default: 128.")] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Longer prompts are left out. Default: 1024.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Prompts decoded together. Default: 8.")] = None,
    rounds: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Keep decoded rounds here; the same command goes on after an interrupt."),
    ] = None,
    threshold: Annotated[
        list[float] | None,
        typer.Option(help="On the confidence, to be tried; may be repeated. Default: 0, 0.1, ... 0.9."),
    ] = None,
    dtype: DtypeOption = "bfloat16",
    device: DeviceOption = "auto",
    seed: Annotated[int, typer.Option(help="Of sampling and intervals.")] = 0,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write every table to FILE.")] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Draw figures like the paper's 2 to 6, its own in grey.")
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Accepted length, acceptance and confidence of drafters, with intervals and paired differences.

    On texts that the target wrote each round is replayed, so no text is generated again and every drafter sees the
    same. Prompts are decoded instead, by generate() with policy full.

    Exit codes: 0 done, 2 bad input, 130 interrupted.
    """
    told = "interrupted" if rounds is None else "interrupted; rounds decoded so far are kept, the same command goes on"
    with readable_errors(debug, told):
        from dspark_hf.evaluation.evaluate import evaluate_drafters
        from dspark_hf.evaluation.figures import check_can_draw

        decoding = {
            "split": split,
            "num_prompts": num_prompts,
            "temperatures": None if temperature is None else tuple(temperature),
            "top_p": top_p,
            "top_k": top_k,
            "max_new_tokens": max_new_tokens,
            "max_prompt_tokens": max_prompt_tokens,
            "batch_size": batch_size,
            "rounds_folder": rounds,
        }
        others = {"target": target, "dtype": dtype, "device": device, "seed": seed}
        if threshold is not None:
            others["thresholds"] = tuple(sorted(threshold))
        request = _request(texts, prompts, drafter, decoding, others)
        for file in (json_file, markdown):
            check_output(file)
        if figures is not None:
            check_can_draw()
        set_up_torch(threads)
        report = evaluate_drafters(request, with_reliability=figures is not None, show_progress=True)
        _show(report, json_file, markdown, figures)


def _request(
    texts: list[Path] | None,
    prompts: list[str] | None,
    drafters: list[str] | None,
    decoding: dict[str, Any],
    others: dict[str, Any],
) -> "EvaluationRequest":
    from dspark_hf.evaluation import ComparisonError
    from dspark_hf.evaluation.evaluation_request import DecodingRequest, DrafterSource, EvaluationRequest

    given = {name: value for name, value in decoding.items() if value is not None}
    if given and not prompts:
        names = ", ".join(sorted(given))
        raise ComparisonError(f"{names} is for prompts that are decoded (--prompts); texts bring their temperature")
    return EvaluationRequest(
        drafters=tuple(map(DrafterSource.parse, drafters)) if drafters else (DrafterSource(None),),
        texts=tuple(texts or ()),
        decoding=DecodingRequest(tuple(prompts), **given) if prompts else None,
        **others,
    )


def _show(report: "DraftersReport", json_file: Path | None, markdown: Path | None, figures: Path | None) -> None:
    from rich.console import Console

    from dspark_hf.evaluation.figures import draw_figures
    from dspark_hf.evaluation.provenance import write_report
    from dspark_hf.evaluation.render_drafters import markdown_of, render_drafters, write_markdown

    if json_file is not None:  # first: whatever happens to the rest, the numbers are kept
        write_report(json_file, report.to_dict())
    drawn = [] if figures is None else draw_figures(report, figures)
    if markdown is not None:
        write_markdown(markdown, markdown_of(report, drawn, relative_to=markdown.parent))
    render_drafters(report, Console())
