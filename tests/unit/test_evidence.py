"""scripts/evidence.py: commands that exist, within the hour; what is there is skipped, what changed is made anew."""

import importlib.util
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import typer.main

import dspark_cli

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch):
    """The script, with its module of stages."""
    monkeypatch.syspath_prepend(SCRIPTS)
    spec = importlib.util.spec_from_file_location("evidence", SCRIPTS / "evidence.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "evidence", module)
    monkeypatch.delitem(sys.modules, "evidence_stages", raising=False)
    spec.loader.exec_module(module)
    return module


def world(script, root, *, is_small=False):
    prompts, drafter = root / "prompts.jsonl", root / "drafter"
    return script.World(
        "t", root / "out", root / "work", [prompts], {"D": drafter}, drafter, "float32", is_small=is_small
    )


@pytest.mark.parametrize("is_small", [False, True])
def test_every_stage_is_a_command_that_parses(script, tmp_path, is_small):
    app = typer.main.get_command(dspark_cli.app)
    for stage in script.stages(world(script, tmp_path, is_small=is_small)):
        words, command = list(stage.words), app
        while words and words[0] in getattr(command, "commands", {}):
            command, words = command.commands[words[0]], words[1:]
        assert command is not app, f"dspark has no command {stage.words[0]}"
        command.make_context("dspark", words)


def test_all_stages_fit_into_the_hour(script, tmp_path):
    table = script.stages(world(script, tmp_path))
    assert sum(stage.minutes for stage in table) <= sys.modules["evidence_stages"].MOST_MINUTES
    assert len({stage.name for stage in table}) == len(table)


def test_stages_read_what_earlier_ones_write(script, tmp_path):
    """Every input is a drafter, a list of prompts, or the product of a stage before."""
    here = world(script, tmp_path)
    known = {*here.prompts, here.bundled, here.work / "bench-prompts.jsonl"}
    for stage in script.stages(here):
        assert set(stage.reads) <= known, stage.name
        assert all(any(str(path) in word for word in stage.words) for path in stage.reads), stage.name
        known |= set(stage.writes)


@pytest.fixture
def stage(script, tmp_path):
    source = tmp_path / "source.jsonl"
    source.write_text("a\n")
    return sys.modules["evidence_stages"].Stage(
        "s", 1, ["x"], [source], [tmp_path / "out" / "s.json"], [tmp_path / "out" / "partial"]
    )


@pytest.fixture
def manifest(script, tmp_path):
    return script.Manifest(tmp_path / "evidence.json")


@pytest.fixture
def calls(script, stage, monkeypatch):
    """Exit codes to come, and what scratch held at each call."""
    state = {"codes": [], "seen": []}

    def call(words, env, cwd):
        assert words[1:] == ["-m", "dspark_cli", *stage.words] and str(SCRIPTS.parent / "src") in env["PYTHONPATH"]
        assert cwd == SCRIPTS.parent
        scratch = stage.scratch[0]
        state["seen"].append(scratch.read_text() if scratch.exists() else None)
        code = state["codes"].pop(0)
        scratch.write_text("half")
        if code == 0:
            stage.writes[0].write_text("{}")
        return code

    monkeypatch.setattr(script.subprocess, "call", call)
    return state


def test_what_is_there_is_skipped_and_what_changed_is_made_anew(script, stage, manifest, calls, tmp_path):
    calls["codes"] = [0, 0, 0, 0]
    assert script.run_stage(stage, manifest) == "done"
    again = script.Manifest(tmp_path / "evidence.json")
    assert again.entries["s"]["command"] == "dspark x" and again.entries["s"]["budget_minutes"] == 1
    assert script.run_stage(stage, again) == "there" and len(calls["seen"]) == 1
    stage.writes[0].unlink()
    assert script.run_stage(stage, again) == "done"
    stage.reads[0].write_text("b\n")
    assert script.run_stage(stage, again) == "done"
    assert script.run_stage(stage, again) == "there"
    other = replace(stage, words=["x", "--more"])
    assert script.fingerprint(other) != script.fingerprint(stage)
    assert script.run_stage(stage, again) == "there"


def test_an_interrupted_stage_goes_on_from_its_scratch_unless_inputs_changed(script, stage, manifest, calls):
    calls["codes"] = [130, 130, 0]
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            script.run_stage(stage, manifest)
    assert calls["seen"] == [None, "half"]
    stage.reads[0].write_text("b\n")
    assert script.run_stage(stage, manifest) == "done"
    assert calls["seen"][2] is None


def test_failures_and_missing_inputs_are_told(script, stage, manifest, calls):
    calls["codes"] = [2]
    assert script.run_stage(stage, manifest) == "failed"
    assert "done" not in manifest.entries["s"]
    stage.reads[0].unlink()
    assert script.run_stage(stage, manifest) == "waits"
    assert len(calls["seen"]) == 1


def test_timed_stages_run_beside_the_others_and_wait_for_what_they_read(script, tmp_path, monkeypatch):
    kind = sys.modules["evidence_stages"].Stage
    files = {name: tmp_path / name for name in "abcd"}
    table = [
        kind("profile", 1, [], [], [files["a"]], is_timed=True),
        kind("texts", 1, [], [], [files["b"]]),
        kind("bench", 1, [], [files["b"]], [files["c"]], is_timed=True),
        kind("ablate", 1, [], [files["a"], files["b"]], [files["d"]]),
    ]
    ran, threads = [], set()

    def run(stage, manifest, num_threads):
        assert all(path.exists() for path in stage.reads), stage.name
        time.sleep(0.05 if stage.name in ("profile", "texts") else 0.0)
        stage.writes[0].touch()
        ran.append(stage.name)
        threads.add(num_threads)
        return "done"

    monkeypatch.setattr(script, "run_stage", run)
    monkeypatch.setattr(script.os, "cpu_count", lambda: 4)
    assert script.run_all(table, None, 2) == dict.fromkeys(["profile", "texts", "bench", "ablate"], "done")
    assert threads == {2} and sorted(ran[:2]) == ["profile", "texts"]
    ran.clear()
    threads.clear()
    assert list(script.run_all(table, None, 1)) == ran == [stage.name for stage in table] and threads == {None}


def test_an_interrupt_in_one_lane_does_not_hang_the_other(script, tmp_path, monkeypatch):
    kind = sys.modules["evidence_stages"].Stage
    table = [
        kind("profile", 1, [], [], [tmp_path / "a"], is_timed=True),
        kind("ablate", 1, [], [tmp_path / "a"], [tmp_path / "b"]),
    ]

    def run(stage, manifest, num_threads):
        if stage.name == "profile":
            raise KeyboardInterrupt
        return "waits"

    monkeypatch.setattr(script, "run_stage", run)
    with pytest.raises(KeyboardInterrupt):
        script.run_all(table, None, 2)


def test_processes_that_run_different_stages_keep_each_others_notes(script, tmp_path):
    one, other = (script.Manifest(tmp_path / "evidence.json") for _ in range(2))
    one.note("a", done="1")
    other.note("b", done="2")
    one.note("c", begun="3")
    assert sorted(script.Manifest(tmp_path / "evidence.json").entries) == ["a", "b", "c"]


def test_other_files_of_a_drafters_folder_change_nothing(script, stage, tmp_path):
    folder = tmp_path / "drafter"
    (folder / "reports").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    of_folder = replace(stage, reads=[folder])
    before = script.fingerprint(of_folder)
    (folder / "README.md").write_text("card")
    assert script.fingerprint(of_folder) == before
    (folder / "config.json").write_text("{ }")
    assert script.fingerprint(of_folder) != before


def test_the_first_prompts_are_of_all_kinds(script, tmp_path):
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / "a.jsonl").write_text("a1\na2\na3\n")
    (tmp_path / "sets" / "b.jsonl").write_text("b1\n\n")
    cut = script.first_prompts([tmp_path / "sets"], tmp_path / "work", 2)
    assert [path.read_text().split() for path in cut] == [["a1", "a2"], ["b1"]]
    script.few_prompts(cut, tmp_path / "work" / "few.jsonl", 3)
    assert (tmp_path / "work" / "few.jsonl").read_text().split() == ["a1", "b1", "a2"]
    with pytest.raises(SystemExit, match="two files are called a.jsonl"):
        script.first_prompts([tmp_path / "sets", tmp_path / "sets" / "a.jsonl"], tmp_path / "work", 2)


def test_unknown_stages_and_prompts_are_refused(script, capsys):
    with pytest.raises(SystemExit):
        script.main(["--only", "nothing", "--list"])
    assert "there is no stage nothing" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="there are no prompts nowhere"):
        script.main(["--prompts", "nowhere", "--list"])


def test_the_list_names_budgets_and_commands(script, capsys):
    assert script.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert "dspark bench" in out and "min  profile" in out


def test_manifests_are_json(script, manifest):
    manifest.note("s", done="x", minutes=1.5)
    assert json.loads(manifest._path.read_text()) == {"s": {"done": "x", "minutes": 1.5}}
