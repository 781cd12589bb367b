"""Throughput profiles in the user's cache: one file per target, drafter and machine, written whole or not at all."""

import json
import logging
import os
import shlex
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._compat import TargetModel
from .._machine import LOADABLE_DTYPES, cache_root, dtype_name, write_json
from ..errors import ThroughputProfileError
from .fingerprint import Fingerprint, attention_of
from .throughput import ThroughputProfile

logger = logging.getLogger(__name__)


def profile_path(fingerprint: Fingerprint) -> Path:
    """Where the profile with this fingerprint lies, `profiles/` in the cache folder of `_machine.cache_root`."""
    return cache_root() / "profiles" / f"{fingerprint.key}.json"


def save_profile(profile: ThroughputProfile, path: Path | None = None) -> Path:
    """Write a profile, by default to its place in the cache, and tell where.

    Raises:
        OSError: it cannot be written; an older one is left as it was.
    """
    path = path or profile_path(profile.fingerprint)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, profile.to_dict())
    return path


def load_profile(path: Path, expected: Fingerprint | None = None) -> ThroughputProfile:
    """Read a profile.

    Args:
        path: Of the JSON file.
        expected: Fingerprint of the pair that it is to be used for; None takes any.

    Raises:
        ThroughputProfileError: it is damaged, of another machine or model, or of other versions; the message says how
            to make a new one.
        OSError: it cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        profile = ThroughputProfile.from_dict(content)
    except (ValueError, RecursionError) as error:
        way_out = "make a new one with `dspark profile`, and delete this one"
        raise ThroughputProfileError(f"{path} is damaged, or no throughput profile ({error}); {way_out}") from error
    if expected is None:
        return profile
    renew = f"renew it with `{renewal_command(profile)}`"
    foreign = Fingerprint.differences(profile.fingerprint, expected)
    if profile.fingerprint.key != expected.key:
        kinds = "; ".join(line for line in foreign if line.split(":")[0] not in expected.versions)
        raise ThroughputProfileError(
            f"{path} is the profile of something else (its own, then what is in use: {kinds}); {renew}, with the "
            "target, drafter, device and threads in use"
        )
    if foreign:
        raise ThroughputProfileError(
            f"{path} is stale: versions have changed since it was measured ({'; '.join(foreign)}); {renew}"
        )
    return profile


def renewal_command(profile: ThroughputProfile) -> str:
    """The command line that measures the same again."""
    own = profile.fingerprint
    names = profile.target, profile.drafter
    device = own.device.split(":")[0]
    return _command(*names, own.dtype, device, own.num_threads, profile.grid.num_rows, profile.grid.contexts)


def command_for(target: TargetModel, drafter: Any, num_rows: Sequence[int] = ()) -> str:
    """The command line that measures a loaded pair; a model that was not loaded by name stands as TARGET or DRAFTER.

    Args:
        num_rows: To be measured; none: what `dspark profile` takes by default.
    """
    names = (getattr(model.config, "_name_or_path", "") for model in (target, drafter))
    target_name, drafter_name = (name or role for name, role in zip(names, ("TARGET", "DRAFTER"), strict=True))
    device = target.device.type
    num_threads = torch.get_num_threads() if device == "cpu" else None
    return _command(target_name, drafter_name, dtype_name(target.dtype), device, num_threads, num_rows, ())


def _command(
    target: str,
    drafter: str | None,
    dtype: str,
    device: str,
    num_threads: int | None,
    num_rows: Sequence[int],
    contexts: Sequence[int],
) -> str:
    words = ["dspark", "profile", "--target", target]
    if drafter is not None:
        words += ["--drafter", drafter]
    for option, values in (("--batch-size", num_rows), ("--context", contexts)):
        for value in values:
            words += [option, str(value)]
    # A target in another dtype can only have been measured as its checkpoint came.
    words += ["--dtype", dtype if dtype in LOADABLE_DTYPES else "auto"]
    if device != "meta":  # of an offloaded model
        words += ["--device", device]
    if num_threads is not None:
        words += ["--threads", str(num_threads)]
    return shlex.join(words)


@dataclass(frozen=True)
class _Setup:
    """What can change about a loaded pair between two calls, and with it the fingerprint."""

    devices: tuple[torch.device, torch.device]
    dtypes: tuple[torch.dtype, torch.dtype]
    attentions: tuple[Any, Any]
    weights: tuple[tuple[int, int], tuple[int, int]]
    num_threads: int
    root: Path

    @classmethod
    def of(cls, target: TargetModel, drafter: Any) -> "_Setup":
        return cls(
            devices=(target.device, drafter.device),
            dtypes=(target.dtype, drafter.dtype),
            attentions=(attention_of(target), attention_of(drafter)),
            weights=(_size(target), _size(drafter)),
            num_threads=torch.get_num_threads(),
            root=cache_root(),
        )


def _size(model: nn.Module) -> tuple[int, int]:
    """Parameters and numbers in them: adapters, resized embeddings and the like change one or both."""
    numbers = [parameter.numel() for parameter in model.parameters()]
    return len(numbers), sum(numbers)


@dataclass(frozen=True)
class _Found:
    """A finished search: for this setup, in this state of the file."""

    setup: _Setup
    fingerprint: Fingerprint
    path: Path
    stamp: tuple[int, int] | None
    profile: ThroughputProfile | None


_searches: "weakref.WeakKeyDictionary[nn.Module, weakref.WeakKeyDictionary[nn.Module, _Found]]"
_searches = weakref.WeakKeyDictionary()


def find_profile(target: TargetModel, drafter: nn.Module) -> ThroughputProfile | None:
    """The cached profile of a loaded pair on this machine; None when there is none that can be used.

    One that is stale or damaged is not used, and said so once. The fingerprint is taken once per pair and setup; later
    calls look at the file's time only.
    """
    setup = _Setup.of(target, drafter)
    by_drafter = _searches.setdefault(target, weakref.WeakKeyDictionary())
    found = by_drafter.get(drafter)
    if found is None or found.setup != setup:
        fingerprint = Fingerprint.of(target, drafter)
        path = profile_path(fingerprint)
    else:
        fingerprint, path = found.fingerprint, found.path
    stamp = _stamp(path)
    if found is None or found.setup != setup or found.stamp != stamp:
        profile = None if stamp is None else _usable(path, fingerprint)
        found = by_drafter[drafter] = _Found(setup, fingerprint, path, stamp, profile)
    return found.profile


def _usable(path: Path, fingerprint: Fingerprint) -> ThroughputProfile | None:
    try:
        return load_profile(path, fingerprint)
    except (ThroughputProfileError, OSError) as error:
        _warn_once(str(error))
        return None


@cache
def _warn_once(message: str) -> None:
    """Once per message: every generate() call would repeat it."""
    logger.warning("not used: %s", message)


def _stamp(path: Path) -> tuple[int, int] | None:
    """Time and size of a file; None where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
