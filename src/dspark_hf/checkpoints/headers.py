"""What safetensors files say they hold, compared with what a drafter needs, before a weight is allocated."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointFormatError

# A drafter has some hundred tensors, of about 100 bytes each in a header. safetensors itself takes 100 MB of JSON.
LARGEST_HEADER_BYTES = 8 * 2**20
_FLOATING = frozenset({"F64", "F32", "F16", "BF16"})
_INTEGER = frozenset({"I64", "I32", "I16", "I8", "U8"})


@dataclass(frozen=True)
class StoredTensor:
    """Shape and safetensors' name of the dtype of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: str


def read_headers(files: Iterable[str]) -> dict[str, StoredTensor]:
    """Names, shapes and dtypes of the tensors in safetensors files; no weight is read.

    Raises:
        CheckpointFormatError: a header is larger than any drafter's, or does not fit its file.
    """
    stored: dict[str, StoredTensor] = {}
    for file in files:
        _check_header_size(file)
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # not a mapping
                    view = opened.get_slice(name)
                    stored[name] = StoredTensor(tuple(view.get_shape()), str(view.get_dtype()))
        except SafetensorError as error:
            raise CheckpointFormatError(
                f"the weights in {file} cannot be read ({error}); download them again"
            ) from error
    return stored


def _check_header_size(file: str) -> None:
    with open(file, "rb") as opened:
        prefix = opened.read(8)
    size, room = int.from_bytes(prefix, "little"), os.path.getsize(file) - 8
    if len(prefix) < 8 or size > room:
        raise CheckpointFormatError(
            f"the weights in {file} cannot be read (the file ends before its header does); download them again"
        )
    if size > LARGEST_HEADER_BYTES:
        raise CheckpointFormatError(
            f"the header of {file} has {size} bytes, and no drafter's has more than {LARGEST_HEADER_BYTES}; it was "
            "not read. Download the drafter from another source"
        )


def check_stored(source: str, expected: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> None:
    """Compare what a drafter needs with what its files hold; what they hold besides is not the point.

    Args:
        source: What to call the checkpoint.
        expected: The drafter's tensors, on any device, also `meta`.
        stored: From [`read_headers`].

    Raises:
        CheckpointFormatError: a tensor is missing, has another shape, or numbers of another kind.
    """
    absent = [name for name, tensor in expected.items() if _shape_of(stored.get(name)) != tuple(tensor.shape)]
    if absent:
        raise CheckpointFormatError(lacking(source, absent))
    for name, tensor in expected.items():
        dtype, kinds = stored[name].dtype, _FLOATING if tensor.is_floating_point() else _INTEGER
        if dtype not in kinds:
            raise CheckpointFormatError(
                f"{name} of {source} is stored as {dtype}, and must be one of {sorted(kinds)}; download the drafter "
                "again, or save it again with save_pretrained"
            )


def _shape_of(tensor: StoredTensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tensor.shape


def lacking(source: str, absent: Sequence[str]) -> str:
    """What to say of a checkpoint that lacks weights of its drafter."""
    return (
        f"{source} lacks {len(absent)} of the drafter's weights or has them in another shape, among them "
        f"{sorted(absent)[:3]}; with random numbers in their place it would draft nonsense. Download it again, or "
        "correct its config.json if that describes another drafter"
    )


@torch.no_grad()
def check_finite(source: str, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse weights that are not numbers: the target would still say what it says, but every draft were lost.

    Raises:
        CheckpointFormatError: some are NaN or infinite.
    """
    broken = sorted(name for name, weight in weights if not _is_finite(weight))
    if broken:
        raise CheckpointFormatError(
            f"{len(broken)} weights of {source} hold NaN or infinity, among them {broken[:3]}; nothing can be drafted "
            "with them. Download the drafter again; if it was trained so, train it with a lower learning rate"
        )


def _is_finite(weight: Tensor) -> bool:
    if weight.is_meta or not weight.is_floating_point():  # offloaded, or quantised
        return True
    # A sum needs no copy of the weight. One that overflows says nothing, so then each number is asked.
    if bool(weight.sum(dtype=torch.float32).isfinite()):
        return True
    comparable = weight if weight.element_size() > 1 else weight.float()  # torch does not ask 8-bit floats
    return bool(comparable.isfinite().all())
