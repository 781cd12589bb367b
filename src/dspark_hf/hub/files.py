"""Which files of a drafter's folder are shared, and why the others are not."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..checkpoints.json_files import LARGEST_CONFIG_BYTES, read_json_object
from ..checkpoints.weights import CONFIG_NAME, INDEX_SUFFIX, check_weights_in, weight_files
from ..errors import HubError

CARD_NAME = "README.md"
# What training, calibration and measuring leave in a folder: numbers and pictures, never data.
_SHARED = (
    (re.compile(r"LICENSE(\.md|\.txt)?|NOTICE(\.md|\.txt)?"), ""),
    (re.compile(r"notes\.md"), ""),
    (re.compile(r"[^.].*\.(json|png|svg)"), "reports"),
)
_CODE = re.compile(r"[A-Za-z_]\w*\.py")
# Weights as transformers names them, whole or in shards: of these only one set may be in a repository.
WEIGHT_NAMES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_REASONS = (
    (re.compile(r".*\.(bin|pt|pth|pkl|pickle|ckpt)"), "a pickle, which may run any code"),
    (re.compile(r"\..*"), "hidden"),
    (re.compile(r".*\.safetensors(\.index\.json)?"), "weights that are not loaded"),
    (_CODE, "code, and config.json has no auto_map that asks for it"),
)
_OTHER_REASON = "no part of a drafter"


@dataclass(frozen=True)
class SharedFile:
    """A file to upload.

    Attributes:
        path: In the repository, with `/`.
        source: Where it is, or its content.
    """

    path: str
    source: Path | bytes

    @property
    def size_bytes(self) -> int:
        return len(self.source) if isinstance(self.source, bytes) else self.source.stat().st_size


@dataclass(frozen=True)
class LeftOut:
    """A file or folder that stays here, and why."""

    path: str
    reason: str


def choose_files(folder: Path) -> tuple[list[SharedFile], list[LeftOut]]:
    """What of a drafter's folder goes to the Hub, and what stays, both in order.

    Raises:
        CheckpointFormatError: the folder holds no drafter.
        HubError: a file that would be shared cannot be read.
    """
    check_weights_in(folder)
    if not (folder / CONFIG_NAME).is_file():
        raise HubError(f"cannot push {folder}: it has no {CONFIG_NAME}; pass the folder of a drafter")
    shared, left_out = [], []
    may_have_code = "auto_map" in read_json_object(folder / CONFIG_NAME, LARGEST_CONFIG_BYTES)
    weights = weight_files(folder)
    loaded = {CONFIG_NAME, CARD_NAME, *(path.name for path in weights)}
    if weights[0].name != "model.safetensors":
        loaded.add(f"model{INDEX_SUFFIX}")
    for path in _files_and_other_folders(folder):
        name, inside = path.name, path.parent.relative_to(folder).as_posix()
        inside = "" if inside == "." else inside
        is_shared = (
            (inside == "" and name in loaded)
            or (inside == "" and may_have_code and _CODE.fullmatch(name) is not None)
            or any(inside == place and pattern.fullmatch(name) for pattern, place in _SHARED)
        )
        if path.is_file() and is_shared:
            shared.append(SharedFile(path.relative_to(folder).as_posix(), path))
        else:
            left_out.append(LeftOut(_shown(path, folder), _reason(path)))
    return shared, left_out


def _files_and_other_folders(folder: Path) -> Iterator[Path]:
    """Everything at the top, and in the folders that may hold something to share."""
    looked_into = {place for _, place in _SHARED if place}
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name in looked_into:
            yield from sorted(path.iterdir())
        else:
            yield path


def _shown(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix() + ("/" if path.is_dir() else "")


def _reason(path: Path) -> str:
    return next((reason for pattern, reason in _REASONS if pattern.fullmatch(path.name)), _OTHER_REASON)
