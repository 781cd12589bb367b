"""`dspark bench`."""

from importlib.util import find_spec
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
    TargetOption,
    ThreadsOption,
    readable_errors,
    require,
    set_up_torch,
)
from .compare import read_prompts

if TYPE_CHECKING:
    from dspark_hf.evaluation.bench.report import BenchReport
    from dspark_hf.evaluation.bench.request import BenchRequest
    from dspark_hf.prompts import Prompt

DrafterOption = Annotated[
    list[str] | None,
    typer.Option(metavar="[NAME=]FOLDER", help="Folder or Hub id; may be repeated. Default: the bundled one."),
]
PolicyOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="own|full|threshold|survival|goodput|prefix|smoothed|block|lagged[:N]",
        help="Of every drafter that can follow it; :N for at most N drafts; may be repeated. Default: full.",
    ),
]


def bench_command(
    output: Annotated[Path, typer.Option(help="Folder of measurements and report; an interrupted run goes on.")],
    target: TargetOption = "smollm2-135m-instruct",
    drafter: DrafterOption = None,
    policy: PolicyOption = None,
    sibling: Annotated[
        str | None, typer.Option(help="Smaller model of the target's family, for assisted generation.")
    ] = None,
    prompt_lookup: Annotated[int, typer.Option(help="Drafts that prompt lookup takes; 0 leaves it out.")] = 10,
    prompts_file: Annotated[
        Path | None,
        typer.Option(help="JSONL; a line has `prompt`, `messages` or `turns`. Default: shipped ones."),
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Only the first N. Default: all.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most new tokens per prompt of the main table.")] = 64,
    repeats: Annotated[int, typer.Option(help="Times each prompt of the main table runs.")] = 1,
    batch_size: Annotated[
        list[int] | None, typer.Option(help="Points of the batch sweep; may be repeated. 0: no sweep.")
    ] = [1, 4, 16],  # noqa: B006  # typer copies it
    context: Annotated[
        list[int] | None, typer.Option(help="Points of the context sweep; may be repeated. 0: no sweep.")
    ] = [128, 512, 1024],  # noqa: B006
    swept_drafter: Annotated[
        list[str] | None, typer.Option(help="Name of a drafter that runs in the sweeps. Default: the first.")
    ] = None,
    sweep_new_tokens: Annotated[int, typer.Option(help="New tokens per prompt of the sweeps.")] = 32,
    sweep_repeats: Annotated[int, typer.Option(help="Repetitions of the sweeps.")] = 4,
    profile_repeats: Annotated[int, typer.Option(help="Measurements per point, where no profile is at hand.")] = 5,
    temperature: Annotated[float, typer.Option(help="0 is greedy; above 0 samples.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Default: no cut.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Default: no cut.")] = None,
    dtype: DtypeOption = "bfloat16",
    device: DeviceOption = "auto",
    seed: Annotated[int, typer.Option(help="Of sampling, orders, intervals, untrained weights.")] = 0,
    threads: ThreadsOption = None,
    debug: DebugOption = False,
) -> None:
    """Time plain, assisted and DSpark generation side by side, and explain the numbers.

    One run on one target: every way takes its turn at each forward. Then sweeps over batches and contexts, Eq. 1 of the
    paper against the measurement, and which gamma and depth pay here. Ctrl-C keeps what is done; the same command goes
    on from there.

    Exit codes: 0 done, 1 greedy texts differ where they must not, 2 bad input, 130 interrupted.
    """
    with readable_errors(debug, "interrupted before any run was finished; what is measured is kept"):
        _check_extras()
        from dspark_hf.evaluation.bench.request import BenchRequest, parse_drafters
        from dspark_hf.evaluation.bench.settings import DEFAULT_POLICIES, BenchSettings

        settings = BenchSettings(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            policies=tuple(policy or DEFAULT_POLICIES),
            prompt_lookup_num_tokens=prompt_lookup,
            batch_sizes=_points(batch_size),
            contexts=_points(context),
            sweep_new_tokens=sweep_new_tokens,
            sweep_repeats=sweep_repeats,
            seed=seed,
        )
        request = BenchRequest(
            target=target,
            prompts=_prompts(prompts_file, num_prompts),
            output=output,
            settings=settings,
            drafters=parse_drafters(drafter or []),
            sibling=sibling,
            swept=None if swept_drafter is None else tuple(swept_drafter),
            dtype=dtype,
            device=device,
            profile_repeats=profile_repeats,
        )
        set_up_torch(threads)
        report, is_interrupted = _measure(request)
        _write_and_show(report, output)
    if is_interrupted:
        typer.echo("interrupted: the report covers what was measured; the same command goes on", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)
    raise typer.Exit(EXIT_NOT_LOSSLESS if report.num_errors else EXIT_DONE)


def _check_extras() -> None:
    for name in ("greenlet", "scipy"):
        installed = find_spec(name) is not None
        require(installed, name, None, 'installed for this command: pip install "dspark-hf[eval]"')


def _points(values: list[int] | None) -> tuple[int, ...]:
    """Of a sweep; a lone 0 stands for none."""
    return () if values == [0] else tuple(values or ())


def _prompts(prompts_file: Path | None, num_prompts: int | None) -> "tuple[Prompt, ...]":
    return tuple(read_prompts(prompts_file, num_prompts))


def _measure(request: "BenchRequest") -> "tuple[BenchReport, bool]":
    from dspark_hf.evaluation.bench.run import BenchInterrupted, run_bench

    try:
        return run_bench(
            request,
            show_progress=True,
            tell=lambda line: typer.echo(line, err=True),
            keep=lambda report: _write_and_show(report, request.output),
        ), False
    except BenchInterrupted as stop:
        if stop.report is None:
            raise
        return stop.report, True


def _write_and_show(report: "BenchReport", folder: Path) -> None:
    from rich.console import Console

    from dspark_hf.evaluation.bench.figures import draw_figures
    from dspark_hf.evaluation.bench.show import print_report, to_markdown, write_page
    from dspark_hf.evaluation.provenance import write_report

    write_report(folder / "bench.json", report.to_dict())  # first: whatever happens to the terminal, they are kept
    write_page(folder / "bench.md", to_markdown(report, draw_figures(report, folder)))
    print_report(report, Console())
    typer.echo(f"written  {folder / 'bench.json'}, {folder / 'bench.md'}")
