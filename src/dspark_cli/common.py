"""What all commands share: exit codes, options, and errors as one line."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

EXIT_DONE = 0
EXIT_NOT_LOSSLESS = 1
EXIT_NOTHING_WRITTEN = 1
EXIT_DIFFERENT = 1
EXIT_FAULTS_FOUND = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

TargetOption = Annotated[str, typer.Option(help="Folder, Hub id, or smollm2-135m-instruct.")]
DeviceOption = Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="auto: CUDA where there is one.")]
DtypeOption = Annotated[str, typer.Option(metavar="bfloat16|float32|auto", help="auto: the checkpoint's.")]
ThreadsOption = Annotated[int | None, typer.Option(help="CPU threads. Default: torch's choice.")]
# More threads than this a CPU only gain switching; far more cannot be started, in the middle of loading a model.
MAX_THREADS_PER_CPU = 4
JsonOption = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write every number, with provenance, to FILE."),
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def set_up_torch(threads: int | None) -> None:
    """Threads as asked for, and no progress bars of transformers where nobody watches."""
    import torch
    import transformers

    num_cpus = os.cpu_count() or 1
    most = MAX_THREADS_PER_CPU * num_cpus
    require(threads is None or 1 <= threads <= most, "--threads", threads, f"from 1 to {most} on {num_cpus} CPUs")
    if threads is not None:
        torch.set_num_threads(threads)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()


def check_output(json_file: Path | None) -> None:
    """Find out before a long run whether its numbers can be written."""
    if json_file is not None:
        from dspark_hf.evaluation.provenance import check_can_write

        check_can_write(json_file)


def require(holds: bool, name: str, value: object, rule: str) -> None:
    """Raise the package's error about an option's value."""
    if not holds:
        from dspark_hf.evaluation import ComparisonError

        raise ComparisonError(f"{name} must be {rule}, got {value!r}")


@contextmanager
def readable_errors(debug: bool, when_interrupted: str | Callable[[], str]) -> Iterator[None]:
    """Turn errors that a user can mend into one line on stderr, and Ctrl-C into its exit code.

    Args:
        when_interrupted: What to say then, or what finds that out.
    """
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(when_interrupted if isinstance(when_interrupted, str) else when_interrupted(), err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except Exception as error:
        if not _is_users_to_mend(error):
            raise
        if debug:
            traceback.print_exc()
        typer.echo(f"dspark: error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(EXIT_BAD_INPUT) from None


def _is_users_to_mend(error: Exception) -> bool:
    # Looked up, not imported: an unsupported transformers makes the import itself fail, with
    # one of these errors.
    errors = sys.modules.get("dspark_hf.errors")
    ours = (OSError,) if errors is None else (OSError, errors.DSparkError)
    return isinstance(error, ours)
