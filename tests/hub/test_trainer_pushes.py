"""`DSparkTrainer(push_to_hub=True)`: drafters with our card, and optimiser states only where they are asked for."""

import logging

import pytest
import tiny_training as tt
from hub_store import MAIN, Fault

from dspark_hf import DSparkDraftModel, HubError
from dspark_hf.errors import TrainingDataError
from dspark_hf.hub.card import is_rendered

DRAFTER = {"README.md", "config.json", "model.safetensors"}


def trainer(tmp_path, **arguments):
    settings = {"push_to_hub": True, "hub_model_id": "acme/trained", "save_strategy": "steps", "save_steps": 1}
    return tt.trainer(tmp_path / "run", max_steps=2, **(settings | arguments))


def files(hub, revision=MAIN):
    return hub.repos["acme/trained"].files(revision).keys() - {".gitattributes"}


def test_every_save_pushes_the_drafter_and_nothing_else(hub, tmp_path):
    trained = trainer(tmp_path, hub_private_repo=True, hub_always_push=True)
    trained.train()
    trained._finish_current_push()
    assert files(hub) == DRAFTER and hub.repos["acme/trained"].is_private
    titles = [commit.title for commit in hub.repos["acme/trained"].history()]
    assert titles == ["Training in progress, step 2", "Training in progress, step 1", "initial commit"]
    commit = trained.push_to_hub()
    assert commit.oid == hub.repos["acme/trained"].refs[MAIN] and files(hub) == DRAFTER
    assert is_rendered(hub.repos["acme/trained"].files()["README.md"].decode())
    assert DSparkDraftModel.from_pretrained("acme/trained").fc.weight.equal(trained.model.fc.weight)


def test_the_end_pushes_once(hub, tmp_path):
    trained = trainer(tmp_path, hub_strategy="end", hub_revision="trial")
    trained.train()
    assert files(hub) == set()
    future = trained.push_to_hub(commit_message="done", blocking=False)
    assert future.result().oid == hub.repos["acme/trained"].refs["trial"]
    assert files(hub, "trial") == DRAFTER


def test_checkpoints_go_into_a_folder_of_their_own_where_asked_for(hub, tmp_path):
    trained = trainer(tmp_path, hub_strategy="checkpoint", hub_always_push=True)
    trained.train()
    trained._finish_current_push()
    pushed = files(hub)
    assert pushed >= DRAFTER | {"last-checkpoint/optimizer.pt", "last-checkpoint/trainer_state.json"}
    assert all(path.startswith("last-checkpoint/") for path in pushed - DRAFTER)


def test_a_token_among_the_arguments_is_not_pushed(hub, tmp_path):
    trained = trainer(tmp_path, hub_strategy="all_checkpoints", hub_always_push=True, hub_token="hf_alice")
    trained.train()
    trained._finish_current_push()
    pushed = {path: content for path, content in hub.repos["acme/trained"].files().items()}
    assert "checkpoint-2/optimizer.pt" in pushed
    assert not [path for path, content in pushed.items() if b"hf_alice" in content]


def test_a_private_run_is_not_pushed_to_a_public_repository(hub, tmp_path, caplog):
    hub.make("acme/trained", {})
    trained = trainer(tmp_path, hub_private_repo=True)
    with caplog.at_level(logging.WARNING):
        trained.train()
        trained._finish_current_push()
    assert files(hub) == set() and "acme/trained exists and is public" in caplog.text
    for arguments in ({}, {"private": True}):
        with pytest.raises(HubError, match="exists and is public"):
            trained.push_to_hub(**arguments)


def test_the_future_of_a_push_raises_what_went_wrong(hub, tmp_path):
    trained = trainer(tmp_path, hub_strategy="end")
    hub.faults[:] = [Fault("POST .*/commit/", "status", None, 403)]
    with pytest.raises(HubError, match="403"):
        trained.push_to_hub(blocking=False).result()


def test_training_goes_on_when_the_drafter_or_its_checkpoint_cannot_be_pushed(hub, tmp_path, monkeypatch, caplog):
    def full(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr("dspark_hf.training.hub_pushes.shutil.copyfile", full)
    trained = trainer(tmp_path, hub_strategy="checkpoint")
    hub.faults[:] = [Fault("POST .*/commit/", "status", None, 403)]
    with caplog.at_level(logging.WARNING):
        trained.train()
        trained._finish_current_push()
    assert trained.state.global_step == 2 and files(hub) == set()
    assert "cannot be copied first (No space left on device)" in caplog.text
    assert "cannot push to acme/trained: the Hub answered 403" in caplog.text


def test_the_card_that_the_trainer_writes_is_ours(hub, tmp_path):
    trained = trainer(tmp_path, hub_strategy="end")
    trained.save_model(_internal_call=True)
    trained.create_model_card(tags=["mine"])
    card = (tmp_path / "run" / "README.md").read_text()
    assert "library_name: dspark-hf" in card and "generated_from_trainer" not in card


def test_arguments_of_the_generic_card_do_nothing_and_unknown_ones_fail(hub, tmp_path, caplog):
    trained = trainer(tmp_path, hub_strategy="end")
    with caplog.at_level(logging.WARNING):
        trained.push_to_hub(finetuned_from="x")
    assert "ignored: finetuned_from" in caplog.text and files(hub) == DRAFTER
    with pytest.raises(TrainingDataError, match="no argument 'lisence'"):
        trained.push_to_hub(lisence="mit")


def test_training_goes_on_when_a_push_fails(hub, tmp_path, caplog):
    trained = trainer(tmp_path)
    hub.faults[:] = [Fault("POST .*/commit/", "status", None, 503)]
    with caplog.at_level(logging.WARNING):
        trained.train()
        trained._finish_current_push()
    assert trained.state.global_step == 2 and "training goes on, but a push failed" in caplog.text
    assert files(hub) == set()
    with pytest.raises(HubError, match="503"):
        trained.push_to_hub()


def test_a_repository_that_cannot_be_made_is_told_before_training(hub, tmp_path):
    with pytest.raises(HubError, match="cannot make bob/trained.*403"):
        trainer(tmp_path, hub_model_id="bob/trained")
