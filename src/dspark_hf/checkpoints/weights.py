"""Whether a local folder holds a drafter's weights, told before transformers looks: its errors name no way out."""

import json
from pathlib import Path

from ..errors import CheckpointFormatError
from .detect import to_dspark_config_dict


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
    if config.is_file() and not any(folder.glob("*.safetensors")):
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        raise CheckpointFormatError(
            f"{folder} has no weights in safetensors, only {pickles[0]}, and a pickle may run any code; save it again "
            "with save_pretrained(), or pass use_safetensors=False if you trust it"
            if pickles
            else f"{folder} has a config.json and no model.safetensors; download it again, with its weights"
        )
