"""What goes wrong between here and the Hub, each told in one line: the repository, what failed, the way out."""

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from huggingface_hub import constants
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..errors import DSparkError, HubError

# The base of httpx's or httpx2's errors, whichever huggingface_hub uses: a connection that is cut, refused or too slow.
TRANSPORT_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
# RuntimeError: around whatever went wrong with the upload of a file. ValueError, KeyError, TypeError: an answer that is
# not what the Hub's protocol says.
_FAULTS = (TRANSPORT_ERROR, OSError, EntryNotFoundError, RuntimeError, ValueError, KeyError, TypeError)

# Between one try and the next, where huggingface_hub itself makes only one.
PAUSES_S = (1.0, 2.0)

_Result = TypeVar("_Result")

_LOG_IN = "log in with `hf auth login`, set HF_TOKEN, or pass token= (in Python)"
_TRY_AGAIN = "try again later"


@contextmanager
def readable_faults(repo_id: str, doing: str) -> Iterator[None]:
    """Turn whatever a call of huggingface_hub raises into HubError; errors of this package pass.

    Args:
        repo_id: The repository.
        doing: What the call was for, as in "cannot <doing> org/name".

    Raises:
        HubError: with the original error as its cause.
    """
    try:
        yield
    except DSparkError:
        raise
    except _FAULTS as error:
        raise HubError(f"cannot {doing} {repo_id}: {_explain(error, repo_id)}") from error


def is_transient(error: BaseException) -> bool:
    """Whether the same call may well succeed a moment later."""
    status = status_of(error)
    if status is not None:
        return status >= 500 or status == 408
    return isinstance(error, TRANSPORT_ERROR)


def retrying(call: Callable[[], _Result]) -> _Result:
    """`call()`, again after a pause where its error is one that may pass."""
    for pause_s in PAUSES_S:
        try:
            return call()
        except Exception as error:
            if not is_transient(error):
                raise
            time.sleep(pause_s)
    return call()


def status_of(error: BaseException) -> int | None:
    """The HTTP status that the Hub answered with, if it answered."""
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def _explain(error: BaseException, repo_id: str) -> str:
    if type(error) is RuntimeError and isinstance(error.__cause__, _FAULTS):
        return _explain(error.__cause__, repo_id)
    if isinstance(error, LocalEntryNotFoundError):
        return _explain_not_cached(error, repo_id)
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it, or use a folder"
    if isinstance(error, GatedRepoError):
        return f"it is gated; accept its conditions at {constants.ENDPOINT}/{repo_id}, and {_LOG_IN}"
    if isinstance(error, DisabledRepoError):
        return "the Hub has disabled it; use another one"
    if isinstance(error, RevisionNotFoundError):
        return "it has no such revision; pass the name of a branch or tag, or a commit"
    if isinstance(error, RepositoryNotFoundError):
        return f"there is no such repository, or it is private; check the name, and if it is private, {_LOG_IN}"
    if isinstance(error, EntryNotFoundError):
        return f"a file is not there ({_first_line(error)}); check the name and the revision"
    if isinstance(error, LocalTokenNotFoundError):
        return f"there is no token; {_LOG_IN}"
    if (status := status_of(error)) is not None:
        return _explain_status(status, error)
    if isinstance(error, TRANSPORT_ERROR):
        return f"the connection failed ({type(error).__name__}: {_first_line(error)}); {_TRY_AGAIN}"
    return _explain_other(error)


def _explain_not_cached(error: BaseException, repo_id: str) -> str:
    """A file was neither in the cache nor to be had; why, stands in the error before."""
    cause = error.__cause__
    if isinstance(cause, HfHubHTTPError):
        return _explain(cause, repo_id)
    if isinstance(cause, TRANSPORT_ERROR):
        return (
            f"it is not in the cache, and the Hub cannot be reached ({type(cause).__name__}); check the connection, or "
            "use a folder"
        )
    return (
        "it is not in the cache, and HF_HUB_OFFLINE or local_files_only forbids a look at the Hub; fetch it once "
        "without them, or use a folder"
    )


def _explain_status(status: int, error: BaseException) -> str:
    said = getattr(error, "server_message", None)
    reply = f"the Hub answered {status}" + (f" ({' '.join(str(said).split())[:200]})" if said else "")
    if status == 401:
        return f"{reply}, it does not accept the token; {_LOG_IN}"
    if status == 403:
        return f"{reply}, the token may not do this; use one with write access to a push, or with read access to a pull"
    if status in (409, 412):
        return f"{reply}, the repository was changed at the same time; look at what changed there, then run it again"
    if status == 413:
        return f"{reply}, it is too large; push fewer files"
    if status == 429:
        return f"{reply}, too many requests; wait a few minutes, then run it again"
    if status >= 500:
        return f"{reply}, it is in trouble; {_TRY_AGAIN}"
    return f"{reply}; check the arguments"


def _explain_other(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC or "os error 28" in str(error):
        return "no space is left on the disk; free some, or name another cache with HF_HOME or cache_dir="
    if isinstance(error, PermissionError):
        return f"{error.filename} may not be written or read; change its permissions, or name another cache_dir="
    if isinstance(error, OSError | ValueError | RuntimeError):
        return f"{_first_line(error)}; correct that, or {_TRY_AGAIN}"
    return f"the answer is not the Hub's ({type(error).__name__}: {_first_line(error)}); check HF_ENDPOINT"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
