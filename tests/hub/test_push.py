"""Pushing a drafter: one commit, our card, and nothing in the repository that it would not show."""

import json
import logging

import pytest
import torch
from hub_store import MAIN

from dspark_hf import DSparkDraftModel, HubError
from dspark_hf.hub.card import is_rendered
from dspark_hf.hub.publish import PushRequest, plan_push, push

DRAFTER = {"README.md", "config.json", "model.safetensors"}
SHARED = DRAFTER | {"reports/evaluation.json", "reports/evaluation.png"}


def drafter_files(hub, name="alice/drafter", revision=MAIN):
    return hub.repos[name].files(revision).keys() - {".gitattributes"}


def num_commits(hub, name="alice/drafter", revision=MAIN):
    """Besides the one that made the repository."""
    return len(hub.repos[name].history(revision)) - 1


def test_one_commit_holds_weights_config_card_and_nothing_else(hub, drafter):
    commit = drafter.push_to_hub("alice/drafter")
    assert drafter_files(hub) == DRAFTER and num_commits(hub) == 1
    assert commit.oid == hub.repos["alice/drafter"].refs[MAIN]
    config = json.loads(hub.repos["alice/drafter"].files()["config.json"])
    assert config["calibration"] == drafter.config.calibration


def test_the_card_is_ours_and_never_the_generic_one(hub, drafter):
    drafter.push_to_hub("alice/drafter", tags=["mine"])
    card = hub.repos["alice/drafter"].files()["README.md"].decode()
    assert "library_name: dspark-hf" in card and "- mine" in card and "speculative-decoding" in card
    assert "Model Card for Model ID" not in card and "transformers" not in card.split("---")[1]
    assert is_rendered(card)


def test_reports_come_along_while_the_weights_are_theirs(hub, folder):
    loaded = DSparkDraftModel.from_pretrained(folder)
    loaded.push_to_hub("alice/drafter")
    assert drafter_files(hub) == SHARED and num_commits(hub) == 1
    with torch.no_grad():
        loaded.fc.weight.mul_(2)
    loaded.push_to_hub("alice/other")
    assert drafter_files(hub, "alice/other") == DRAFTER


def test_reports_come_along_however_the_weights_are_cut(hub, folder):
    DSparkDraftModel.from_pretrained(folder).push_to_hub("alice/drafter", max_shard_size="20kB")
    assert drafter_files(hub) > {"reports/evaluation.json", "reports/evaluation.png", "model.safetensors.index.json"}


def test_a_drafter_is_pushed_without_reports_that_cannot_be_shared_and_says_so(hub, folder, caplog):
    loaded = DSparkDraftModel.from_pretrained(folder)
    (folder / "notes.md").write_text("hf_" + "x" * 34)
    with caplog.at_level(logging.WARNING):
        loaded.push_to_hub("alice/drafter")
    assert drafter_files(hub) == DRAFTER and "notes.md holds what looks like a token" in caplog.text


def test_a_card_that_is_a_link_elsewhere_is_not_pushed(hub, folder, tmp_path):
    (tmp_path / "secret").write_text("private")
    (folder / "README.md").symlink_to(tmp_path / "secret")
    push(plan_push(folder, PushRequest("alice/drafter")))
    assert is_rendered(hub.repos["alice/drafter"].files()["README.md"].decode())


def test_a_folder_shares_what_belongs_to_a_drafter(hub, folder):
    plan = plan_push(folder, PushRequest("acme/drafter"))
    assert "acme/drafter" not in hub.repos, "a plan changes nothing"
    push(plan)
    assert drafter_files(hub, "acme/drafter") == SHARED
    assert {left.path for left in plan.left_out} >= {"checkpoints/", "features/", ".env", "training_args.bin"}


def test_a_second_push_without_a_change_makes_no_commit(hub, drafter):
    first = drafter.push_to_hub("alice/drafter")
    second = drafter.push_to_hub("alice/drafter")
    assert second.oid == first.oid and num_commits(hub) == 1
    drafter.config.calibration = None
    drafter.push_to_hub("alice/drafter")
    assert num_commits(hub) == 2


@pytest.mark.parametrize(("private", "expected"), [(None, False), (False, False), (True, True)])
def test_visibility_is_that_of_a_new_repository(hub, drafter, private, expected):
    drafter.push_to_hub("drafter", private=private)  # of whoever is logged in
    assert hub.repos["alice/drafter"].is_private is expected


def test_private_does_not_quietly_push_to_a_public_repository(hub, drafter):
    drafter.push_to_hub("alice/drafter")
    drafter.config.calibration = None
    with pytest.raises(HubError, match="alice/drafter exists and is public.*private in its settings"):
        drafter.push_to_hub("alice/drafter", private=True)
    assert num_commits(hub) == 1


def test_a_branch_is_made_where_there_is_none(hub, drafter):
    drafter.push_to_hub("alice/drafter", revision="v2")
    assert drafter_files(hub) == set() and drafter_files(hub, revision="v2") == DRAFTER
    drafter.config.calibration = None
    drafter.push_to_hub("alice/drafter", revision="v3")
    assert num_commits(hub, revision="v3") == 1 and num_commits(hub, revision="v2") == 1


def test_a_pull_request_leaves_main_as_it_is(hub, drafter):
    hub.make("acme/drafter", {"README.md": b"---\n---\nwritten by hand\n"})
    commit = drafter.push_to_hub("acme/drafter", create_pr=True, card="replace")
    assert drafter_files(hub, "acme/drafter") == {"README.md"} and commit.pr_url.endswith("discussions/1")
    assert drafter_files(hub, "acme/drafter", "refs/pr/1") == DRAFTER


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"create_pr": True, "revision": "v2"}, "create_pr .*revision 'v2'; leave one of the two out"),
        ({"card": "mine"}, "card must be one of auto, keep, replace, got 'mine'"),
    ],
)
def test_arguments_that_break_a_rule_are_refused_before_anything_is_sent(hub, drafter, arguments, message):
    with pytest.raises(HubError, match=message):
        drafter.push_to_hub("alice/drafter", **arguments)
    assert hub.requests == []


def test_names_and_arguments_that_no_repository_has_are_refused(hub, drafter):
    with pytest.raises(HubError, match="cannot push to a/b/c"):
        drafter.push_to_hub("a/b/c")
    with pytest.raises(TypeError, match="safe_serialization"):
        drafter.push_to_hub("alice/drafter", safe_serialization=True)
    assert hub.requests == []


def test_a_card_edited_on_the_hub_stays_until_it_is_to_be_replaced(hub, drafter, caplog):
    drafter.push_to_hub("alice/drafter")
    repo = hub.repos["alice/drafter"]
    edited = repo.files()["README.md"].replace(b"# alice/drafter", b"# My own words")
    repo.commit(repo.files() | {"README.md": edited}, "edit", repo.refs[MAIN], MAIN)
    drafter.config.calibration = None
    with caplog.at_level(logging.WARNING):
        drafter.push_to_hub("alice/drafter")
    assert repo.files()["README.md"] == edited and "card='replace' would replace it" in caplog.text
    drafter.push_to_hub("alice/drafter", card="replace")
    assert is_rendered(repo.files()["README.md"].decode())


def test_a_card_that_a_push_rendered_is_rendered_again(hub, drafter):
    drafter.push_to_hub("alice/drafter")
    drafter.push_to_hub("alice/drafter", tags=["new"])
    assert b"- new" in hub.repos["alice/drafter"].files()["README.md"]
    drafter.push_to_hub("alice/drafter", card="keep")
    assert b"- new" in hub.repos["alice/drafter"].files()["README.md"]


def test_a_card_in_the_folder_is_the_card(hub, folder):
    (folder / "README.md").write_text("---\nlicense: mit\n---\nOurs.\n")
    push(plan_push(folder, PushRequest("alice/drafter")))
    assert hub.repos["alice/drafter"].files()["README.md"].endswith(b"Ours.\n")


def test_weights_of_an_earlier_push_go_and_other_files_stay(hub, drafter):
    drafter.push_to_hub("alice/drafter", max_shard_size="20kB")
    shards = drafter_files(hub) - DRAFTER
    assert "model.safetensors.index.json" in shards and "model.safetensors" not in drafter_files(hub)
    repo = hub.repos["alice/drafter"]
    repo.commit(repo.files() | {"notes.txt": b"mine"}, "notes", repo.refs[MAIN], MAIN)
    drafter.push_to_hub("alice/drafter")
    assert drafter_files(hub) == DRAFTER | {"notes.txt"}
    drafter.push_to_hub("alice/drafter", max_shard_size="20kB")
    assert drafter_files(hub) == (DRAFTER | shards | {"notes.txt"}) - {"model.safetensors"}


def test_save_pretrained_pushes_with_our_card_too(hub, drafter, tmp_path):
    drafter.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="alice/drafter", private=True)
    assert drafter_files(hub) == DRAFTER and num_commits(hub) == 1 and hub.repos["alice/drafter"].is_private
    assert is_rendered(hub.repos["alice/drafter"].files()["README.md"].decode())
    drafter.save_pretrained(tmp_path / "named", push_to_hub=True)
    assert drafter_files(hub, "alice/named") == DRAFTER


def test_what_changed_since_the_plan_is_not_overwritten(hub, folder):
    request = PushRequest("alice/drafter")
    hub.make("alice/drafter", {})
    plan = plan_push(folder, request)
    repo = hub.repos["alice/drafter"]
    repo.commit({"README.md": b"a new card"}, "somebody else", repo.refs[MAIN], MAIN)
    with pytest.raises(HubError, match="412.*changed at the same time"):
        push(plan)
    assert repo.files() == {"README.md": b"a new card"}


def test_a_repository_that_somebody_else_made_meanwhile_is_not_overwritten(hub, folder):
    plan = plan_push(folder, PushRequest("acme/drafter"))
    hub.make("acme/drafter", {"README.md": b"theirs"})
    with pytest.raises(HubError, match="somebody else made it meanwhile"):
        push(plan)
    assert hub.repos["acme/drafter"].files() == {"README.md": b"theirs"}


def test_a_private_push_does_not_go_to_a_public_repository_made_meanwhile(hub, folder):
    plan = plan_push(folder, PushRequest("acme/drafter", private=True))
    hub.make("acme/drafter", {})
    with pytest.raises(HubError, match="somebody else made it meanwhile"):
        push(plan)
    assert drafter_files(hub, "acme/drafter") == set()
