"""`dspark calibrate`."""

from pathlib import Path
from typing import Annotated

import typer

from .common import (
    EXIT_NOTHING_WRITTEN,
    DebugOption,
    DeviceOption,
    DtypeOption,
    TargetOption,
    ThreadsOption,
    readable_errors,
    set_up_torch,
)


def calibrate_command(
    prompts: Annotated[
        list[str], typer.Option(help="To fit on: file, folder or Hub data set, as `dspark train data` takes them.")
    ],
    output: Annotated[
        Path,
        typer.Option(help="Folder of the calibrated drafter; its own to calibrate it in place. Goes on if it can."),
    ],
    target: TargetOption = "smollm2-135m-instruct",
    drafter: Annotated[
        str | None, typer.Option(help="Folder or Hub id. Default: the one shipped for the target.")
    ] = None,
    held_out_prompts: Annotated[
        list[str] | None,
        typer.Option(
            help="To judge the fit on, and to decide which slots keep their map. Default: 30 % of the prompts, which "
            "the fit does not see."
        ),
    ] = None,
    not_trained_fraction: Annotated[
        float | None,
        typer.Option(
            help="Fit only on prompts that `dspark train` with this --held-out-fraction left out: those that it was "
            "trained on mislead."
        ),
    ] = None,
    mode: Annotated[
        list[str] | None, typer.Option(metavar="greedy|sampled", help="May be repeated. Default: both.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Of sampled decoding.")] = 1.0,
    top_p: Annotated[float | None, typer.Option(help="Likewise. Default: no cut.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Likewise. Default: no cut.")] = None,
    num_proposals: Annotated[int, typer.Option(help="Rounds to decode, per mode.")] = 20_000,
    num_held_out_proposals: Annotated[
        int | None, typer.Option(help="The same of held-out prompts. Default: as many.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most new tokens per prompt.")] = 192,
    max_prompt_tokens: Annotated[int, typer.Option(help="Longer prompts are left out.")] = 1024,
    batch_size: Annotated[int, typer.Option(help="Prompts decoded at a time.")] = 16,
    maps: Annotated[
        str,
        typer.Option(
            metavar="temperature|platt|auto",
            help="A slot's map: of one number, of two, or what held-out prompts prefer.",
        ),
    ] = "auto",
    dtype: DtypeOption = "bfloat16",
    device: DeviceOption = "auto",
    seed: Annotated[int, typer.Option(help="Of the order of prompts, sampling and intervals.")] = 0,
    threads: ThreadsOption = None,
    debug: DebugOption = False,
) -> None:
    """Make a drafter's confidence agree with what the target accepts: a temperature per slot, from real decoding.

    Writes the drafter with the temperatures in its config.json, and `calibration/` beside it: report.json,
    reliability.png and the proposals, from which an interrupted run goes on; and `reports/`, for the drafter's card. A
    slot whose map is worse than none on held-out prompts gets none; the report's numbers are of the same prompts. A
    mode is left out if a slot is worse than before all the same.

    Exit codes: 0 done, 1 no mode was written, 2 bad input, 130 interrupted.
    """
    with readable_errors(debug, "interrupted; rounds decoded so far are kept, the same command goes on"):
        from rich.console import Console

        from dspark_hf.config_rules import CALIBRATION_MODES
        from dspark_hf.evaluation.calibration import calibrate_drafter
        from dspark_hf.evaluation.calibration_request import CalibrationRequest
        from dspark_hf.evaluation.render_calibration import render_calibration

        request = CalibrationRequest(
            target=target,
            drafter=drafter,
            prompts=tuple(prompts),
            output=output,
            held_out_prompts=tuple(held_out_prompts or ()),
            not_trained_fraction=not_trained_fraction,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            num_proposals=num_proposals,
            num_held_out_proposals=num_held_out_proposals,
            max_new_tokens=max_new_tokens,
            max_prompt_tokens=max_prompt_tokens,
            batch_size=batch_size,
            maps=maps,
            dtype=dtype,
            device=device,
            seed=seed,
            modes=CALIBRATION_MODES if mode is None else tuple(dict.fromkeys(mode)),
        )
        set_up_torch(threads)
        report = calibrate_drafter(request, show_progress=True)
        render_calibration(report, Console())
    if not report.written_modes:
        typer.echo(
            f"no mode was written, and no drafter in {output} was made or changed: {report.why_not_written}; fit on "
            "more rounds, or on other prompts",
            err=True,
        )
        raise typer.Exit(EXIT_NOTHING_WRITTEN)
    typer.echo(f"calibrated drafter in {output}, written: {', '.join(report.written_modes)}")
    if report.why_not_written:
        typer.echo(f"not written: {report.why_not_written}")
