"""What identifies a drafter's weights, and how large they are, read from its folder."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointFormatError
from .detect import to_dspark_config_dict
from .json_files import LARGEST_CONFIG_BYTES, read_json_object
from .weights import CONFIG_NAME, check_weights_in, weight_files

# Frozen copies of the target's that DeepSpec stores; a drafter does not read them. An Eagle3 drafter has its own head.
_TARGETS_OWN = ("embed_tokens.", "lm_head.")
_TARGETS_OWN_FOR_EAGLE3 = ("embed_tokens.",)


@dataclass(frozen=True)
class CheckpointFacts:
    """A drafter's weights on disk.

    Attributes:
        sha256: Over gamma and every tensor's name, shape, dtype and bytes; neither calibration nor policies change
            it, nor does the number of files.
        num_parameters: Of floating point tensors.
        num_bytes: Of all tensors.
        dtype: Of the floating point tensors; `mixed` if they differ.
    """

    sha256: str
    num_parameters: int
    num_bytes: int
    dtype: str


def checkpoint_facts(folder: Path) -> CheckpointFacts:
    """Read a drafter's folder, one tensor at a time.

    Raises:
        CheckpointFormatError: it holds no weights in safetensors, or they cannot be read.
    """
    check_weights_in(folder)
    config = _config(folder)
    digest = hashlib.sha256(f"block_size {config.get('block_size')}\n".encode())
    is_eagle3 = config.get("drafter_type") == "eagle3"
    num_parameters = num_bytes = 0
    dtypes = set()
    for name, path in sorted(_places(folder, _TARGETS_OWN_FOR_EAGLE3 if is_eagle3 else _TARGETS_OWN).items()):
        with _opened(path) as file:
            tensor = file.get_tensor(name).contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
        num_bytes += tensor.numel() * tensor.element_size()
        if tensor.is_floating_point():
            num_parameters += tensor.numel()
            dtypes.add(str(tensor.dtype).removeprefix("torch."))
    return CheckpointFacts(digest.hexdigest(), num_parameters, num_bytes, dtypes.pop() if len(dtypes) == 1 else "mixed")


def _places(folder: Path, not_read: tuple[str, ...]) -> dict[str, Path]:
    """Which file holds each tensor of the drafter."""
    places: dict[str, Path] = {}
    for path in weight_files(folder):
        with _opened(path) as file:
            places |= {name: path for name in file.keys() if not name.startswith(not_read)}  # noqa: SIM118
    return places


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointFormatError(f"{path} cannot be read ({error}); download it again, or save it again") from error


def _config(folder: Path) -> dict[str, Any]:
    config = folder / CONFIG_NAME
    if not config.is_file():
        raise CheckpointFormatError(f"{folder} has no {CONFIG_NAME}; pass a drafter's folder")
    return to_dspark_config_dict(read_json_object(config, LARGEST_CONFIG_BYTES))
