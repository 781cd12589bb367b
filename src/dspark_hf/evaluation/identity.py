"""Which drafter and target a report is of, so that nobody takes it for a report of others."""

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import zoo
from ..checkpoints.digest import checkpoint_facts
from ..prompts import ChatTemplate, chat_template_of
from .scrub import scrub


@dataclass(frozen=True)
class PairFacts:
    """A drafter, its target, and how prompts were encoded.

    Attributes:
        drafter_sha256: As in `CheckpointFacts`; None for a drafter that lies in no folder.
        target_hub_id: None for a target that came from a folder.
        target_folder: Where that one lies, home folders as `~`; None for one of the Hub.
        target_num_parameters: Each counted once, tied or not.
        target_num_bytes: Of these, as loaded.
        chat_template: Of the target's tokenizer.
    """

    drafter_sha256: str | None
    target_hub_id: str | None
    target_folder: str | None
    target_num_parameters: int
    target_num_bytes: int
    chat_template: ChatTemplate


def pair_facts(
    target_name: str, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, drafter_folder: Path | None
) -> PairFacts:
    """Facts about a loaded pair.

    Args:
        target_name: As for `load_target`.
        drafter_folder: Where the drafter's weights were read from.

    Raises:
        CheckpointFormatError: the drafter's weights are not there any more.
    """
    local = Path(target_name).expanduser()
    parameters = list(target.parameters())
    return PairFacts(
        drafter_sha256=None if drafter_folder is None else checkpoint_facts(drafter_folder).sha256,
        target_hub_id=zoo.hub_id(target_name),
        target_folder=scrub(str(local.resolve())) if local.is_dir() else None,
        target_num_parameters=sum(parameter.numel() for parameter in parameters),
        target_num_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        chat_template=chat_template_of(tokenizer),
    )


def checkpoint_folder(source: str, commit: str | None) -> Path | None:
    """Folder that a drafter was loaded from: its own, or the Hub's snapshot of it in the cache.

    Args:
        source: As `from_pretrained` took it.
        commit: Of a Hub repository; None: the main branch.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    config = try_to_load_from_cache(source, "config.json", revision=commit)
    return Path(config).parent if isinstance(config, str) else None
