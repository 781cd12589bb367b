"""`dspark simulate`."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from .common import DebugOption, readable_errors


@contextmanager
def _quiet_drift() -> Iterator[None]:
    """Simulated drift is told in the report; nobody is to calibrate anything."""
    drift = logging.getLogger("dspark_hf.decoding.drift")
    level = drift.level
    drift.setLevel(logging.ERROR)
    try:
        yield
    finally:
        drift.setLevel(level)


def simulate_command(
    output: Annotated[Path, typer.Option(help="Folder of the report and its figures.")],
    machine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="accelerator|staircase|FILE",
            help="Formula, or a profile written by `dspark profile --json`; may be repeated. Default: both formulas.",
        ),
    ] = None,
    traces: Annotated[
        Path | None,
        typer.Option(help="Recorded acceptance. Default: as the paper shows it for DSpark on Qwen3-4B."),
    ] = None,
    mtp_traces: Annotated[
        Path | None,
        typer.Option(help="The same of an MTP-1 drafter on the same prompts. Default: the drafter's first slot."),
    ] = None,
    system: Annotated[
        list[str] | None,
        typer.Option(metavar="plain|mtp-1|fixed-K|POLICY", help="May be repeated. Default: all but `threshold`."),
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(help="Users of a closed loop; may be repeated. Default: up to the machine's."),
    ] = None,
    load: Annotated[
        list[float] | None,
        typer.Option(help="Poisson arrivals, as a share of what plain steps can do; may be repeated."),
    ] = None,
    lengths: Annotated[
        str, typer.Option(metavar="traces|fixed:PROMPT,ANSWER|geometric:PROMPT,ANSWER", help="Tokens.")
    ] = "traces",
    max_rows: Annotated[int | None, typer.Option(help="Most rows of a round. Default: the largest loop.")] = None,
    prefill_token_ms: Annotated[
        float | None, typer.Option(help="Milliseconds that a prompt's token holds up all rows. Default: the machine's.")
    ] = None,
    min_drafts_every: Annotated[int | None, typer.Option(help="The floor whose effect is shown.")] = None,
    odds_factor: Annotated[
        float | None, typer.Option(help="Drift: what odds of acceptance estimates are multiplied by.")
    ] = None,
    num_requests: Annotated[int | None, typer.Option(help="Least requests that a run measures.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs of each point.")] = None,
    seed: Annotated[int, typer.Option(help="The first of them.")] = 0,
    smoke: Annotated[bool, typer.Option("--smoke", help="A few small runs, to see that everything works.")] = False,
    debug: DebugOption = False,
) -> None:
    """Simulate a server with continuous batching: drafting systems under load, from measured step times and traces.

    Speed of a user against throughput of all, verified tokens against concurrency, fairness, a shift of traffic and a
    drift of calibration; the paper's curves beside them. Writes simulation.json, simulation.md and figures.

    Exit codes: 0 done, 2 bad input, 130 interrupted.
    """
    with readable_errors(debug, "interrupted: nothing was written"):
        import torch

        from dspark_hf.evaluation.simulation import SimulationRequest, simulate
        from dspark_hf.evaluation.simulation.files import prepare, write
        from dspark_hf.evaluation.simulation.workload import LengthLaw

        asked: dict[str, Any] = {
            "machines": None if machine is None else tuple(machine),
            "systems": None if system is None else tuple(system),
            "concurrency": None if concurrency is None else tuple(concurrency),
            "loads": None if load is None else tuple(load),
            "min_drafts_every": min_drafts_every,
            "odds_factor": odds_factor,
            "num_requests": num_requests,
            "num_seeds": seeds,
            "traces": traces,
            "mtp_traces": mtp_traces,
            "max_rows": max_rows,
            "prefill_token_ms": prefill_token_ms,
        }
        given = {name: value for name, value in asked.items() if value is not None}
        request = SimulationRequest(output=output, lengths=LengthLaw.parse(lengths), seed=seed, **given)
        if smoke:
            request = request.smoke()
        prepare(output)
        torch.set_num_threads(1)  # policies work on tensors too small to share
        with _quiet_drift():
            report = simulate(request, show_progress=True)
        for path in write(report, output):
            typer.echo(f"written  {path}")
