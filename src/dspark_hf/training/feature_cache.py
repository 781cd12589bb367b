"""Target features on disk: safetensors shards, mapped into memory, bounded, resumable and checked.

One token costs `(m + 1) * hidden` numbers in the target's dtype and 4 bytes more: 6.9 kB for SmolLM2-135M with five
feature layers. The size is computed and compared with the limit before the target runs.
"""

import hashlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..configuration_dspark import DSparkConfig
from ..errors import TrainingDataError
from ..evaluation.provenance import write_json
from ..target_traits import spread_target_layers
from .features import TargetFeatures, TargetReader
from .records import TrainingSequence, data_digest

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
MANIFEST_NAME = "features.json"
SHARD_BYTES = 256 * 2**20
# Tokens of one target forward, padding counted.
BATCH_TOKENS = 2048
_NOT_OF_THE_FORWARD = (
    "transformers_version",
    "_name_or_path",
    "_attn_implementation",
    "use_cache",
    "dtype",
    "calibration",
)


@dataclass(frozen=True)
class Shard:
    """One file: sequences `first` to `first + num_sequences - 1`, one after the other."""

    file: str
    first: int
    num_sequences: int
    num_tokens: int
    num_bytes: int
    crc32: int


class FeatureCache:
    """Reads the features of sequence `i`; the files stay mapped, the system decides what is in memory.

    Args:
        folder: Made by [`build_feature_cache`] from the same target and the same sequences.
        identity: As from [`cache_identity`]; another cache is refused.
        layer_ids: Of its layers, those to return as features; empty: the final hidden states. None: all.

    Raises:
        TrainingDataError: the cache is incomplete, of something else, or damaged.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], layer_ids: list[int] | None = None) -> None:
        refuse_foreign_cache(folder, identity)
        manifest = _read_manifest(folder) or {"shards": []}
        self._folder = folder
        self._shards = [Shard(**shard) for shard in manifest["shards"]]
        covered = sum(shard.num_sequences for shard in self._shards)
        if covered != identity["num_sequences"]:
            raise TrainingDataError(
                f"the feature cache {folder} holds {covered} of {identity['num_sequences']} sequences; build it again, "
                "it goes on where it stopped"
            )
        held = identity["target_layer_ids"]
        self._layers = None if layer_ids in (None, held) else [held.index(layer_id) for layer_id in layer_ids or ()]
        self._num_held = len(held)
        self._open: dict[str, Any] = {}
        for shard in self._shards:
            _check_shard(folder / shard.file, shard)
        self._places = [(shard, position) for shard in self._shards for position in range(shard.num_sequences)]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> TargetFeatures:
        """The features `[1, length, ...]` of sequence `index`, copied out of the map."""
        shard, position = self._places[index]
        file, offsets = self._file(shard)
        start, end = offsets[position], offsets[position + 1]
        names = ("features", "final_hidden", "log_normalizer")
        features, final_hidden, log_normalizer = (file.get_slice(name)[start:end][None] for name in names)
        return TargetFeatures(self._chosen(features, final_hidden), final_hidden, log_normalizer)

    def _chosen(self, features: Tensor, final_hidden: Tensor) -> Tensor:
        if self._layers is None:
            return features
        if not self._layers:
            return final_hidden
        return features.unflatten(-1, (self._num_held, -1))[..., self._layers, :].flatten(-2)

    def _file(self, shard: Shard) -> tuple[Any, list[int]]:
        if shard.file not in self._open:
            file = safe_open(self._folder / shard.file, framework="pt")
            self._open[shard.file] = file, file.get_tensor("offsets").tolist()
        opened: tuple[Any, list[int]] = self._open[shard.file]
        return opened

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}  # maps do not travel to workers, they reopen


def cache_identity(
    target: PreTrainedModel,
    layer_ids: list[int],
    logit_treatment: tuple[float, float | None],
    sequences: Sequence[TrainingSequence],
) -> dict[str, Any]:
    """What determines a cache's content, to be compared before it is read."""
    return {
        "format_version": FORMAT_VERSION,
        "target": target_fingerprint(target),
        "target_layer_ids": layer_ids,
        "logit_treatment": list(logit_treatment),
        "dtype": str(target.dtype).removeprefix("torch."),
        "data": data_digest(sequences),
        "num_sequences": len(sequences),
    }


def layers_to_cache(folder: Path, config: DSparkConfig) -> list[int]:
    """Layers to keep in `folder` for a drafter: those that lie there if they include its own, so that drafters share.

    For drafters that read the final hidden state, which every cache holds, the usual layers.
    """
    wanted = [] if config.reads_final_hidden else config.target_layer_ids
    manifest = _read_manifest(folder)
    held: list[int] = [] if manifest is None else manifest["identity"].get("target_layer_ids", [])
    if held and set(wanted) <= set(held):
        return held
    return wanted or spread_target_layers(config.num_target_layers or 1)


def refuse_foreign_cache(folder: Path, identity: dict[str, Any]) -> None:
    """Raise TrainingDataError for a cache that was made from something else; an absent one is fine."""
    manifest = _read_manifest(folder)
    if manifest is None or manifest["identity"] == identity:
        return
    differing = sorted(key for key in identity if manifest["identity"].get(key) != identity[key])
    raise TrainingDataError(
        f"the feature cache {folder} was made from something else (different: {', '.join(differing)}); remove the "
        "folder, or name another output"
    )


def cached_tokens(folder: Path) -> int:
    """Tokens whose features lie in `folder`, whatever they were made from."""
    manifest = _read_manifest(folder)
    return 0 if manifest is None else sum(int(shard["num_tokens"]) for shard in manifest["shards"])


def target_fingerprint(target: PreTrainedModel) -> str:
    """sha256 over the config and a checksum of every weight: what a forward depends on."""
    config = target.config.get_text_config(decoder=True).to_dict()
    described = {key: config[key] for key in sorted(config) if key not in _NOT_OF_THE_FORWARD}
    digest = hashlib.sha256(json.dumps(described, default=str).encode())
    for name, weight in target.state_dict().items():
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        if not weight.is_meta:
            flat = weight.detach().cpu().contiguous().view(-1)
            digest.update(zlib.crc32(flat.view(torch.uint8).numpy()).to_bytes(4, "big"))
    return digest.hexdigest()


def feature_bytes(num_tokens: int, num_layers: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Size of a cache for that many tokens."""
    return num_tokens * ((num_layers + 1) * hidden_size * dtype.itemsize + 4)


def build_feature_cache(
    folder: Path,
    target: PreTrainedModel,
    reader: TargetReader,
    sequences: Sequence[TrainingSequence],
    *,
    layer_ids: list[int],
    max_bytes: int,
    returned: list[int] | None = None,
) -> FeatureCache:
    """Run the target once over all sequences and keep what training reads; goes on where an earlier call stopped.

    Args:
        reader: Reads `layer_ids`.
        returned: As `layer_ids` of [`FeatureCache`].

    Raises:
        TrainingDataError: it would need more than `max_bytes` or more than the disk has free, or the folder holds
            the features of something else.
    """
    identity = cache_identity(target, layer_ids, reader.logit_treatment, sequences)
    total_tokens = sum(len(sequence) for sequence in sequences)
    hidden_size: int = target.config.get_text_config(decoder=True).hidden_size
    needed = feature_bytes(total_tokens, len(layer_ids), hidden_size, target.dtype)
    manifest = _read_manifest(folder)
    if manifest is None:
        _require_room(folder, needed, max_bytes)
        manifest = {"identity": identity, "shards": []}
    else:
        refuse_foreign_cache(folder, identity)
        present = sum(shard["num_bytes"] for shard in manifest["shards"])
        _require_room(folder, needed, max_bytes, present)
    shards = [Shard(**shard) for shard in manifest["shards"]]
    first = sum(shard.num_sequences for shard in shards)
    shard_tokens = max(1, SHARD_BYTES * total_tokens // needed)
    with tqdm(total=total_tokens, initial=sum(s.num_tokens for s in shards), unit="tok", desc="target features") as bar:
        for group in _groups(sequences[first:], shard_tokens):
            shards.append(_write_shard(folder, len(shards), first, group, reader, bar))
            first += len(group)
            _write_json(folder / MANIFEST_NAME, {"identity": identity, "shards": [asdict(s) for s in shards]})
    return FeatureCache(folder, identity, returned)


def _require_room(folder: Path, needed: int, max_bytes: int, present: int = 0) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingDataError(f"the feature cache {folder} cannot be made ({error}); name another folder") from error
    free = shutil.disk_usage(folder).free
    if needed > min(max_bytes, free + present):
        raise TrainingDataError(
            f"the features need {needed / 1e9:.3g} GB in {folder}, the limit is {max_bytes / 1e9:.3g} GB and the disk "
            f"has {free / 1e9:.3g} GB free; raise the limit, train on fewer sequences, or compute features online"
        )


def _groups(sequences: Sequence[TrainingSequence], max_tokens: int) -> Iterator[list[TrainingSequence]]:
    """Consecutive sequences of at most `max_tokens` tokens together, and at least one."""
    group: list[TrainingSequence] = []
    num_tokens = 0
    for sequence in sequences:
        if group and num_tokens + len(sequence) > max_tokens:
            yield group
            group, num_tokens = [], 0
        group.append(sequence)
        num_tokens += len(sequence)
    if group:
        yield group


def _write_shard(
    folder: Path, number: int, first: int, group: list[TrainingSequence], reader: TargetReader, bar: Any
) -> Shard:
    rows: dict[int, dict[str, Tensor]] = {}
    by_length = sorted(range(len(group)), key=lambda i: len(group[i]))
    for batch in _batches(by_length, group):
        ids = pad_sequence([group[i].input_ids for i in batch], batch_first=True)
        masks = pad_sequence([group[i].loss_mask for i in batch], batch_first=True)
        # The law at a position predicts the token behind it.
        needed = torch.zeros_like(masks)
        needed[:, :-1] = masks[:, 1:]
        read = reader.read(ids.to(reader.device), needed)
        for row, i in enumerate(batch):
            length = len(group[i])
            rows[i] = {
                "features": read.features[row, :length].cpu(),
                "final_hidden": read.final_hidden[row, :length].cpu(),
                "log_normalizer": read.log_normalizer[row, :length].cpu(),
            }
            bar.update(length)
    lengths = torch.tensor([0] + [len(sequence) for sequence in group])
    tensors = {name: torch.cat([rows[i][name] for i in range(len(group))]) for name in rows[0]}
    tensors["offsets"] = lengths.cumsum(0)
    path = folder / f"features-{number:05d}.safetensors"
    _save_atomically(tensors, path)
    return Shard(path.name, first, len(group), int(lengths.sum()), path.stat().st_size, _crc32(path))


def _batches(order: list[int], group: list[TrainingSequence]) -> Iterator[list[int]]:
    batch: list[int] = []
    for i in order:  # by length, so the last one sets the padded width
        if batch and (len(batch) + 1) * len(group[i]) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _save_atomically(tensors: dict[str, Tensor], path: Path) -> None:
    temporary = path.with_suffix(".partial")
    try:
        save_file(tensors, temporary)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own kind
        temporary.unlink(missing_ok=True)
        raise TrainingDataError(
            f"{path} cannot be written ({error}); free some space and start again, finished files are kept"
        ) from error


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            value = zlib.crc32(block, value)
    return value


def _check_shard(path: Path, shard: Shard) -> None:
    size = path.stat().st_size if path.is_file() else None
    if size != shard.num_bytes or _crc32(path) != shard.crc32:
        state = "is missing" if size is None else "is damaged (its checksum or size differs)"
        raise TrainingDataError(f"feature shard {path} {state}; remove the folder {path.parent} and build it again")


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    path = folder / MANIFEST_NAME
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text())
        _ = [Shard(**shard) for shard in manifest["shards"]], manifest["identity"]["num_sequences"]
    except (ValueError, KeyError, TypeError) as error:
        raise TrainingDataError(
            f"{path} does not list a feature cache ({error}); remove the folder {folder}"
        ) from error
    result: dict[str, Any] = manifest
    return result


def _write_json(path: Path, value: dict[str, Any]) -> None:
    try:
        write_json(path, value)
    except OSError as error:
        raise TrainingDataError(
            f"{path} cannot be written ({error}); free some space and start again, finished files are kept"
        ) from error
