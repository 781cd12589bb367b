"""Where numbers come from, and JSON reports that are whole or absent."""

import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from .._machine import device_name as device_name
from .._machine import dtype_name as dtype_name
from .._machine import write_json as write_json
from .._version import __version__
from .scrub import scrub as scrub
from .scrub import scrub_all, scrub_arguments


@dataclass(frozen=True)
class Provenance:
    """What a reader needs to judge or repeat a measurement.

    Attributes:
        command: Command line, scrubbed (see `scrub`).
        date_utc: ISO 8601, seconds.
        versions: Of dspark_hf, torch, transformers and Python.
        git_commit: Commit that holds this package's source; None when it is not in a repository.
        git_is_dirty: Whether that source differs from the commit; None likewise.
        device: Type and name, e.g. `cpu: AMD EPYC 9B14`.
        num_threads: Threads that torch computes with on the CPU.
        dtype: Of the target's weights.
        seed: Of untrained weights, sampling and resampling.
        n: Prompts measured.
    """

    command: str
    date_utc: str
    versions: dict[str, str]
    git_commit: str | None
    git_is_dirty: bool | None
    device: str
    num_threads: int
    dtype: str
    seed: int
    n: int


def collect_provenance(
    device: torch.device,
    dtype: torch.dtype,
    *,
    seed: int,
    n: int,
    argv: Sequence[str] | None = None,
) -> Provenance:
    """Provenance of a measurement made by this process."""
    commit, is_dirty = _git_state(Path(__file__).parent)
    return Provenance(
        command=command_line(argv),
        date_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={
            "dspark_hf": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        git_commit=commit,
        git_is_dirty=is_dirty,
        device=device_name(device),
        num_threads=torch.get_num_threads(),
        dtype=dtype_name(dtype),
        seed=seed,
        n=n,
    )


def command_line(argv: Sequence[str] | None = None) -> str:
    """This process's command, or another one, scrubbed."""
    program, *arguments = sys.argv if argv is None else argv
    path = Path(program)
    words = ["python", "-m", scrub(path.parent.name)] if path.name == "__main__.py" else [scrub(path.name)]
    return shlex.join([*words, *scrub_arguments(arguments)])


def write_report(path: Path, content: dict[str, Any]) -> None:
    """Write a report in one step, scrubbed: what `write_json` does, for a file that is going to be shared."""
    write_json(path, scrub_all(content))


def check_can_write(path: Path) -> None:
    """Find out before a long run whether a report can be written to `path`.

    Raises:
        OSError: It cannot; the message names the path and the rule.
    """
    folder = path.resolve().parent
    if not folder.is_dir():
        raise OSError(f"cannot write {path}: its folder does not exist; create it first")
    if path.exists() and not path.is_file():
        raise OSError(f"cannot write {path}: it exists and is no regular file; name another one")
    if not os.access(folder, os.W_OK):
        raise OSError(f"cannot write {path}: its folder is not writable; name another one")
    try:
        probe_folder(folder)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror} in its folder; name another one") from error


def probe_folder(folder: Path) -> None:
    """Make a file in a folder and forget it: permissions alone do not tell of file systems that take none.

    Raises:
        OSError: none can be made.
    """
    with tempfile.TemporaryFile(dir=folder):
        pass


def _git_state(folder: Path) -> tuple[str | None, bool | None]:
    """Commit and dirtiness of the repository that tracks this file."""
    # An installed copy may lie in a virtual environment inside somebody else's repository.
    if _git(folder, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None, None
    status = _git(folder, "status", "--porcelain", "--", "..")
    return _git(folder, "rev-parse", "HEAD"), None if status is None else bool(status)


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
