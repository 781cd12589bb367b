"""`dspark traces`."""

from pathlib import Path
from typing import Annotated

import typer

from .common import (
    DebugOption,
    DeviceOption,
    DtypeOption,
    TargetOption,
    ThreadsOption,
    readable_errors,
    set_up_torch,
)


def traces_command(
    output: Annotated[Path, typer.Option(help="File of the traces, JSONL.")],
    texts: Annotated[
        list[Path] | None,
        typer.Option(help="Answers of the target, from `dspark train data`: a draft is made at each of their tokens."),
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(help="Instead of texts: decode these, as `dspark train data` takes them, and keep the rounds."),
    ] = None,
    target: TargetOption = "smollm2-135m-instruct",
    drafter: Annotated[
        str | None, typer.Option(help="Folder or Hub id. Default: the one shipped for the target.")
    ] = None,
    mode: Annotated[str, typer.Option(metavar="greedy|sampled")] = "greedy",
    temperature: Annotated[float, typer.Option(help="Of mode sampled; of texts, those drawn at it are taken.")] = 1.0,
    max_per_domain: Annotated[
        int | None, typer.Option(help="Most texts or prompts of each domain, what stands before the slash of an id.")
    ] = None,
    num_rounds: Annotated[int, typer.Option(help="Of prompts: rounds after which decoding stops.")] = 20_000,
    max_new_tokens: Annotated[int, typer.Option(help="Of prompts: most new tokens of each.")] = 192,
    max_prompt_tokens: Annotated[int, typer.Option(help="Of prompts: longer ones are left out.")] = 1024,
    batch_size: Annotated[int, typer.Option(help="Prompts decoded at a time.")] = 16,
    dtype: DtypeOption = "bfloat16",
    device: DeviceOption = "auto",
    seed: Annotated[int, typer.Option(help="Of sampling and of the order of prompts.")] = 0,
    threads: ThreadsOption = None,
    debug: DebugOption = False,
) -> None:
    """Record acceptance traces: what a drafter was sure of, and what the target accepted.

    `dspark ablate` compares schedules on them, without the models. From texts, any schedule is replayed as it would
    run; from prompts, as rounds of whole drafts followed each other.

    Exit codes: 0 done, 2 bad input, 130 interrupted.
    """
    with readable_errors(debug, "interrupted; rounds decoded of prompts are kept, and the same command goes on"):
        from dspark_hf.evaluation.trace_sources import TraceRequest, record_traces

        request = TraceRequest(
            target=target,
            drafter=drafter,
            output=output,
            texts=tuple(texts or ()),
            prompts=tuple(prompts or ()),
            mode=mode,
            temperature=temperature,
            max_per_domain=max_per_domain,
            num_rounds=num_rounds,
            max_new_tokens=max_new_tokens,
            max_prompt_tokens=max_prompt_tokens,
            batch_size=batch_size,
            dtype=dtype,
            device=device,
            seed=seed,
        )
        set_up_torch(threads)
        traces = record_traces(request, show_progress=True)
    num_places = sum(map(len, traces.prompts))
    typer.echo(
        f"{num_places} rounds of {len(traces.prompts)} prompts ({', '.join(traces.domains)}), layout {traces.layout}, "
        f"in {output}"
    )
