"""Which files of a drafter's folder are shared, and why the others are not."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..checkpoints.headers import read_headers
from ..checkpoints.json_files import LARGEST_CONFIG_BYTES, read_json_object
from ..checkpoints.weights import CONFIG_NAME, INDEX_SUFFIX, check_weights_in, weight_files
from ..errors import HubError
from ..evaluation.scrub import holds_token
from .remote_code import is_own_auto_map, is_own_code

CARD_NAME = "README.md"
# What training, calibration and measuring leave in a folder: numbers and pictures, never data.
_SHARED = (
    (re.compile(r"LICENSE(\.md|\.txt)?|NOTICE(\.md|\.txt)?"), ""),
    (re.compile(r"notes\.md"), ""),
    (re.compile(r"[A-Za-z0-9_][\w.-]*\.(json|png|svg)", re.ASCII), "reports"),
)
_CODE = re.compile(r"[A-Za-z_]\w*\.py")
_TEXTS = (".json", ".md", ".py", ".txt", "LICENSE", "NOTICE")
# Weights as transformers names them, whole or in shards: of these only one set may be in a repository.
WEIGHT_NAMES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_REASONS = (
    (re.compile(r".*\.(bin|pt|pth|pkl|pickle|ckpt)"), "a pickle, which may run any code"),
    (re.compile(r"\..*"), "hidden"),
    (re.compile(r".*\.safetensors(\.index\.json)?"), "weights that are not loaded"),
    (_CODE, "code that no auto_map in config.json asks for"),
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
        CheckpointFormatError: the folder holds no drafter, or its weights are no safetensors.
        HubError: it has no config, or a text that would be shared holds a token.
    """
    check_weights_in(folder)
    if not (folder / CONFIG_NAME).is_file():
        raise HubError(f"cannot push {folder}: it has no {CONFIG_NAME}; pass the folder of a drafter")
    weights = weight_files(folder)
    read_headers(map(str, weights))
    loaded = {CONFIG_NAME, *(path.name for path in weights)}
    if weights[0].name != "model.safetensors":
        loaded.add(f"model{INDEX_SUFFIX}")
    auto_map = read_json_object(folder / CONFIG_NAME, LARGEST_CONFIG_BYTES).get("auto_map")
    shared, left_out = [], []
    for path in _files_and_other_folders(folder):
        # What is loaded was read as a drafter's, and may be a link to large files elsewhere. Nothing else may be.
        is_loaded = path.parent == folder and path.name in loaded
        if path.is_file() and (is_loaded or _belongs(path, folder, auto_map)):
            if not is_loaded and leads_out(path, folder):
                left_out.append(LeftOut(_shown(path, folder), "a link to something outside of the folder"))
                continue
            _check_no_token(path)
            shared.append(SharedFile(path.relative_to(folder).as_posix(), path))
        else:
            left_out.append(LeftOut(_shown(path, folder), _reason(path)))
    return shared, left_out


def leads_out(path: Path, folder: Path) -> bool:
    """Whether a file in a folder is, by a link, one outside of it; huggingface_hub's cache has all in `blobs`."""
    home = folder.resolve()
    places = [home, *(parent.parent / "blobs" for parent in home.parents if parent.name == "snapshots")]
    real = path.resolve()
    return not any(real.is_relative_to(place) for place in places)


def _belongs(path: Path, folder: Path, auto_map: object) -> bool:
    """Whether a file is the card, code that `auto_map` asks for, or of a kind that is shared."""
    if path.parent == folder and _CODE.fullmatch(path.name):
        return auto_map is not None and (not is_own_auto_map(auto_map) or is_own_code(path))
    inside = "" if path.parent == folder else path.parent.name
    return (inside, path.name) == ("", CARD_NAME) or any(
        inside == place and pattern.fullmatch(path.name) for pattern, place in _SHARED
    )


def _check_no_token(path: Path) -> None:
    if path.name.endswith(_TEXTS) and holds_token(path.read_bytes().decode("utf-8", errors="replace")):
        raise HubError(
            f"cannot push {path.parent}: {path.name} holds what looks like a token or a private key; take it out, then "
            "push again, and revoke it if others can read that file"
        )


def _files_and_other_folders(folder: Path) -> Iterator[Path]:
    """Everything at the top, and in the folders that may hold something to share."""
    looked_into = {place for _, place in _SHARED if place}
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name in looked_into:
            yield from sorted(path.iterdir())
        else:
            yield path


def _shown(path: Path, folder: Path) -> str:
    name = path.relative_to(folder).as_posix() + ("/" if path.is_dir() else "")
    return name if name.isprintable() else ascii(name)  # a terminal obeys what else a name may hold


def _reason(path: Path) -> str:
    return next((reason for pattern, reason in _REASONS if pattern.fullmatch(path.name)), _OTHER_REASON)
