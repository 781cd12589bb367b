"""`push_to_hub` of a drafter: ours, since transformers' own would replace the card by a generic one."""

import importlib
import os
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo
from torch import Tensor

# Of one file of weights; transformers' own.
DEFAULT_SHARD_SIZE = "50GB"
# Arguments of push_to_hub that save_pretrained(push_to_hub=True) takes too.
_PUSH_ARGUMENTS = frozenset(
    {"repo_id", "commit_message", "commit_description", "private", "token", "revision", "create_pr", "tags", "card"}
)


class PushesToHub:
    """Goes before `PreTrainedModel` among a class's bases."""

    model_tags: list[str] | None

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Write config and weights to a folder, as any transformers model.

        Args:
            save_directory: The folder.
            push_to_hub: Whether to push it then; `kwargs` may hold `repo_id` and the other arguments of
                [`push_to_hub`].
            **kwargs: As for `PreTrainedModel.save_pretrained`.
        """
        where = {name: kwargs.pop(name) for name in _PUSH_ARGUMENTS & kwargs.keys()} if push_to_hub else {}
        super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)  # type: ignore[misc]
        if push_to_hub and is_main_process:
            folder = Path(save_directory)
            request = _request(self, repo_id=where.pop("repo_id", folder.resolve().name), **where)
            publish = _import("publish")
            publish.push(publish.plan_push(folder, request))

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str = DEFAULT_SHARD_SIZE,
        tags: list[str] | str | None = None,
        card: str = "auto",
    ) -> CommitInfo:
        """Upload weights, config with calibration, card and reports to the Hub, in one commit.

        Reports come along from the folder that the drafter was loaded from, if its weights are still the same. Weights
        of an earlier push that would be loaded instead are deleted; other files in the repository stay.

        Args:
            repo_id: `name` or `organisation/name`; made if it is not there.
            commit_message, commit_description: Of the commit.
            private: Of a repository that is made now; None: as the organisation has it, else public.
            token: None: the one logged in with, or HF_TOKEN.
            revision: Branch, made if need be; None: main.
            create_pr: Whether to open a pull request to main instead.
            max_shard_size: Of one file of weights.
            tags: Added to the card's.
            card: `auto` keeps a card that was written or edited on the Hub and replaces one that a push rendered;
                `keep` keeps any, `replace` none.

        Returns:
            The commit; without a change the last one.

        Raises:
            HubError: the Hub refused or failed, an argument breaks a rule, or the repository changed meanwhile.
                Nothing is half-written then.
        """
        request = _request(
            self,
            repo_id=repo_id,
            commit_message=commit_message,
            commit_description=commit_description,
            private=private,
            token=token,
            revision=revision,
            create_pr=create_pr,
            tags=tags,
            card=card,
        )
        commit: CommitInfo = _import("push_drafter").push_drafter(self, request, max_shard_size)
        return commit


def _request(drafter: PushesToHub, *, tags: list[str] | str | None = None, **where: Any) -> Any:
    all_tags = [*(drafter.model_tags or []), *([tags] if isinstance(tags, str) else tags or [])]
    return _import("publish").PushRequest(tags=tuple(dict.fromkeys(all_tags)), **where)


def _import(name: str) -> Any:
    # By name, since a copy of this file that travels with a drafter works without the package.
    return importlib.import_module(f"dspark_hf.hub.{name}")
