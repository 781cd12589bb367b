"""A drafter's files from the Hub into huggingface_hub's cache: only those that are loaded, each checked on the way.

Only names composed here are asked for, so that names in the repository lead nowhere, and its code and pickles stay
where they are. A config is judged before any weights are fetched.
"""

import hashlib
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError

from ..checkpoints.json_files import LARGEST_CONFIG_BYTES, LARGEST_INDEX_BYTES, read_json_object, too_large
from ..checkpoints.weights import CONFIG_NAME, check_config_content, index_name, shard_names, weights_name
from ..errors import CheckpointFormatError, HubError
from .faults import TRANSPORT_ERROR, readable_faults, retrying, status_of

# Arguments of from_pretrained that say how to get at the Hub.
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "token")

_COMMIT_FOLDER = re.compile(r"/snapshots/([0-9a-f]{40})/")
_CONTENT_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass
class HubSource:
    """A drafter's place on the Hub, and how to get at it.

    Attributes:
        repo_id: `organisation/name`.
        revision: Branch, tag or commit; None: main. The commit, once a file was fetched, so that all are of one state.
        subfolder: Of the drafter in the repository.
        options: Further arguments of `hf_hub_download`: cache_dir, force_download, local_files_only, token.
    """

    repo_id: str
    revision: str | None = None
    subfolder: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def fetch(self, variant: str | None, largest_weights: Callable[[Path], int]) -> Path:
        """The folder, in the cache, with the drafter's config and weights.

        Args:
            variant: Of the weights' file names.
            largest_weights: Takes the folder with the config, and says how many bytes of weights such a drafter can
                have; it raises for a config that no drafter can have.

        Raises:
            HubError: something cannot be had, or arrived other than it was announced.
            CheckpointFormatError: the repository holds no drafter that can be read.
        """
        folder = self.fetch_config().parent
        largest = largest_weights(folder)
        try:
            if self._get(weights_name(variant), largest) is not None:
                return folder
        except HubError:
            if not self._is_cached(index_name(variant)):
                raise  # else it is a sharded one, and only the Hub could say that there is no such file
        index = self._get(index_name(variant), LARGEST_INDEX_BYTES)
        if index is None:
            raise CheckpointFormatError(self._no_weights(variant))
        for name in shard_names(read_json_object(index, LARGEST_INDEX_BYTES), f"{index.name} of {self.repo_id}"):
            shard = self._get(name, largest)
            if shard is None:
                raise CheckpointFormatError(
                    f"{self.repo_id} has no {name}, which its {index.name} names; use another revision, or another "
                    "drafter"
                )
            largest -= shard.stat().st_size
        return folder

    def fetch_config(self) -> Path:
        """The drafter's config.json, in the cache.

        Raises:
            HubError, CheckpointFormatError: as for [`fetch`].
        """
        config = self._get(CONFIG_NAME, LARGEST_CONFIG_BYTES)
        if config is None:
            raise CheckpointFormatError(
                f"{self.repo_id} has no {self._path(CONFIG_NAME)}; pass the folder or Hub id of a drafter"
            )
        check_config_content(read_json_object(config, LARGEST_CONFIG_BYTES), f"config.json of {self.repo_id}")
        return config

    def _path(self, name: str) -> str:
        return str(PurePosixPath(self.subfolder, name))

    def _get(self, name: str, largest_bytes: int) -> Path | None:
        """A file of at most `largest_bytes`, fetched unless it is in the cache; None where the repository has none."""
        path = self._path(name)
        with readable_faults(self.repo_id, f"fetch {path} of"):
            try:
                found: Any = self._download(path, dry_run=True)
            except RemoteEntryNotFoundError:
                return None
            if found.file_size is not None and found.file_size > largest_bytes:
                raise CheckpointFormatError(too_large(f"{path} of {self.repo_id}", found.file_size, largest_bytes))
            local = Path(self._download(path))
            # From here on: what a branch means may change any time. Asked for by its name once, it is found offline.
            commit = _COMMIT_FOLDER.search(local.as_posix())
            self.revision = commit[1] if commit else found.commit_hash
        if found.will_download:
            self._verify(local, path)
        return local

    def _download(self, path: str, dry_run: bool = False) -> Any:
        options = self.options | {"revision": self.revision, "dry_run": dry_run}
        try:
            return retrying(lambda: hf_hub_download(self.repo_id, path, **options))
        except TRANSPORT_ERROR as error:
            if status_of(error) is not None or not dry_run:
                raise
            # huggingface_hub itself looks into the cache only where it could not connect at all.
            self.options = self.options | {"local_files_only": True}
            try:
                return hf_hub_download(self.repo_id, path, **options | self.options)
            except LocalEntryNotFoundError as missing:
                raise missing from error

    def _is_cached(self, name: str) -> bool:
        cache_dir = self.options.get("cache_dir")
        found = try_to_load_from_cache(self.repo_id, self._path(name), cache_dir=cache_dir, revision=self.revision)
        return isinstance(found, str)

    def _verify(self, local: Path, path: str) -> None:
        """Compare a file with the hash that it was announced under; a wrong one leaves the cache again."""
        blob = local.resolve()
        announced = blob.name
        if not _CONTENT_HASH.fullmatch(announced):  # a cache without links, or a Hub with hashes of its own
            return
        if content_hash(blob, is_lfs=len(announced) == 64) == announced:
            return
        for file in (local, blob):
            with suppress(OSError):
                file.unlink()
        raise HubError(
            f"cannot fetch {path} of {self.repo_id}: what arrived is not what was announced (its hash differs), and "
            "was removed; try again, and check proxies and mirrors on the way if it stays so"
        )

    def _no_weights(self, variant: str | None) -> str:
        with suppress(Exception):  # only to say more
            self._download(self._path("pytorch_model.bin"), dry_run=True)
            return (
                f"{self.repo_id} has no weights in safetensors, only pytorch_model.bin, and a pickle may run any code; "
                "ask its authors for safetensors, or pass use_safetensors=False if you trust them"
            )
        return (
            f"{self.repo_id} has a config.json and neither {weights_name(variant)} nor {index_name(variant)}; pass the "
            "Hub id of a drafter"
        )


def content_hash(path: Path, *, is_lfs: bool) -> str:
    """The hash by which the Hub knows a file: SHA-256 of large ones, git's blob hash of others."""
    with path.open("rb") as file:
        if is_lfs:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
        while chunk := file.read(2**20):
            digest.update(chunk)
        return digest.hexdigest()
