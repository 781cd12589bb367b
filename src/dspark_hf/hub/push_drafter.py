"""A drafter in memory to the Hub, with the reports of the folder that it came from."""

import errno
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo
from safetensors import SafetensorError

from ..checkpoints.digest import checkpoint_facts
from ..checkpoints.weights import CONFIG_NAME
from ..errors import DSparkError, HubError
from .files import CARD_NAME, choose_files
from .publish import PushRequest, plan_push, push

logger = logging.getLogger(__name__)


def push_drafter(drafter: Any, request: PushRequest, max_shard_size: int | str) -> CommitInfo:
    """Save a drafter beside its reports in a temporary folder, and push that.

    Args:
        drafter: A `DSparkDraftModel`.
        request: Where to.
        max_shard_size: Of one file of weights, in bytes or as in `5GB`.

    Raises:
        HubError: as for [`push`], or the temporary folder cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="dspark-push-") as name:
        folder = Path(name) / request.repo_id.rsplit("/", 1)[-1]
        try:
            drafter.save_pretrained(folder, max_shard_size=max_shard_size)
            try:
                copy_reports(Path(drafter.name_or_path), folder)
            except DSparkError as error:  # the drafter itself is whole
                logger.warning("pushed without what lies in the folder that the drafter came from: %s", error)
        except (OSError, SafetensorError) as error:
            is_full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
            raise HubError(
                f"cannot push to {request.repo_id}: the drafter cannot be saved to {tempfile.gettempdir()} first "
                f"({error}); {'free some space there' if is_full else 'mend that'}, or set TMPDIR to another folder"
            ) from error
        return push(plan_push(folder, request))


def copy_reports(origin: Path, folder: Path) -> list[str]:
    """Copy what a drafter's folder shares besides the drafter, if it holds the same weights; what was copied.

    Args:
        origin: The folder a drafter was loaded from; anything else has nothing to give.
        folder: Where it was saved to now.
    """
    if not (origin / CONFIG_NAME).is_file() or origin.resolve() == folder.resolve():
        return []
    if checkpoint_facts(origin).sha256 != checkpoint_facts(folder).sha256:
        return []
    copied = []
    for file in choose_files(origin)[0]:
        is_drafter = file.path in (CONFIG_NAME, CARD_NAME) or file.path.endswith((".py", ".safetensors", ".index.json"))
        if not is_drafter and not (folder / file.path).exists() and isinstance(file.source, Path):
            (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.source, folder / file.path)
            copied.append(file.path)
    return copied
