"""`dspark push`: shows, asks, and does neither more nor less."""

import json

import pytest
import torch
from hub_process import run_program
from hub_store import MAIN
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dspark_cli import app

SHARED = {
    "README.md",
    "config.json",
    "model.safetensors",
    "reports/evaluation.json",
    "reports/evaluation.png",
}


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr("dspark_cli.push._somebody_is_there", lambda: True)


def run(folder, *arguments, answer=None):
    return CliRunner().invoke(app, ["push", str(folder), "--to", "acme/drafter", *arguments], input=answer)


def test_it_shows_everything_and_pushes_after_a_yes(hub, folder, terminal):
    done = run(folder, "--private", answer="y\n")
    assert done.exit_code == 0, done.output
    for shown in ("to acme/drafter, branch main (new, private)", "Push?", "stays here:", "pushed: http"):
        assert shown in done.output
    for path in SHARED:
        assert path in done.output
    assert "training_args.bin: a pickle, which may run any code" in done.output and ".env: hidden" in done.output
    assert "checkpoints/: no part of a drafter" in done.output
    repo = hub.repos["acme/drafter"]
    assert repo.is_private and repo.files().keys() - {".gitattributes"} == SHARED


def test_a_no_changes_nothing(hub, folder, terminal):
    done = run(folder, answer="n\n")
    assert done.exit_code == 1 and "nothing was pushed" in done.output
    assert "PUBLIC unless the organisation" in done.output
    assert hub.repos == {}


def test_without_a_terminal_it_needs_yes(hub, folder):
    done = run(folder)
    assert done.exit_code == 2 and "pass --yes to push without being asked" in done.output
    assert hub.repos == {}
    done = run(folder, "--yes", "--revision", "v1", "--message", "first")
    assert done.exit_code == 0 and hub.repos["acme/drafter"].history("v1")[0].title == "first"
    done = run(folder, "--yes", "--revision", "v1")
    assert done.exit_code == 0 and "nothing to push" in done.output
    assert len(hub.repos["acme/drafter"].history("v1")) == 2


def test_it_shows_what_it_replaces_and_deletes(hub, folder):
    files = {"README.md": b"---\n---\nby hand\n", "model-00001-of-00002.safetensors": b"old", "mine.txt": b"kept"}
    repo = hub.make("acme/drafter", files)
    done = run(folder)
    assert "exists, PUBLIC" in done.output and "replaces a card that was written or edited on the Hub" in done.output
    assert "replaced" in done.output and "model-00001-of-00002.safetensors: weights that would be" in done.output
    assert repo.files() == files
    assert run(folder, "--yes", "--keep-card").exit_code == 0
    assert repo.files()["README.md"] == files["README.md"] and repo.files().keys() >= {"mine.txt", "config.json"}
    assert "model-00001-of-00002.safetensors" not in repo.files()


def test_a_pull_request_is_shown_with_its_address(hub, folder):
    hub.make("acme/drafter", {})
    done = run(folder, "--yes", "--create-pr")
    assert "as a pull request" in done.output and "discussions/1" in done.output
    assert hub.repos["acme/drafter"].files(MAIN) == {}


def test_a_drafter_that_nobody_could_load_is_not_shared(hub, folder):
    weights = load_file(folder / "model.safetensors")
    weights["norm.weight"] = torch.full_like(weights["norm.weight"], float("nan"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    done = run(folder, "--yes")
    assert done.exit_code == 2 and "hold NaN or infinity" in done.output and hub.repos == {}


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "it has no config.json; pass the folder of a drafter"),
        (lambda folder: (folder / "config.json").write_text(json.dumps({"model_type": "llama"})), "no drafter"),
        (lambda folder: folder.rename(folder.parent / "gone"), "is not a folder"),
    ],
    ids=["no_config", "another_model", "no_folder"],
)
def test_what_is_no_drafter_is_refused(hub, folder, break_it, message):
    break_it(folder)
    done = run(folder, "--yes")
    assert done.exit_code == 2 and message in done.output and hub.requests == []


def test_it_runs_as_a_program_and_an_error_is_one_line(hub, folder, tmp_path):
    arguments = ["-m", "dspark_cli", "push", str(folder), "--to", "bob/drafter", "--yes"]
    done = run_program(arguments, hub.url, tmp_path / "home")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "403" in done.stderr and "hf_alice" not in done.stderr + done.stdout
    assert hub.repos == {}
