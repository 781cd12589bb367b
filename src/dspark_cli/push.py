"""`dspark push`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common import EXIT_NOTHING_WRITTEN, DebugOption, readable_errors, set_up_torch

if TYPE_CHECKING:
    from dspark_hf.hub.publish import PushPlan

FolderArgument = Annotated[Path, typer.Argument(help="The drafter's folder, from `dspark train` or save_pretrained.")]


def push_command(
    folder: FolderArgument,
    to: Annotated[str, typer.Option("--to", metavar="ORG/NAME", help="Repository; made if it is not there.")],
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Of a new repository. Default: the organisation's.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, made if need be. Default: main.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request to main instead.")] = False,
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
    keep_card: Annotated[bool, typer.Option("--keep-card", help="Leave the card on the Hub as it is.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    debug: DebugOption = False,
) -> None:
    """Upload a drafter to the Hub: weights, config with calibration, card and reports, in one commit.

    Shows first what it would upload, replace and delete, and what it leaves out, and asks. Log in with `hf auth login`
    or set HF_TOKEN. A README.md in the folder is the card; without one it is rendered from config and reports.

    Exit codes: 0 done, 1 not wanted, 2 bad input or the Hub refused, 130 interrupted.
    """
    with readable_errors(debug, "interrupted; what is on the Hub is as it was, or holds the whole commit"):
        from dspark_hf import DSparkDraftModel, HubError
        from dspark_hf.hub.publish import PushRequest, plan_push, push

        set_up_torch(None)
        request = PushRequest(
            repo_id=to,
            private=private,
            revision=revision,
            create_pr=create_pr,
            commit_message=message,
            card="keep" if keep_card else "replace",
        )
        plan = plan_push(folder, request)
        DSparkDraftModel.from_pretrained(folder, dtype="auto")  # what nobody could load is not shared
        _show(plan)
        if plan.is_empty and plan.remote.has_branch:
            typer.echo("nothing to push, all of it is there")
            return
        if not yes and not _somebody_is_there():
            raise HubError("nobody is there to ask whether to push; pass --yes to push without being asked")
        if not yes and not typer.confirm("Push?"):
            typer.echo("nothing was pushed")
            raise typer.Exit(EXIT_NOTHING_WRITTEN)
        commit = push(plan)
    typer.echo(f"pushed: {commit.pr_url or commit.commit_url}")


def _somebody_is_there() -> bool:
    return sys.stdin.isatty()


def _show(plan: "PushPlan") -> None:
    where = f"{plan.repo_id}, branch {plan.request.branch}"
    if plan.request.create_pr:
        where = f"{plan.repo_id}, as a pull request"
    typer.echo(f"to {where} ({_visibility(plan)})")
    for planned in plan.files:
        typer.echo(f"  {planned.status:<9}  {_size(planned.file.size_bytes):>9}  {planned.file.path}")
    for path in plan.deletions:
        typer.echo(f"  deleted    {'':>9}  {path}: weights that would be loaded instead")
    if plan.card_note:
        typer.echo(f"README.md: {plan.card_note}")
    if plan.left_out:
        typer.echo("stays here:")
    for left in plan.left_out:
        typer.echo(f"  {left.path}: {left.reason}")


def _visibility(plan: "PushPlan") -> str:
    if plan.remote.exists:
        return "exists, private" if plan.remote.is_private else "exists, PUBLIC"
    if plan.request.private is None:
        return "new, PUBLIC unless the organisation makes new ones private"
    return "new, private" if plan.request.private else "new, PUBLIC"


def _size(num_bytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} B"
