"""`dspark eval`."""

from pathlib import Path
from typing import Annotated

import typer

from .common import (
    DebugOption,
    DeviceOption,
    JsonOption,
    TargetOption,
    ThreadsOption,
    check_output,
    readable_errors,
    set_up_torch,
)


def eval_command(
    texts: Annotated[list[Path], typer.Option(help="Answers of the target, from `dspark train data`.")],
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder or Hub id; may be repeated, the last is the baseline. Default: the one shipped for the target."
        ),
    ] = None,
    target: TargetOption = "smollm2-135m-instruct",
    dtype: Annotated[str, typer.Option(metavar="bfloat16|float32|auto", help="auto: the checkpoint's.")] = "bfloat16",
    device: DeviceOption = "auto",
    seed: Annotated[int, typer.Option(help="Of the intervals.")] = 0,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
    debug: DebugOption = False,
) -> None:
    """Accepted length and confidence of drafters on texts that the target wrote, with intervals and paired differences.

    Each round is replayed on the target's own text, so no text is generated again and every drafter sees the same.

    Exit codes: 0 done, 2 bad input, 130 interrupted.
    """
    with readable_errors(debug, "interrupted"):
        from rich.console import Console

        from dspark_hf.evaluation.drafters import evaluate_drafters
        from dspark_hf.evaluation.provenance import write_report
        from dspark_hf.evaluation.render_drafters import render_drafters

        check_output(json_file)
        set_up_torch(threads)
        report = evaluate_drafters(target, drafter or [None], texts, dtype=dtype, device=device, seed=seed)
        if json_file is not None:
            write_report(json_file, report.to_dict())
        render_drafters(report, Console())
