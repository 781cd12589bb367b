"""Whether a local folder holds a drafter's weights, told before transformers looks: its errors name no way out."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointFormatError
from .detect import to_dspark_config_dict

# Modules that a drafter computes with; weights of theirs that have no place are part of another computation.
_COMPUTED = ("fc.", "hidden_norm.", "layers.", "norm.", "markov_head.", "confidence_head.", "logit_head.")


def check_weights_in(name: str) -> None:
    """Raise for a folder without readable config or without safetensors; a Hub id is left to transformers.

    Raises:
        CheckpointFormatError: what is missing or broken, and the way out.
    """
    folder = Path(name)
    if not folder.is_dir():
        # A Hub id is "name" or "organisation/name"; anything else can only be a path.
        if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise CheckpointFormatError(f"{name} is not a folder; pass a drafter's folder, or its id on the Hub")
        return
    config = folder / "config.json"
    if config.is_file():
        try:
            content = json.loads(config.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointFormatError(f"{config} is not valid JSON ({error}); download it again") from error
        to_dspark_config_dict(content)  # of another format, the weights are not the point
        _check_draft_vocabulary(folder)
    if config.is_file() and not any(folder.glob("*.safetensors")):
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        raise CheckpointFormatError(
            f"{folder} has no weights in safetensors, only {pickles[0]}, and a pickle may run any code; save it again "
            "with save_pretrained(), or pass use_safetensors=False if you trust it"
            if pickles
            else f"{folder} has a config.json and no model.safetensors; download it again, with its weights"
        )


def _check_draft_vocabulary(folder: Path) -> None:
    """Raise where the two stored forms of a draft vocabulary, a mask and offsets, name different tokens."""
    stored: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                stored |= {name: file.get_tensor(name) for name in ("t2d", "d2t") if name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            continue  # told by whoever loads the weights
    if len(stored) < 2:
        return
    mask, offsets = stored["t2d"], stored["d2t"]
    is_flat = mask.ndim == offsets.ndim == 1
    if not is_flat or (offsets + torch.arange(len(offsets))).tolist() != mask.nonzero().flatten().tolist():
        raise CheckpointFormatError(
            f"{folder} contradicts itself: t2d marks {int(mask.sum())} tokens, and d2t names {offsets.numel()}, which "
            "are not the same; expected one draft vocabulary. Download it again"
        )


def check_leftovers(name: str, surplus: Iterable[str]) -> None:
    """Raise where stored weights without a place say that the config describes another drafter than the weights.

    Args:
        surplus: Names of those weights.

    Raises:
        CheckpointFormatError: a reduced draft vocabulary, a head or a layer that the config does not know of.
    """
    if "d2t" in surplus:
        raise CheckpointFormatError(
            f"{name} has a reduced draft vocabulary (d2t) that its config.json does not mention; add draft_vocab_size "
            "there, the length of d2t"
        )
    computed = sorted(key for key in surplus if key.startswith(_COMPUTED))
    if computed:
        raise CheckpointFormatError(
            f"{name} holds {len(computed)} weights that a drafter as its config.json describes it does not have, among "
            f"them {computed[:3]}; without them it would draft something else. Expected only weights of the described "
            "layers and heads: correct config.json, or download the drafter again"
        )
