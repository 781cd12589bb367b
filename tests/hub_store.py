"""What a Hub remembers, in memory: repositories with their commits and branches; and faults to come."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field

MAIN = "main"
LFS_SUFFIXES = (".safetensors", ".png", ".bin", ".pt", ".pth")


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_lfs(path: str) -> bool:
    return path.endswith(LFS_SUFFIXES)


@dataclass
class Commit:
    oid: str
    parent: str | None
    title: str
    files: dict[str, bytes]


@dataclass
class Repo:
    """Files by path in each commit; branches, tags and pull requests by name."""

    name: str
    is_private: bool = False
    is_gated: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], title: str, parent: str | None, ref: str) -> str:
        text = f"{self.name} {len(self.commits)} {title} {parent}"
        oid = hashlib.sha1(text.encode()).hexdigest()
        self.commits[oid] = Commit(oid, parent, title, files)
        self.refs[ref] = oid
        return oid

    def find(self, revision: str) -> Commit | None:
        return self.commits.get(self.refs.get(revision, revision))

    def history(self, revision: str = MAIN) -> list[Commit]:
        found, commit = [], self.find(revision)
        while commit is not None:
            found.append(commit)
            commit = self.commits.get(commit.parent)
        return found

    def files(self, revision: str = MAIN) -> dict[str, bytes]:
        return self.find(revision).files


@dataclass
class Fault:
    """What goes wrong with requests whose "METHOD path" matches.

    kind: `status` answers with `status`; `cut` drops the connection before an answer; `cut_after` does so after the
    request was carried out; `cut_body` ends the answer half-way; `corrupt` changes a byte of the answer.
    times: How often; None: for ever.
    """

    pattern: str
    kind: str
    times: int | None = 1
    status: int = 503
    headers: dict[str, str] = field(default_factory=dict)

    def hits(self, request: str) -> bool:
        if self.times == 0 or not re.search(self.pattern, request):
            return False
        if self.times is not None:
            self.times -= 1
        return True
