"""`dspark card`: files, exit codes, messages."""

import json

import pytest
import typer.testing
from card_reports import make_drafter, speed_report, whole_folder

import dspark_cli
from dspark_hf.checkpoints.digest import checkpoint_facts
from dspark_hf.hub.card import render_card


def run(*arguments):
    done = typer.testing.CliRunner().invoke(dspark_cli.app, ["card", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def folder(tmp_path):
    return make_drafter(tmp_path / "mine")


def test_a_card_is_written_checked_and_renewed(folder, tmp_path):
    assert run(folder, "--check")[0] == 1 and not (folder / "README.md").exists()
    code, out, _ = run(folder)
    assert code == 0 and f"card  {folder / 'README.md'}" in out
    assert (folder / "README.md").read_text() == render_card(folder)
    assert run(folder, "--check")[:2] == (0, f"{folder / 'README.md'} is up to date\n")
    code, _, err = run(folder, "--repo-id", "org/mine", "--check")
    assert code == 1 and "is not what `dspark card` writes" in err
    file = tmp_path / "speed-laptop.json"
    file.write_text(json.dumps(speed_report(checkpoint_facts(folder).sha256)))
    code, out, _ = run(folder, "--report", file, "--license", "mit", "--base-model", "org/base")
    assert code == 0 and f"kept  {folder / 'reports' / 'speed-laptop.json'}" in out
    text = (folder / "README.md").read_text()
    assert "1.75x" in text and "license: mit" in text and "base_model: org/base" in text


def test_a_card_somewhere_else_finds_the_figures(tmp_path):
    folder = whole_folder(tmp_path / "mine")
    (tmp_path / "cards").mkdir()
    assert run(folder, "--output", tmp_path / "cards" / "mine.md")[0] == 0
    text = (tmp_path / "cards" / "mine.md").read_text()
    assert "](../mine/reports/training.png)" in text and not (folder / "README.md").exists()


def test_a_card_names_a_way_to_install_that_exists(folder):
    text = render_card(folder)
    assert "pip install ." in text and "pip install dspark" not in text


def test_a_card_by_hand_stays_unless_it_may_go(folder):
    (folder / "README.md").write_text("# mine\n")
    code, _, err = run(folder)
    assert code == 2 and "written or changed by hand" in err and "--replace" in err
    assert (folder / "README.md").read_text() == "# mine\n"
    assert run(folder, "--replace")[0] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--check", "--license", "mit"], "--check writes nothing"),
        (["--repo-id", "no/such/id"], "repo_id must be a Hub id"),
        (["--license", "My Own"], "license must be an identifier"),
        (["--report", "absent.json"], "absent.json cannot be read as a report"),
        (["--output", "absent/x.md"], "its folder does not exist; create it first"),
    ],
)
def test_mistakes_end_in_one_line(folder, options, message):
    code, _, err = run(folder, *options)
    assert code == 2 and message in err and err.count("\n") == 1
    assert not (folder / "README.md").exists()


def test_a_folder_without_a_drafter(tmp_path):
    code, _, err = run(tmp_path)
    assert code == 2 and "no config.json" in err
