"""`dspark simulate` from request to files."""

import json

from typer.testing import CliRunner

import dspark_cli
from dspark_hf.evaluation.simulation import SimulationRequest, files, simulate
from dspark_hf.evaluation.simulation.files import prepare, write
from dspark_hf.evaluation.simulation.workload import LengthLaw


def test_from_request_to_files(tmp_path):
    request = SimulationRequest(
        tmp_path / "out",
        machines=("staircase",),
        systems=("plain", "mtp-1", "prefix"),
        concurrency=(4, 16, 32),
        loads=(0.5,),
        lengths=LengthLaw.parse("fixed:16,10"),
        num_requests=4,
        study_rounds=60,
        num_seeds=2,
    )
    prepare(request.output)
    report = simulate(request)
    written = write(report, request.output)
    names = ["simulation.json", "simulation.md"]
    figures = ["load_curves.png", "budget.png", "fairness.png", "shift.png", "drift.png"]
    assert [file.name for file in written] == names + figures
    content = json.loads(written[0].read_text())
    assert content["kind"] == "simulation" and content["provenance"]["n"] == 2
    closed = content["machines"][0]["closed"]
    assert {(one["system"], one["load"]) for one in closed} == {(s, n) for s in request.systems for n in (4, 16, 32)}
    page = written[1].read_text()
    for part in (
        "## staircase",
        "## Beside the paper",
        "arXiv 2607.05147",
        "Fairness with 32 users",
        "prefix, floor 4",
    ):
        assert part in page
    assert "nan" not in page and str(tmp_path) not in page


def test_the_command_writes_all_and_refuses_what_is_not_there(tmp_path, monkeypatch):
    def run(*arguments):
        return CliRunner().invoke(dspark_cli.app, ["simulate", "--output", str(tmp_path / "out"), *arguments])

    monkeypatch.setattr(files, "draw_figures", lambda report, folder: [])
    done = run("--smoke", "--system", "plain", "--system", "full", "--concurrency", "32", "--lengths", "fixed:8,4")
    assert done.exit_code == 0, done.output
    assert "simulation.json" in done.output and (tmp_path / "out" / "simulation.md").is_file()
    refused = run("--machine", "nowhere")
    assert refused.exit_code == 2
    assert "machine must be one of accelerator, staircase or the file of a profile, got 'nowhere'" in refused.output
    assert run("--load", "-1").exit_code == 2
