"""What a throughput profile belongs to: target, drafter, machine, and the versions that ran."""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from torch import nn

from .._compat import TargetModel
from .._machine import device_name, dtype_name
from .._version import __version__
from ..model.row_attention import NAME as ROW_ATTENTION

# Rows of different lengths are computed as wide as the longest.
PADDED_LAYOUT = "padded"

# What a drafter's forward costs follows from its weights and these fields; calibration and policies change nothing.
_DRAFTER_FIELDS = (
    "block_size",
    "draft_layout",
    "layer_types",
    "sliding_window",
    "window_start",
    "causal_layers",
    "markov_head_type",
    "enable_confidence_head",
    "target_layer_ids",
)


@dataclass(frozen=True)
class Fingerprint:
    """Two profiles are of the same thing when all of this is equal.

    Attributes:
        device: Type and model, e.g. `cpu: AMD EPYC 9B14`.
        dtype: Of the target's weights.
        target: Hash of its config, attention implementation, and names, shapes and dtypes of its weights.
        drafter: The same of the drafter.
        layout: How rows of different lengths share a step.
        num_threads: That torch computes with on a CPU; None on other devices.
        versions: Of dspark_hf, torch and transformers.
    """

    device: str
    dtype: str
    target: str
    drafter: str
    layout: str
    num_threads: int | None
    versions: dict[str, str]

    @classmethod
    def of(cls, target: TargetModel, drafter: nn.Module, *, layout: str = PADDED_LAYOUT) -> "Fingerprint":
        """Of a loaded pair, in this process; takes milliseconds."""
        device: torch.device = target.device
        config: Any = drafter.config
        own = {name: getattr(config, name, None) for name in _DRAFTER_FIELDS}
        return cls(
            device=device_name(device),
            dtype=dtype_name(target.dtype),
            target=_hash(_plain(target.config.to_dict()), attention_of(target), _weights(target)),
            drafter=_hash(own, attention_of(drafter), _weights(drafter)),
            layout=layout,
            num_threads=torch.get_num_threads() if device.type == "cpu" else None,
            versions={
                "dspark_hf": __version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        )

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "Fingerprint":
        """What `asdict` gave.

        Raises:
            TypeError, ValueError: a field is missing, unknown or of another type.
        """
        read = cls(**content)
        for name in ("device", "dtype", "target", "drafter", "layout"):
            _require(isinstance(getattr(read, name), str), name, "text")
        _require(read.num_threads is None or isinstance(read.num_threads, int), "num_threads", "a whole number or null")
        versions = read.versions
        _require(
            isinstance(versions, dict) and all(isinstance(v, str) for v in versions.values()),
            "versions",
            "texts by name",
        )
        return read

    @property
    def key(self) -> str:
        """Names the profile's file: all but the versions, so that a new version finds what it makes stale."""
        return _hash({name: value for name, value in asdict(self).items() if name != "versions"})

    def differences(self, other: "Fingerprint") -> list[str]:
        """What differs in `other`, as `name: ours, theirs`; versions are named one by one."""
        ours, theirs = (asdict(side) | asdict(side).pop("versions") for side in (self, other))
        names = [name for name in ours | theirs if name != "versions"]
        return [f"{name}: {ours.get(name)}, {theirs.get(name)}" for name in names if ours.get(name) != theirs.get(name)]


def attention_of(model: Any) -> str | None:
    """Name of the attention implementation that a model was loaded with, also while a batch runs."""
    name: str | None = getattr(model.config, "_attn_implementation", None)
    return "sdpa" if name == ROW_ATTENTION else name


def _require(holds: bool, name: str, rule: str) -> None:
    if not holds:
        raise ValueError(f"fingerprint.{name} must be {rule}")


def _weights(model: nn.Module) -> list[str]:
    return [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in model.named_parameters()]


def _plain(value: Any) -> Any:
    """A config without what tells where it came from or which tokens are special: no forward reads them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if not _is_label(str(key))}
    return value


def _is_label(key: str) -> bool:
    # The weights say their dtype themselves; a config keeps that of the checkpoint.
    return key.startswith("_") or key.endswith("_token_id") or key in ("transformers_version", "architectures", "dtype")


def _hash(*parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
