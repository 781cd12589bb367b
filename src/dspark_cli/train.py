"""`dspark train` and `dspark train data`."""

from pathlib import Path
from typing import Annotated

import typer

from .common import (
    EXIT_INTERRUPTED,
    DebugOption,
    DeviceOption,
    TargetOption,
    ThreadsOption,
    readable_errors,
    set_up_torch,
)
from .common import (
    DtypeOption as CommonDtypeOption,
)

train_app = typer.Typer(add_completion=False, invoke_without_command=True)

DtypeOption = Annotated[str, typer.Option(metavar="bfloat16|float32", help="Of the target and of products.")]
SeedOption = Annotated[int, typer.Option(help="Of weights, data order, anchors, sampling.")]
_BY_SIZE = "Default: from the target's size."
PANEL = "Drafter"


@train_app.callback()
def train_command(
    context: typer.Context,
    target: TargetOption = "smollm2-135m-instruct",
    data: Annotated[
        list[Path] | None, typer.Option(help="Answers (JSONL, Parquet) or folders of them; may be repeated.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the drafter; an interrupted run goes on.")] = None,
    drafter_type: Annotated[
        str, typer.Option(metavar="dspark|mtp|eagle3", help="What to train; the last two are baselines.")
    ] = "dspark",
    num_hidden_layers: Annotated[int | None, typer.Option(help=f"Draft layers. {_BY_SIZE}")] = None,
    block_size: Annotated[int | None, typer.Option(help="gamma. Default: 5 on a CPU, else 7.")] = None,
    markov_rank: Annotated[int | None, typer.Option(help=f"Of the sequential head; 0: none. {_BY_SIZE}")] = None,
    markov_head_type: Annotated[
        str | None, typer.Option(metavar="vanilla|gated|rnn", help="Sequential head. Default: vanilla.")
    ] = None,
    draft_vocab_size: Annotated[
        int | None, typer.Option(help=f"Tokens that can be drafted; 0: all. {_BY_SIZE}")
    ] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the data, each with new anchors.")] = 10.0,
    max_steps: Annotated[int | None, typer.Option(help="Instead of epochs: optimiser steps.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Instead of epochs: time to fill.")] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences per step.")] = 4,
    max_anchors: Annotated[int, typer.Option(help="Blocks per sequence and step.")] = 64,
    learning_rate: Annotated[float | None, typer.Option(help=f"Peak learning rate. {_BY_SIZE}")] = None,
    head_learning_rate_multiplier: Annotated[float, typer.Option(help="Of sequential and confidence head.")] = 1.0,
    decay_fraction: Annotated[
        float, typer.Option(help="Share of the steps, at the end, in which it falls to 0.")
    ] = 0.25,
    max_length: Annotated[int, typer.Option(help="Tokens kept of a sequence.")] = 2048,
    held_out_fraction: Annotated[float, typer.Option(help="Share of prompts evaluated, never trained on.")] = 0.05,
    num_evaluations: Annotated[
        int | None, typer.Option(help="Evenly spaced. Default: as many as take a fifth of the time.")
    ] = None,
    features: Annotated[
        str, typer.Option(metavar="cache|online", help="Target features: once, on disk, or at every step.")
    ] = "cache",
    feature_cache: Annotated[
        Path | None, typer.Option(help="Its folder; runs on the same data may share one. Default: below the output.")
    ] = None,
    max_cache_gb: Annotated[float, typer.Option(help="Limit of the feature cache.")] = 20.0,
    initial_drafter: Annotated[
        str | None, typer.Option(help="Drafter to start from. Default: the target's last layers.")
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Forget the output's checkpoints.")] = False,
    dtype: DtypeOption = "bfloat16",
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
    debug: DebugOption = False,
) -> None:
    """Train a drafter on a target's answers, which `dspark train data` makes.

    Prints an estimate of time and memory first. Ctrl-C leaves a usable drafter; the same command goes on from there.

    Exit codes: 0 done, 2 bad input, 130 interrupted.
    """
    if context.invoked_subcommand is not None:
        given = [name for name in context.params if _is_typed(context, name)]
        if given:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise typer.BadParameter(f"{options} must stand behind `{context.invoked_subcommand}`", ctx=context)
        return
    if not data or output is None:
        raise typer.BadParameter("needs --data and --output; answers are made by `dspark train data`", ctx=context)
    with readable_errors(debug, lambda: _when_interrupted(output)):
        from dspark_hf.training.recipe import TrainingRequest
        from dspark_hf.training.run import train_drafter

        request = TrainingRequest(
            target=target,
            data=tuple(str(path) for path in data),
            output=output,
            drafter_type=drafter_type,
            num_hidden_layers=num_hidden_layers,
            block_size=block_size,
            markov_rank=markov_rank,
            markov_head_type=markov_head_type,
            draft_vocab_size=draft_vocab_size,
            epochs=epochs,
            max_steps=max_steps,
            minutes=minutes,
            batch_size=batch_size,
            max_anchors=max_anchors,
            learning_rate=learning_rate,
            head_learning_rate_multiplier=head_learning_rate_multiplier,
            decay_fraction=decay_fraction,
            max_length=max_length,
            held_out_fraction=held_out_fraction,
            num_evaluations=num_evaluations,
            features=features,
            feature_cache=feature_cache,
            max_cache_gb=max_cache_gb,
            dtype=dtype,
            device=device,
            initial_drafter=initial_drafter,
            restart=restart,
            seed=seed,
        )
        set_up_torch(threads)
        outcome = train_drafter(request, typer.echo)
        typer.echo(f"drafter after {outcome.num_steps} steps in {outcome.folder}")
    if not outcome.is_finished:
        typer.echo("interrupted; the same command goes on from here", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)


def _when_interrupted(output: Path) -> str:
    if any((output / "checkpoints").glob("checkpoint-*")):
        return "interrupted; the checkpoints written so far are whole"
    return f"interrupted before the first checkpoint: no drafter is in {output}; the same command starts again"


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


@train_app.command("data")
def train_data_command(
    prompts: Annotated[
        list[str], typer.Option(help="Text or chat data: file, folder or Hub data set; may be repeated.")
    ],
    output: Annotated[Path, typer.Option(help="`.jsonl` or `.parquet`; an interrupted run goes on.")],
    target: TargetOption = "smollm2-135m-instruct",
    temperature: Annotated[
        list[float] | None, typer.Option(help="One of the mix; may be repeated. Default: 0, 0.7 and 1.")
    ] = None,
    share: Annotated[
        list[float] | None, typer.Option(help="Of each temperature, in order. Default: 70 % for 0.")
    ] = None,
    answers_per_prompt: Annotated[int, typer.Option(help="At as many different temperatures.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 256,
    max_prompt_tokens: Annotated[int, typer.Option(help="Longer prompts are skipped.")] = 1024,
    max_prompts: Annotated[int | None, typer.Option(help="Most rows of each source.")] = None,
    split: Annotated[str, typer.Option(help="Of Hub data sets.")] = "train",
    batch_size: Annotated[int, typer.Option(help="Prompts answered at a time.")] = 32,
    dtype: CommonDtypeOption = "bfloat16",
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
    debug: DebugOption = False,
) -> None:
    """Let the target answer prompts: what a drafter is trained on.

    Exit codes: 0 done, 2 bad input, 130 interrupted.
    """
    with readable_errors(debug, "interrupted; finished answers are kept, the same command goes on"):
        from dspark_hf.training.responses_command import run_train_data

        set_up_torch(threads)
        summary = run_train_data(
            target,
            prompts,
            output,
            temperatures=temperature or (0.0, 0.7, 1.0),
            shares=share,
            answers_per_prompt=answers_per_prompt,
            max_new_tokens=max_new_tokens,
            max_prompt_tokens=max_prompt_tokens,
            max_prompts=max_prompts,
            split=split,
            batch_size=batch_size,
            dtype=dtype,
            device=device,
            seed=seed,
        )
        typer.echo(
            f"{summary.num_answers + summary.num_resumed} answers of {summary.num_prompts} prompts in "
            f"{summary.output}, {summary.num_resumed} of them from before; of the {summary.num_answers} made now: "
            f"{summary.num_response_tokens} tokens, {summary.num_stopped} ended by themselves; skipped "
            f"{summary.num_skipped_unusable} prompts without text and {summary.num_skipped_long} too long ones"
        )
