"""`dspark ablate`."""

from pathlib import Path
from typing import Annotated

import typer

from .common import DebugOption, JsonOption, check_output, readable_errors, require, set_up_torch

# What --smoke takes instead of the defaults.
SMOKE_ROWS, SMOKE_WIDTHS, SMOKE_ROUNDS = (2, 16), (8,), 40


def ablate_command(
    traces: Annotated[list[Path], typer.Option(help="From `dspark traces`; may be repeated, one for each mode.")],
    profile: Annotated[
        Path | None, typer.Option(help="From `dspark profile --json`: one machine more than the staircases.")
    ] = None,
    rows: Annotated[
        list[int] | None, typer.Option(help="Rows that decode together; may be repeated. Default: 1, 2, 4 ... 128.")
    ] = None,
    stair_width: Annotated[
        list[int] | None,
        typer.Option(help="Tokens of a stair of a staircase; may be repeated, 1 is a line. Default: 1, 8, 16, 64."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens of context at which the profile is read. Default: the mean of the traces."),
    ] = None,
    max_rounds: Annotated[int | None, typer.Option(help="Rounds that each load is worth, about. Default: 250.")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Few loads and rounds, to see that it runs.")] = False,
    seed: Annotated[int, typer.Option(help="Of halves, queues and intervals.")] = 0,
    json_file: JsonOption = None,
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write the tables to FILE.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Picture of speed over rows, PNG.")
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Compare schedules of one drafter at many loads: whole drafts, tuned static ones, adaptive ones, and hindsight.

    No model runs: schedules are replayed on recorded acceptance. Static ones are tuned on one half of the prompts, and
    all are judged on the other.

    Exit codes: 0 done, 2 bad input, 130 interrupted.
    """
    with readable_errors(debug, "interrupted: nothing was written"):
        from dataclasses import fields
        from typing import Any

        from rich.console import Console

        from dspark_hf.evaluation.ablation import AblationRequest, run_ablation
        from dspark_hf.evaluation.ablation_figure import plot_ablation
        from dspark_hf.evaluation.ablation_page import write_page
        from dspark_hf.evaluation.provenance import write_report
        from dspark_hf.evaluation.render_ablation import render_ablation

        for file in (json_file, markdown_file, plot_file):
            check_output(file)
        is_picture = plot_file is None or plot_file.suffix == ".png"
        require(is_picture, "plot", str(plot_file), "a file that ends in .png")
        given: dict[str, Any] = {
            "num_rows": tuple(rows) if rows else SMOKE_ROWS if smoke else None,
            "stair_widths": tuple(stair_width) if stair_width else SMOKE_WIDTHS if smoke else None,
            "max_rounds": max_rounds if max_rounds is not None else SMOKE_ROUNDS if smoke else None,
        }
        defaults = {field.name: field.default for field in fields(AblationRequest)}
        chosen: dict[str, Any] = {name: defaults[name] if value is None else value for name, value in given.items()}
        request = AblationRequest(traces=tuple(traces), profile=profile, context=context, seed=seed, **chosen)
        set_up_torch(1)  # tensors are small: more threads only wait for each other
        report = run_ablation(request, show_progress=True)
        if json_file is not None:
            write_report(json_file, report.to_dict())
        is_drawn = plot_file is not None and plot_ablation(report, plot_file)
        if markdown_file is not None:
            write_page(markdown_file, report, plot_file if is_drawn else None)
        render_ablation(report, Console())
