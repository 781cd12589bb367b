"""`dspark card`."""

from pathlib import Path
from typing import Annotated

import typer

from .common import EXIT_DIFFERENT, DebugOption, readable_errors


def card_command(
    folder: Annotated[Path, typer.Argument(help="The drafter's.", show_default=False)],
    repo_id: Annotated[
        str | None, typer.Option(help="Hub id that the drafter is shared under. Default: a card to be read locally.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Default: README.md in the folder.")] = None,
    report: Annotated[
        list[Path] | None,
        typer.Option(
            help="Keep this report, and the PNG of its name, with the drafter first: what `eval`, `compare`, `train` "
            "or `calibrate` wrote about these weights; may be repeated."
        ),
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="Hub id of the target, where no report says it. Kept with the drafter.")
    ] = None,
    license_id: Annotated[
        str | None, typer.Option("--license", help="As the Hub spells it, e.g. apache-2.0. Kept with the drafter.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; say whether the card is up to date.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Even a card written or changed by hand.")] = False,
    debug: DebugOption = False,
) -> None:
    """Write a drafter's model card from its config, its measured reports and where they come from.

    Reports lie in FOLDER/reports: `dspark train` and `dspark calibrate` put theirs there, --report adds others. What
    was not measured is said to be so. Text of your own goes into FOLDER/notes.md.

    Exit codes: 0 done, 1 --check found another card, 2 bad input.
    """
    with readable_errors(debug, "interrupted: nothing was written"):
        from dspark_hf.errors import ReportError
        from dspark_hf.hub.card import CARD_NAME, render_card, reports_address, write_card
        from dspark_hf.hub.report_store import About, add_report, keep_about

        if check and (report or base_model or license_id):
            raise ReportError("--check writes nothing; leave out --report, --base-model and --license, or --check")
        for file in report or ():
            typer.echo(f"kept  {add_report(folder, file)}")
        if base_model or license_id:
            keep_about(folder, About(base_model, license_id))
        path = output or folder / CARD_NAME
        text = render_card(folder, repo_id=repo_id, reports_at=reports_address(folder, path))
        if not check:
            write_card(path, text, replace=replace)
            typer.echo(f"card  {path}")
            return
        is_current = path.is_file() and path.read_text(encoding="utf-8", errors="replace") == text
    if not is_current:
        typer.echo(f"{path} is not what `dspark card` writes; run it without --check", err=True)
        raise typer.Exit(EXIT_DIFFERENT)
    typer.echo(f"{path} is up to date")
