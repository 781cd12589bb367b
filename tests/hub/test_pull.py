"""Loading a drafter from the Hub: what is fetched, from which state, with whose rights, and without the Hub."""

import hashlib
from pathlib import Path

import huggingface_hub
import pytest
import torch
from hub_store import MAIN, Fault
from transformers import AutoModel

from dspark_hf import CheckpointFormatError, DSparkConfig, DSparkDraftModel, HubError


def same(first, second):
    ours, theirs = first.state_dict(), second.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture
def pushed(hub, drafter):
    """A repository with the drafter; its requests start from here."""
    drafter.push_to_hub("alice/drafter")
    hub.requests.clear()
    return hub.repos["alice/drafter"]


def test_weights_and_calibration_come_back(pushed, drafter, folder):
    pulled, info = DSparkDraftModel.from_pretrained("alice/drafter", output_loading_info=True)
    assert same(pulled, drafter) and not info["missing_keys"]
    assert pulled.config.calibration == drafter.config.calibration
    assert pulled.name_or_path == pulled.config.name_or_path == "alice/drafter"
    local = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert hashlib.sha256(pushed.files()["model.safetensors"]).hexdigest() == local


def test_only_config_and_weights_are_fetched(hub, pushed):
    extra = {"evil.py": b"raise SystemExit", "pytorch_model.bin": b"x", "adapter_config.json": b"{}", "a/b.json": b"["}
    pushed.commit(pushed.files() | extra, "more", pushed.refs[MAIN], MAIN)
    DSparkDraftModel.from_pretrained("alice/drafter")
    asked = {request.split("/resolve/")[1].split("/", 1)[1] for request in hub.requests if "/resolve/" in request}
    assert asked == {"config.json", "model.safetensors"}


def test_a_drafter_without_card_loads(pushed, drafter):
    files = {name: pushed.files()[name] for name in ("config.json", "model.safetensors")}
    pushed.commit(files, "no card", pushed.refs[MAIN], MAIN)
    assert same(DSparkDraftModel.from_pretrained("alice/drafter"), drafter)


def test_revisions_are_kept_apart(hub, pushed, drafter):
    first = pushed.refs[MAIN]
    drafter.config.calibration = None
    drafter.push_to_hub("alice/drafter", revision="plain")
    drafter.push_to_hub("alice/drafter", create_pr=True)
    load = DSparkDraftModel.from_pretrained
    assert load("alice/drafter").config.calibration is not None
    assert load("alice/drafter", revision="plain").config.calibration is None
    assert load("alice/drafter", revision="refs/pr/1").config.calibration is None
    assert load("alice/drafter", revision=first).config.calibration is not None
    with pytest.raises(HubError, match="no such revision"):
        load("alice/drafter", revision="nope")


def test_a_subfolder_and_a_cache_folder_can_be_named(hub, pushed, drafter, tmp_path):
    inner = {f"inner/{name}": content for name, content in pushed.files().items()}
    hub.make("alice/nested", inner)
    pulled = DSparkDraftModel.from_pretrained("alice/nested", subfolder="inner", cache_dir=tmp_path / "mine")
    assert same(pulled, drafter) and (tmp_path / "mine" / "models--alice--nested").is_dir()
    with pytest.raises(CheckpointFormatError, match=r"alice/nested has no config\.json"):
        DSparkDraftModel.from_pretrained("alice/nested")


def test_sharded_drafters_and_variants_load(hub, drafter, tmp_path):
    drafter.push_to_hub("alice/sharded", max_shard_size="20kB")
    assert same(DSparkDraftModel.from_pretrained("alice/sharded"), drafter)
    drafter.save_pretrained(tmp_path / "fp", variant="fp")
    hub.make("alice/fp", {path.name: path.read_bytes() for path in (tmp_path / "fp").iterdir()})
    assert same(DSparkDraftModel.from_pretrained("alice/fp", variant="fp"), drafter)


def test_the_cache_serves_while_the_hub_is_away(hub, pushed, drafter, monkeypatch):
    drafter.push_to_hub("alice/sharded", max_shard_size="20kB")
    for name in ("alice/drafter", "alice/sharded"):
        DSparkDraftModel.from_pretrained(name)
        hub.faults[:] = [Fault("", "status", times=None)]
        assert same(DSparkDraftModel.from_pretrained(name), drafter)
        hub.faults[:] = [Fault("", "cut", times=None)]
        assert same(DSparkDraftModel.from_pretrained(name), drafter)
        hub.faults.clear()
        hub.requests.clear()
        assert same(DSparkDraftModel.from_pretrained(name, local_files_only=True), drafter)
        with monkeypatch.context() as offline:
            offline.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
            assert same(DSparkDraftModel.from_pretrained(name), drafter)
        assert hub.requests == []


def test_what_is_not_in_the_cache_is_said_to_be_so(hub, pushed, monkeypatch):
    with pytest.raises(HubError, match="alice/drafter: it is not in the cache, and HF_HUB_OFFLINE or local_files_only"):
        DSparkDraftModel.from_pretrained("alice/drafter", local_files_only=True)
    DSparkConfig.from_pretrained("alice/drafter")  # the config alone
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="fetch model.safetensors of alice/drafter: it is not in the cache"):
        DSparkDraftModel.from_pretrained("alice/drafter")


def test_a_warm_cache_asks_for_nothing_but_the_state_of_the_branch(hub, pushed):
    DSparkDraftModel.from_pretrained("alice/drafter")
    hub.requests.clear()
    DSparkDraftModel.from_pretrained("alice/drafter")
    assert {request.split("/")[-1] for request in hub.requests} == {"config.json"}
    assert all(request.startswith("HEAD ") for request in hub.requests)


def test_private_repositories_need_a_token_that_may_read_them(hub, drafter, monkeypatch):
    drafter.push_to_hub("acme/secret", private=True)
    assert same(DSparkDraftModel.from_pretrained("acme/secret"), drafter)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", huggingface_hub.constants.HF_HUB_CACHE + "2")
    for token in (False, "hf_bob"):
        with pytest.raises(HubError, match=r"acme/secret: there is no such repository, or it is private.*hf auth"):
            DSparkDraftModel.from_pretrained("acme/secret", token=token)
    with pytest.raises(HubError, match="acme/secret"):
        DSparkDraftModel.from_pretrained("acme/secret", token="hf_nobody")
    monkeypatch.delenv("HF_TOKEN")
    assert same(DSparkDraftModel.from_pretrained("acme/secret", token="hf_alice"), drafter)


def test_gated_repositories_say_where_to_accept_their_conditions(hub, pushed):
    hub.repos["alice/drafter"].is_gated = True
    for token in (False, "hf_bob"):
        with pytest.raises(HubError, match=f"it is gated; accept its conditions at {hub.url}/alice/drafter"):
            DSparkDraftModel.from_pretrained("alice/drafter", token=token)


def test_auto_classes_find_a_drafter_on_the_hub(pushed, drafter):
    assert same(AutoModel.from_pretrained("alice/drafter"), drafter)
    assert DSparkConfig.from_pretrained("alice/drafter").calibration == drafter.config.calibration


def test_force_download_fetches_again(hub, pushed, drafter):
    DSparkDraftModel.from_pretrained("alice/drafter")
    hub.requests.clear()
    assert same(DSparkDraftModel.from_pretrained("alice/drafter", force_download=True), drafter)
    assert any(request.startswith("GET ") and "model.safetensors" in request for request in hub.requests)


def test_a_folder_of_the_same_name_comes_first(hub, pushed, folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    DSparkDraftModel.from_pretrained("drafter")
    assert hub.requests == []
    assert Path("drafter").is_dir()
