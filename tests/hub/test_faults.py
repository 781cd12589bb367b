"""Faults on the way: each ends in a typed error or a retry that succeeds, and the next try finds nothing half-done."""

import errno
import logging
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from hub_store import MAIN, Fault
from tiny import tiny_drafter

from dspark_hf import DSparkDraftModel, HubError
from dspark_hf.hub.publish import PushRequest, plan_push, push

FOR_EVER = None


def partial_files(cache):
    """What a download that failed may not leave, nor a temporary folder of a push."""
    return [path for path in cache.rglob("*") if path.name.endswith((".incomplete", ".partial"))]


def temporary_folders():
    import tempfile

    return {path.name for path in Path(tempfile.gettempdir()).glob("dspark-push-*")}


# -- pushes -----------------------------------------------------------------------------------------------------------

COMMIT = "POST .*/commit/"
UPLOAD = "PUT /_lfs/"
CREATE = "POST /api/repos/create"


@pytest.mark.parametrize(
    "fault",
    [
        Fault(CREATE, "status", status=503),
        Fault(CREATE, "cut_after"),
        Fault("GET /api/models/", "status", status=500),
        Fault("GET /api/models/", "cut_body"),
        Fault("POST .*/preupload/", "status", status=502),
        Fault("POST .*/objects/batch", "cut"),
        Fault(UPLOAD, "cut"),
        Fault(UPLOAD, "cut_after"),
        Fault(UPLOAD, "status", status=504),
        Fault(COMMIT, "status", status=503),
        Fault(COMMIT, "cut"),
        Fault(COMMIT, "cut_after"),
        Fault(COMMIT, "cut_body"),
        Fault(COMMIT, "status", times=2, status=500),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.pattern}-{fault.times}",
)
def test_a_push_survives_a_fault_that_passes(hub, drafter, fault):
    hub.faults[:] = [Fault(**vars(fault))]
    commit = drafter.push_to_hub("alice/drafter")
    repo = hub.repos["alice/drafter"]
    assert hub.faults[0].times == 0, "the fault was never met"
    assert commit.oid == repo.refs[MAIN] and len(repo.history()) == 2
    assert repo.files().keys() >= {"README.md", "config.json", "model.safetensors"}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(CREATE, "status", FOR_EVER, 500), "500.*it is in trouble; try again later"),
        (Fault(CREATE, "status", FOR_EVER, 403), "403.*token may not do this"),
        (Fault(CREATE, "status", FOR_EVER, 401), "401|no such repository"),
        (Fault("POST .*/preupload/", "status", FOR_EVER, 503), "503.*was made, and holds no drafter yet"),
        (Fault("POST .*/objects/batch", "status", FOR_EVER, 403), "403.*token may not do this"),
        (Fault(UPLOAD, "cut", FOR_EVER), "the connection failed.*was made, and holds no drafter yet"),
        (Fault(UPLOAD, "status", FOR_EVER, 413), "413.*too large"),
        (Fault(COMMIT, "status", FOR_EVER, 503), "503.*it is in trouble.*holds no drafter yet"),
        (Fault(COMMIT, "status", FOR_EVER, 409), "409.*changed at the same time"),
        (Fault(COMMIT, "status", FOR_EVER, 404), "404"),
        (Fault(COMMIT, "status", FOR_EVER, 429), "429.*wait a few minutes"),
        (Fault(COMMIT, "cut", FOR_EVER), "the connection failed"),
        (Fault("POST /api/validate-yaml", "status", FOR_EVER, 400), "push to alice/drafter"),
        (Fault("GET /api/models/", "cut", FOR_EVER), "cannot look at alice/drafter: the connection failed"),
    ],
    ids=lambda value: f"{value.kind}-{value.status}-{value.pattern}" if isinstance(value, Fault) else None,
)
def test_a_push_that_fails_leaves_no_half_of_a_drafter_and_can_be_repeated(hub, drafter, fault, message):
    before = temporary_folders()
    hub.faults[:] = [Fault(**vars(fault))]
    with pytest.raises(HubError, match=message) as raised:
        drafter.push_to_hub("alice/drafter")
    assert raised.value.__cause__ is not None and "alice/drafter" in str(raised.value)
    assert "\n" not in str(raised.value) and "hf_alice" not in str(raised.value)
    if "alice/drafter" in hub.repos:
        assert hub.repos["alice/drafter"].files().keys() <= {".gitattributes"}
    assert temporary_folders() == before
    hub.faults.clear()
    drafter.push_to_hub("alice/drafter")
    assert hub.repos["alice/drafter"].files().keys() >= {"README.md", "config.json", "model.safetensors"}


@pytest.mark.parametrize("kind", ["cut", "cut_after", "status"])
def test_a_failing_replacement_leaves_the_old_drafter_whole(hub, drafter, target, kind):
    drafter.push_to_hub("alice/drafter")
    old = dict(hub.repos["alice/drafter"].files())
    other = tiny_drafter(target, seed=7)
    hub.faults[:] = [Fault(UPLOAD, kind if kind != "cut_after" else "cut", FOR_EVER), Fault(COMMIT, kind, FOR_EVER)]
    with pytest.raises(HubError):
        other.push_to_hub("alice/drafter")
    assert hub.repos["alice/drafter"].files() == old
    hub.faults.clear()
    other.push_to_hub("alice/drafter")
    assert torch.equal(DSparkDraftModel.from_pretrained("alice/drafter").fc.weight, other.fc.weight)


def test_a_pull_request_is_not_opened_twice(hub, drafter):
    hub.make("acme/drafter", {})
    hub.faults[:] = [Fault(COMMIT, "cut_after")]
    with pytest.raises(HubError, match="the connection failed"):
        drafter.push_to_hub("acme/drafter", create_pr=True)
    assert hub.repos["acme/drafter"].refs.keys() == {MAIN, "refs/pr/1"}


def test_a_commit_of_somebody_else_in_between_is_not_taken_for_ours(hub, folder):
    hub.make("alice/drafter", {})
    plan = plan_push(folder, PushRequest("alice/drafter"))
    repo = hub.repos["alice/drafter"]

    class Meanwhile(Fault):
        def hits(self, request):
            hit = super().hits(request)
            if hit:
                repo.commit({"theirs": b""}, "theirs", repo.refs[MAIN], MAIN)
            return hit

    hub.faults[:] = [Meanwhile(COMMIT, "cut")]
    with pytest.raises(HubError, match="somebody else changed the repository meanwhile"):
        push(plan)
    assert repo.files() == {"theirs": b""}


def test_a_token_that_may_not_write_is_told_so(hub, drafter):
    hub.make("acme/drafter", {})
    with pytest.raises(HubError, match="403"):
        drafter.push_to_hub("acme/drafter", token="hf_bob")
    with pytest.raises(HubError, match=r"hf auth login|token"):
        drafter.push_to_hub("acme/drafter", token="hf_nobody")
    assert hub.repos["acme/drafter"].files() == {}


def test_without_the_hub_a_push_says_so(hub, drafter, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set; unset it"):
        drafter.push_to_hub("alice/drafter")


def test_a_full_disk_ends_a_push_before_it_starts(hub, drafter, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(type(drafter.config), "save_pretrained", full)
    before = temporary_folders()
    with pytest.raises(HubError, match="cannot push to alice/drafter.*free some space there, or set TMPDIR"):
        drafter.push_to_hub("alice/drafter")
    assert hub.requests == [] and temporary_folders() == before


# -- pulls ------------------------------------------------------------------------------------------------------------

WEIGHTS = "GET .*/model.safetensors"


@pytest.fixture
def pushed(hub, drafter):
    drafter.push_to_hub("alice/drafter")
    return hub.repos["alice/drafter"]


def assert_loads(drafter):
    assert torch.equal(DSparkDraftModel.from_pretrained("alice/drafter").fc.weight, drafter.fc.weight)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(WEIGHTS, "cut_body"),
        Fault(WEIGHTS, "cut"),
        Fault("HEAD .*/config.json", "status", 1, 503),
        Fault("HEAD .*/config.json", "cut"),
        Fault("GET .*/config.json", "cut_body"),
        Fault(WEIGHTS, "status", 2, 429),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.pattern}",
)
def test_a_pull_survives_a_fault_that_passes(hub, pushed, drafter, fault, cache):
    hub.faults[:] = [Fault(**vars(fault))]
    assert_loads(drafter)
    assert hub.faults[0].times == 0 and partial_files(cache) == []


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(WEIGHTS, "cut_body", FOR_EVER), "fetch model.safetensors of alice/drafter"),
        (Fault(WEIGHTS, "cut", FOR_EVER), "fetch model.safetensors of alice/drafter: the connection failed"),
        (
            Fault(WEIGHTS, "corrupt", FOR_EVER),
            "not what was announced .its hash differs., and was removed; try again",
        ),
        (
            Fault("GET .*/config.json", "corrupt", FOR_EVER),
            "config.json of alice/drafter: what arrived is not",
        ),
        (Fault(WEIGHTS, "status", FOR_EVER, 500), "500.*it is in trouble"),
        (Fault(WEIGHTS, "status", FOR_EVER, 403), "403"),
        (Fault("HEAD ", "status", FOR_EVER, 503), "503.*it is in trouble"),
        (Fault("HEAD ", "status", FOR_EVER, 401), "no such repository, or it is private|401"),
        (Fault("HEAD ", "cut", FOR_EVER), "it is not in the cache, and the Hub cannot be reached"),
        (Fault("HEAD ", "status", FOR_EVER, 404, {"X-Error-Code": "RepoNotFound"}), "there is no such repository"),
        (Fault("HEAD ", "status", FOR_EVER, 404), "404"),
    ],
    ids=lambda value: f"{value.kind}-{value.status}-{value.pattern}" if isinstance(value, Fault) else None,
)
def test_a_pull_that_fails_leaves_nothing_broken_in_the_cache(hub, pushed, drafter, fault, message, cache):
    hub.faults[:] = [Fault(**vars(fault))]
    with pytest.raises(HubError, match=message) as raised:
        DSparkDraftModel.from_pretrained("alice/drafter")
    assert "\n" not in str(raised.value) and "hf_alice" not in str(raised.value)
    assert partial_files(cache) == []
    hub.faults.clear()
    assert_loads(drafter)


def test_a_full_disk_ends_a_pull_and_leaves_no_part_of_a_file(hub, pushed, drafter, cache, monkeypatch):
    written = huggingface_hub.file_download.http_get

    def full(url, temp_file, **kwargs):
        if "model.safetensors" in url:
            temp_file.write(b"the first part")
            raise OSError(errno.ENOSPC, "No space left on device")
        written(url, temp_file, **kwargs)

    with monkeypatch.context() as small:
        small.setattr(huggingface_hub.file_download, "http_get", full)
        with pytest.raises(HubError, match="no space is left on the disk; free some, or name another cache"):
            DSparkDraftModel.from_pretrained("alice/drafter")
    assert partial_files(cache) == []
    assert_loads(drafter)


def test_a_cache_that_may_not_be_written_is_named(hub, pushed, tmp_path, monkeypatch):
    def forbidden(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path))

    monkeypatch.setattr(huggingface_hub.file_download, "_download_to_tmp_and_move", forbidden)
    with pytest.raises(HubError, match="may not be written or read; change its permissions"):
        DSparkDraftModel.from_pretrained("alice/drafter")


def test_a_server_that_is_no_hub_is_told_so(hub, pushed, monkeypatch):
    template = huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(hub.url, f"{hub.url}/nowhere")
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    with pytest.raises(HubError, match="404"):
        DSparkDraftModel.from_pretrained("alice/drafter")


def test_a_push_of_a_folder_that_goes_away_is_an_error_of_ours(hub, folder, caplog):
    plan = plan_push(folder, PushRequest("alice/drafter"))
    shutil.rmtree(folder)
    with caplog.at_level(logging.ERROR), pytest.raises(HubError, match="push to alice/drafter"):
        push(plan)
