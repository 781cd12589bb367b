"""A drafter's folder to the Hub: first a plan that can be shown, then one commit.

What a push changes: files of the drafter are added or replaced, and weights of an earlier push that would be loaded
instead of the new ones are deleted. All else in the repository stays. The commit names the state that was planned on,
so a change in between is never overwritten.
"""

import logging
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # lazily imported there

from ..errors import HubError
from .card import CARD_NAME, is_rendered, render_card
from .faults import PAUSES_S, is_transient, readable_faults, retrying
from .files import WEIGHT_NAMES, LeftOut, SharedFile, choose_files
from .remote import RemoteState, hub_api, read_card, read_remote

logger = logging.getLogger(__name__)

DEFAULT_BRANCH = "main"
# What becomes of a card on the Hub that was written or edited by hand. One that a push rendered is always replaced.
CARD_CHOICES = ("auto", "keep", "replace")
# Requests of a commit that huggingface_hub makes once; uploads it tries again itself.
_TRIED_ONCE = re.compile(r"/commit/|/validate-yaml$")


@dataclass(frozen=True)
class PushRequest:
    """What to push where.

    Attributes:
        repo_id: `name` or `organisation/name`.
        private: Of a repository that is made now; None: as the organisation has it, else public.
        token: Of the Hub; None: the one logged in with, or HF_TOKEN; False: none.
        revision: Branch, made if need be; None: main.
        create_pr: Whether to open a pull request instead.
        commit_message, commit_description: Of the commit.
        card: `auto` keeps a card that was edited on the Hub, `keep` any that is there, `replace` none.
        tags: Added to those of a rendered card.

    Raises:
        HubError: an argument breaks a rule.
    """

    repo_id: str
    private: bool | None = None
    token: str | bool | None = field(default=None, repr=False)
    revision: str | None = None
    create_pr: bool = False
    commit_message: str | None = None
    commit_description: str | None = None
    card: str = "auto"
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        with readable_faults(str(self.repo_id), "push to"):
            validate_repo_id(self.repo_id)
        if self.card not in CARD_CHOICES:
            raise HubError(f"card must be one of {', '.join(CARD_CHOICES)}, got {self.card!r}")
        if self.create_pr and self.branch != DEFAULT_BRANCH:
            raise HubError(
                f"create_pr opens a pull request to {DEFAULT_BRANCH}, and cannot be combined with revision "
                f"{self.revision!r}; leave one of the two out"
            )

    @property
    def branch(self) -> str:
        return self.revision or DEFAULT_BRANCH


@dataclass(frozen=True)
class PlannedFile:
    """A file to upload, and whether it is `new`, `replaced` or `unchanged` there."""

    file: SharedFile
    status: str


@dataclass(frozen=True)
class PushPlan:
    """What a push would do.

    Attributes:
        repo_id: `organisation/name`.
        request: As asked for.
        remote: The state that the plan is for.
        files: Of the drafter, in order.
        deletions: Weights on the Hub that the new ones take the place of.
        left_out: What of the folder stays here.
        card_note: What happens to the card on the Hub, where that may surprise; else empty.
    """

    repo_id: str
    request: PushRequest
    remote: RemoteState
    files: tuple[PlannedFile, ...]
    deletions: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    card_note: str

    @property
    def changed(self) -> list[SharedFile]:
        return [planned.file for planned in self.files if planned.status != "unchanged"]

    @property
    def is_empty(self) -> bool:
        return not self.changed and not self.deletions


def plan_push(folder: Path, request: PushRequest) -> PushPlan:
    """Compare a drafter's folder with the repository; nothing is changed there.

    Raises:
        CheckpointFormatError: the folder holds no drafter.
        HubError: the repository cannot be looked at, or must not be pushed to like this.
    """
    shared, left_out = choose_files(folder)
    api = hub_api(request.token)
    with readable_faults(request.repo_id, "look at"):
        repo_id = request.repo_id
        if "/" not in repo_id:
            repo_id = f"{retrying(api.whoami)['name']}/{repo_id}"
        remote = read_remote(api, repo_id, request.branch)
        there = read_card(api, repo_id, remote)
    if request.private and remote.is_private is False:
        raise HubError(
            f"{repo_id} exists and is public, and private=True only counts for a repository that is made now; make it "
            "private in its settings, or push without private=True"
        )
    own = next((file.path for file in shared if file.path == CARD_NAME), None)
    card, card_note = _choose_card(folder, own, repo_id, request, there)
    others = [file for file in shared if file.path != CARD_NAME]
    files = [*others, card] if card is not None else others
    planned = [PlannedFile(file, _status(file, remote)) for file in sorted(files, key=lambda file: file.path)]
    paths = {file.path for file in files}
    deletions = [path for path in sorted(remote.files) if WEIGHT_NAMES.fullmatch(path) and path not in paths]
    return PushPlan(repo_id, request, remote, tuple(planned), tuple(deletions), tuple(left_out), card_note)


def _status(file: SharedFile, remote: RemoteState) -> str:
    there = remote.files.get(file.path)
    if there is None:
        return "new"
    return "unchanged" if there.is_same(file) else "replaced"


def _choose_card(
    folder: Path, own: str | None, repo_id: str, request: PushRequest, there: str | None
) -> tuple[SharedFile | None, str]:
    """The card to upload, None to leave the one that is there, and what to say about that.

    A card in the folder that was rendered there is rendered anew: there it names the folder, and perhaps older reports.
    """
    content = (folder / own).read_bytes() if own is not None else b""
    if not content or is_rendered(content.decode(errors="replace")):
        content = render_card(folder, repo_id=repo_id, tags=request.tags).encode()
    if there is None or there.encode() == content or (is_rendered(there) and request.card != "keep"):
        return SharedFile(CARD_NAME, content), ""
    if request.card == "replace":
        return SharedFile(CARD_NAME, content), "replaces a card that was written or edited on the Hub"
    return None, "the card on the Hub stays as it is" + (
        "; it was written or edited there, and card='replace' would replace it" if request.card == "auto" else ""
    )


def push(plan: PushPlan) -> CommitInfo:
    """Carry out a plan in one commit; without a change there is none, and the last one is returned.

    Raises:
        HubError: the Hub refused or failed, or the repository was changed since the plan was made. Nothing is
            half-written then; a repository or branch that had to be made stays, without the drafter.
    """
    request, made = plan.request, ""
    api = hub_api(request.token)
    if plan.card_note:
        logger.warning("%s: %s", plan.repo_id, plan.card_note)
    try:
        with readable_faults(plan.repo_id, "push to"):
            head = plan.remote.head
            if not plan.remote.exists:
                retrying(lambda: api.create_repo(plan.repo_id, private=request.private, exist_ok=True))
                made = f"; {plan.repo_id} was made, and holds no drafter yet"
                head = _head_of_new(api, plan)
            elif plan.is_empty and plan.remote.has_branch and head is not None:
                return _commit_info(api, plan, head)
            elif not plan.remote.has_branch:
                retrying(lambda: _make_branch(api, plan))
                made = f"; the branch {request.branch} was made, and holds what {DEFAULT_BRANCH} does"
            return _commit(api, plan, head)
    except HubError as error:
        raise HubError(f"{error}{made}") from error.__cause__


def _head_of_new(api: HfApi, plan: PushPlan) -> str | None:
    remote = read_remote(api, plan.repo_id, DEFAULT_BRANCH)
    is_theirs = plan.request.private is True and remote.is_private is False
    if is_theirs or set(remote.files) - {".gitattributes"}:
        raise HubError(f"cannot push to {plan.repo_id}: somebody else made it meanwhile; look at it, then push again")
    if plan.request.branch != DEFAULT_BRANCH:
        retrying(lambda: _make_branch(api, plan))
    return remote.head


def _make_branch(api: HfApi, plan: PushPlan) -> None:
    api.create_branch(plan.repo_id, branch=plan.request.branch, revision=plan.remote.head, exist_ok=True)


def _commit(api: HfApi, plan: PushPlan, head: str | None) -> CommitInfo:
    for pause_s in (*PAUSES_S, None):
        try:
            return api.create_commit(
                plan.repo_id,
                _operations(plan),
                commit_message=plan.request.commit_message or "Upload DSpark drafter",
                commit_description=plan.request.commit_description,
                revision=plan.request.branch,
                create_pr=plan.request.create_pr,
                parent_commit=head,
            )
        except Exception as error:
            # A commit may have arrived all the same; the parent that it names makes another try safe. A pull request
            # has no such guard.
            if pause_s is None or plan.request.create_pr or not (is_transient(error) and _was_tried_once(error)):
                raise
            time.sleep(pause_s)
            now = read_remote(api, plan.repo_id, plan.request.branch)
            if now.head != head:
                if _has_arrived(plan, now) and now.head is not None:
                    return _commit_info(api, plan, now.head)
                raise HubError(
                    f"cannot push to {plan.repo_id}: the connection failed, and somebody else changed the repository "
                    "meanwhile; look at what changed there, then push again"
                ) from error
    raise AssertionError("the last try returns or raises")


def _operations(plan: PushPlan) -> list[CommitOperationAdd | CommitOperationDelete]:
    additions = [CommitOperationAdd(file.path, file.source) for file in plan.changed]
    return [*additions, *(CommitOperationDelete(path, is_folder=False) for path in plan.deletions)]


def _was_tried_once(error: Any) -> bool:
    try:
        request = getattr(error, "response", error).request
    except RuntimeError:  # httpx has errors without a request
        return False
    return _TRIED_ONCE.search(request.url.path) is not None


def _has_arrived(plan: PushPlan, remote: RemoteState) -> bool:
    return all(file.path in remote.files and remote.files[file.path].is_same(file) for file in plan.changed) and not (
        set(plan.deletions) & set(remote.files)
    )


def _commit_info(api: HfApi, plan: PushPlan, head: str) -> CommitInfo:
    return CommitInfo(
        commit_url=f"{api.endpoint}/{plan.repo_id}/commit/{head}",
        commit_message=plan.request.commit_message or "",
        commit_description=plan.request.commit_description or "",
        oid=head,
        _endpoint=api.endpoint,
    )
