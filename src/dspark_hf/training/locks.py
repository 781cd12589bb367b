"""One process at a time per output."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import TrainingDataError


@contextmanager
def alone_with(lock: Path, output: Path) -> Iterator[None]:
    """Hold the lock file `lock`, whose folder is made, while `output` is written.

    Raises:
        TrainingDataError: another process holds it, or the folder cannot be written.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        held = FileLock(lock, timeout=0)
        held.acquire()
    except Timeout as error:
        raise TrainingDataError(
            f"another run is writing {output}; wait for it, stop it, or name another output"
        ) from error
    except OSError as error:
        raise TrainingDataError(f"{output} cannot be written ({error}); name another output") from error
    try:
        yield
    finally:
        held.release()
