"""A repository on the Hub as it is now: whether it is there, who sees it, and what its files are."""

import hashlib
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile

from .._version import __version__
from .faults import retrying
from .fetch import content_hash
from .files import CARD_NAME, SharedFile

_LARGEST_CARD_BYTES = 2**20


@dataclass(frozen=True)
class RemoteFile:
    """A file on the Hub: the hash that it is known by, SHA-256 if it is large, else git's."""

    content_hash: str
    is_lfs: bool

    def is_same(self, file: SharedFile) -> bool:
        """Whether a local file has the same content."""
        if isinstance(file.source, Path):
            return content_hash(file.source, is_lfs=self.is_lfs) == self.content_hash
        if self.is_lfs:
            return hashlib.sha256(file.source).hexdigest() == self.content_hash
        blob = b"blob %d\0" % len(file.source) + file.source
        return hashlib.sha1(blob, usedforsecurity=False).hexdigest() == self.content_hash


@dataclass(frozen=True)
class RemoteState:
    """A repository and one of its branches.

    Attributes:
        exists: Whether there is a repository that the token may see.
        is_private: None if it does not exist.
        head: Commit of the branch, or of the one that it would be made from.
        has_branch: Whether the branch is there.
        files: Of `head`, by path.
    """

    exists: bool
    is_private: bool | None = None
    head: str | None = None
    has_branch: bool = False
    files: dict[str, RemoteFile] = field(default_factory=dict)


def hub_api(token: str | bool | None) -> HfApi:
    """A client that says who calls."""
    return HfApi(token=token, library_name="dspark-hf", library_version=__version__)


def read_remote(api: HfApi, repo_id: str, revision: str) -> RemoteState:
    """The state of a branch; raises what huggingface_hub raises."""
    has_branch = True
    try:
        info = retrying(lambda: api.model_info(repo_id, revision=revision))
    except RevisionNotFoundError:
        has_branch, info = False, retrying(lambda: api.model_info(repo_id))
    except RepositoryNotFoundError as error:
        if isinstance(error, GatedRepoError):
            raise
        return RemoteState(False)
    entries = retrying(lambda: list(api.list_repo_tree(repo_id, recursive=True, revision=info.sha)))
    files = {
        entry.path: RemoteFile(entry.lfs.sha256 if entry.lfs else entry.blob_id, entry.lfs is not None)
        for entry in entries
        if isinstance(entry, RepoFile)
    }
    return RemoteState(True, bool(info.private), info.sha, has_branch, files)


def read_card(api: HfApi, repo_id: str, remote: RemoteState) -> str | None:
    """The text of the card on the Hub; None where there is none, or none that can be read as text."""
    if CARD_NAME not in remote.files:
        return None
    with tempfile.TemporaryDirectory() as cache:
        found = retrying(lambda: api.hf_hub_download(repo_id, CARD_NAME, revision=remote.head, cache_dir=cache))
        path = Path(found)
        if path.stat().st_size > _LARGEST_CARD_BYTES:
            return ""
        return path.read_text(encoding="utf-8", errors="replace")
