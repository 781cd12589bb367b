"""JSON of a checkpoint that anybody may have written: bounded before it is read, and every damage told in one line."""

import json
from pathlib import Path
from typing import Any

from ..errors import CheckpointFormatError

# Far above any drafter's (a few kB), far below what parsing would notice.
LARGEST_CONFIG_BYTES = 4 * 2**20
LARGEST_INDEX_BYTES = 16 * 2**20


def read_json_object(path: Path, largest_bytes: int) -> dict[str, Any]:
    """The JSON object in a file of at most `largest_bytes`.

    Raises:
        CheckpointFormatError: the file is larger, nested too deeply, no JSON, or holds something other than an object.
    """
    size = path.stat().st_size
    if size > largest_bytes:
        raise CheckpointFormatError(too_large(str(path), size, largest_bytes))
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise CheckpointFormatError(
            f"{path} is nested too deeply to be read, which no drafter's file is; download the drafter from another "
            "source"
        ) from error
    except ValueError as error:
        raise CheckpointFormatError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise CheckpointFormatError(
            f"{path} must hold one JSON object, got a {type(content).__name__}; download it again"
        )
    return content


def too_large(name: str, size_bytes: int, largest_bytes: int) -> str:
    """What to say of a file that is too large to be what its name says."""
    return (
        f"{name} has {size_bytes} bytes, and no drafter's has more than {largest_bytes}; it was not read. Download the "
        "drafter from another source"
    )
