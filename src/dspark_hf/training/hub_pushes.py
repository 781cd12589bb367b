"""`DSparkTrainer(push_to_hub=True)`: pushes of a drafter in training, with our card and without what is no drafter."""

import logging
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi
from transformers import Trainer
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import HubStrategy, SaveStrategy
from transformers.utils import PushInProgress

from .._compat import check_overridable
from ..checkpoints.weights import CONFIG_NAME, INDEX_SUFFIX, weight_files
from ..errors import DSparkError, HubError, TrainingDataError
from ..hub.card import CARD_NAME, render_card, write_card
from ..hub.faults import readable_faults
from ..hub.publish import PushRequest, plan_push, push
from ..hub.remote import hub_api

logger = logging.getLogger(__name__)

# Not public; a new release must not rename it unnoticed.
check_overridable(Trainer, ("_push_from_checkpoint", "_finish_current_push"))

# What Trainer.push_to_hub puts on its own card. Ours is rendered from config and reports.
_CARD_ARGUMENTS = frozenset(
    {"dataset", "dataset_args", "dataset_tags", "finetuned_from", "language", "license", "model_name", "tags", "tasks"}
)


class PushesDrafters(Trainer):
    """Trainer whose pushes are those of a drafter's folder: one commit each, weights, config, card and reports.

    `hub_strategy` means what it means in transformers. Optimiser states are only pushed where it asks for checkpoints
    (`checkpoint`, `all_checkpoints`), into a folder of their own.
    """

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the repository, if need be.

        Raises:
            HubError: the Hub refused or failed.
        """
        with readable_faults(self._repo_name(), "make"):
            super().init_hf_repo(token=token, private=private)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the drafter's card into the output folder; arguments of transformers' own card change nothing."""
        if self.is_world_process_zero():
            folder = Path(str(self.args.output_dir))
            write_card(folder / CARD_NAME, render_card(folder, repo_id=self.hub_model_id))

    def push_to_hub(  # type: ignore[override]  # None on other processes, as Trainer itself returns it
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> CommitInfo | Future[CommitInfo] | None:
        """Save the drafter into the output folder and push that.

        Args:
            commit_message: Of the commit.
            blocking: Whether to wait for it.
            token, revision, private: Instead of those of the training arguments (`hub_token` and so on).
            **kwargs: What transformers would put on its card, which has no effect here.

        Returns:
            The commit, or its future; None on other processes than the first.

        Raises:
            HubError: the Hub refused or failed, or `private` was asked for and the repository is public; where not
                blocking, the future raises it.
            TrainingDataError: an argument is unknown.
        """
        if unknown := sorted(kwargs.keys() - _CARD_ARGUMENTS):
            raise TrainingDataError(f"push_to_hub has no argument {unknown[0]!r}; its docstring names those it has")
        if kwargs:
            logger.warning("the card is rendered from config and reports; ignored: %s", ", ".join(sorted(kwargs)))
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self._finish_current_push()
        request = self._request(commit_message, token, revision, private)
        folder = Path(str(self.args.output_dir))
        if blocking:
            return push(plan_push(folder, request))
        return self._push_in_background(folder, request)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        strategy = self.args.hub_strategy
        if not self.is_world_process_zero() or strategy == HubStrategy.END:
            return
        running: Any = self.push_in_progress
        if running is not None and not running.is_done() and not self.args.hub_always_push:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        by_steps = self.args.save_strategy == SaveStrategy.STEPS
        progress = f"step {self.state.global_step}" if by_steps else f"epoch {int(self.state.epoch or 0)}"
        message = f"Training in progress, {progress}"
        folder = Path(checkpoint_folder)
        jobs: list[Any] = [self._push_in_background(folder, self._request(message))]
        if strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            name = "last-checkpoint" if strategy == HubStrategy.CHECKPOINT else folder.name
            jobs.append(self._upload_checkpoint(folder, name, f"{message}, checkpoint"))
        if running is None or running.is_done():
            in_progress: Any = PushInProgress
            self.push_in_progress = in_progress(jobs)
        else:
            running.jobs.extend(jobs)

    def _upload_checkpoint(self, folder: Path, name: str, message: str) -> Future[Any]:
        def job() -> None:
            with _failures_logged(), readable_faults(str(self.hub_model_id), "push to"):
                self._api().upload_folder(
                    repo_id=str(self.hub_model_id),
                    folder_path=folder,
                    path_in_repo=name,
                    commit_message=message,
                    revision=self.args.hub_revision,
                    # A pickle of the arguments, hub_token among them; nothing that resumes reads it.
                    ignore_patterns=[TRAINING_ARGS_NAME],
                )

        return self._api().run_as_future(job)

    def _request(
        self,
        message: str | None,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
    ) -> PushRequest:
        return PushRequest(
            repo_id=str(self.hub_model_id),
            private=private if private is not None else self.args.hub_private_repo,
            token=token if token is not None else self.args.hub_token,
            revision=revision if revision is not None else self.args.hub_revision,
            commit_message=message,
        )

    def _push_in_background(self, folder: Path, request: PushRequest) -> Future[CommitInfo]:
        """Push a copy of the drafter, since training goes on and checkpoints come and go.

        A failure is logged, and raised by whoever asks the future.
        """
        copy = tempfile.TemporaryDirectory(prefix="dspark-push-")
        failure: HubError | None = None
        try:
            for path in [folder / CONFIG_NAME, folder / f"model{INDEX_SUFFIX}", *weight_files(folder)]:
                if path.is_file():
                    shutil.copyfile(path, Path(copy.name) / path.name)
        except (OSError, DSparkError) as error:
            failure = HubError(f"cannot push to {request.repo_id}: {folder} cannot be copied first ({error})")

        def job() -> CommitInfo:
            with copy, _failures_logged():
                if failure is not None:
                    raise failure
                return push(plan_push(Path(copy.name), request))

        future: Future[CommitInfo] = self._api().run_as_future(job)
        return future

    def _api(self) -> HfApi:
        # One for all pushes: its background jobs run one after the other.
        if not hasattr(self, "_hub_api"):
            self._hub_api = hub_api(self.args.hub_token)
        return self._hub_api

    def _repo_name(self) -> str:
        return str(self.args.hub_model_id or Path(str(self.args.output_dir)).absolute().name)


@contextmanager
def _failures_logged() -> Iterator[None]:
    """Nobody may ever ask a background job how it ended."""
    try:
        yield
    except DSparkError as error:
        logger.warning("training goes on, but a push failed: %s", error)
        raise
