"""`dspark convert`."""

from pathlib import Path
from typing import Annotated

import typer

from .common import DebugOption, readable_errors, set_up_torch


def convert_command(
    drafter: Annotated[str, typer.Argument(help="Folder or Hub id, of any format that loads.")],
    to: Annotated[
        str,
        typer.Option(metavar="speculators|deepspec|specforge", help="speculators: for vLLM. specforge: for SGLang."),
    ],
    output: Annotated[Path, typer.Option(help="New folder.")],
    target: Annotated[
        str | None,
        typer.Option(
            help="Folder or Hub id of its target, for deepspec, which stores copies of embedding and head, and for "
            "speculators, which names it."
        ),
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Write a drafter as another project stores it, so that its serving engine loads it.

    What the format has no place for and no draft depends on (calibration, policies) is left out and named; a drafter
    that it cannot express is refused. Weights keep their dtype.

    Exit codes: 0 done, 2 bad input, 130 interrupted.
    """
    with readable_errors(debug, "interrupted, nothing was written"):
        from dspark_hf.checkpoints.convert import convert_drafter
        from dspark_hf.evaluation.loading import load_as_stored
        from dspark_hf.zoo import hub_name

        set_up_torch(None)
        name = None if target is None else hub_name(target)
        model, loaded_target = load_as_stored(drafter, target)
        made = convert_drafter(model, to, output, target=loaded_target, target_name=name)
    typer.echo(f"{made.num_tensors} weights and config.json in {made.folder}, as {to} stores them")
    if made.left_out:
        typer.echo(f"left out, the format has no place for it: {', '.join(made.left_out)}")
