"""What belongs to this machine: the cache folder, names of devices, and files that are whole or absent."""

from __future__ import annotations

import json
import math
import os
import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def cache_root() -> Path:
    """Our cache folder: `$DSPARK_HF_CACHE`, else `$XDG_CACHE_HOME/dspark_hf`, else `~/.cache/dspark_hf`."""
    if own := os.environ.get("DSPARK_HF_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dspark_hf"


def device_name(device: torch.device) -> str:
    """Type and model of a device, e.g. `cpu: AMD EPYC 9B14`."""
    if device.type == "cuda":
        import torch

        return f"cuda: {torch.cuda.get_device_name(device)}"
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE):
            name = found[1].strip()
    return f"{device.type}: {name}"


_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})


def cpu_has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool | None:
    """Whether the CPU has instructions for bfloat16; None where the system does not tell (only Linux does)."""
    with suppress(OSError):
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE):
            return not _BFLOAT16_FLAGS.isdisjoint(found[1].split())
    return None


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def one_or_more(value: object) -> tuple[str, ...] | None:
    """One text or path, or a list of them, as a tuple of texts; None for anything else."""
    values = (value,) if isinstance(value, str | os.PathLike) else value
    if not isinstance(values, list | tuple) or not all(isinstance(one, str | os.PathLike) for one in values):
        return None
    return tuple(str(one) for one in values)


# What commands load a target in; `auto` is the checkpoint's.
LOADABLE_DTYPES = ("bfloat16", "float32", "auto")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write one JSON object in one step: readers see the old file or the whole new one.

    NaN and infinity, which JSON does not have, become null.
    """
    path = path.resolve()  # a link stays a link, and its target is replaced
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("x", encoding="utf-8") as file:
            json.dump(_finite(content), file, indent=2, allow_nan=False)
            file.write("\n")
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
