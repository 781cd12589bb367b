"""scripts/gpu_check.sh and gpu_check.py without a GPU: a tiny shape on the CPU, limits, and planted acceptance."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dspark_hf.decoding.accept import accept

SCRIPTS = Path(__file__).parents[2] / "scripts"

pytestmark = pytest.mark.skipif(sys.platform != "linux" or shutil.which("bash") is None, reason="a script for Linux")


def run(*arguments, **environment):
    return subprocess.run(
        ["bash", str(SCRIPTS / "gpu_check.sh"), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHON": sys.executable} | environment,
        timeout=120,
    )


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPTS / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


SMALL = ["--tiny", "--device", "cpu", "--batch-size", 3, "--prompt-tokens", 8, "--new-tokens", 12]


def test_every_way_is_measured_on_a_tiny_shape(tmp_path):
    done = run("run", tmp_path, *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "gpu_check.json").read_text())
    results = {result["way"]: result for result in content["results"]}
    assert list(results) == [
        "plain, eager", "DSpark padded, eager", "DSpark flat, eager", "plain, compiled", "DSpark padded, compiled",
    ]  # fmt: skip
    for way, result in results.items():
        assert result["status"] == "measured"
        assert result["tokens_per_s"] == pytest.approx(3 * 12 / result["seconds"][0], rel=0.01)
        assert result["num_graphs"] == (1 if "compiled" in way else None)
        if "DSpark" in way:
            parts = [result[name] for name in ("draft_ms", "verify_ms", "overhead_ms")]
            assert min(parts) > 0
            assert sum(parts) == pytest.approx(result["round_ms"], abs=0.01)
            assert 2 < result["tau"] <= 8, "random drafts alone would give 1"
    assert content["provenance"]["versions"]["torch"] == torch.__version__
    table = (tmp_path / "gpu_check.md").read_text()
    assert table.count("\n| 3 |") == 5
    assert all(line in table for line in done.stdout.splitlines() if line.startswith("| 3 |"))


def test_a_configuration_that_takes_too_long_is_stopped(tmp_path):
    done = run("run", tmp_path, *SMALL, "--new-tokens", 3000, "--limit-s", 0.5, "--no-compile")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("stopped at its limit of 0.5 s") == 3
    results = json.loads((tmp_path / "gpu_check.json").read_text())["results"]
    assert all(result["tokens_per_s"] is None for result in results)


def test_a_killed_run_keeps_its_log(tmp_path):
    done = run("run", tmp_path, *SMALL, "--new-tokens", 3000, LIMIT_S="1")
    assert done.returncode == 124
    assert "exit code 124" in (tmp_path / "gpu_check.log").read_text()


@pytest.mark.parametrize("arguments", [[], ["run"], ["wheels"], ["other", "x"]])
def test_wrong_calls_show_usage(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert "usage: gpu_check.sh wheels FOLDER" in done.stderr


def test_wheels_that_are_missing_are_named(tmp_path):
    done = run("run", tmp_path / "out", tmp_path)
    assert done.returncode == 1
    assert "holds no wheel of transformers" in done.stderr


@pytest.mark.full
def test_gpu_tests_are_collected(tmp_path):
    done = run("test", tmp_path, "--collect-only")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_a_round_waits_for_the_device_once" in done.stdout


def statuses(script, measure, budget_s):
    arguments = SimpleNamespace(no_compile=True, batch_size=[2], budget_s=budget_s, limit_s=60)
    results = []
    script.run_all(SimpleNamespace(arguments=arguments, measure=measure), SimpleNamespace(add=results.append))
    return [result.status for result in results]


def test_a_failure_ends_only_its_own_configuration(script):
    def measure(way, size, result):
        if way.layout is None:
            raise ValueError("first | line\nsecond")
        if way.layout == "flat":
            raise script.TimeUp
        result.tokens_per_s = 1.0

    expected = ["failed: ValueError: first / line", "measured", "stopped at its limit of 60 s"]
    assert statuses(script, measure, budget_s=1e9) == expected


def test_nothing_is_begun_when_the_budget_is_used_up(script):
    assert statuses(script, measure=None, budget_s=0.0) == ["skipped: 0 s are left of 0 s"] * 3


def test_acceptance_is_drawn_at_the_planted_rates_and_nothing_else_changes(script):
    rates = script.ACCEPTANCE["code"]
    planted = script.PlantedAcceptance(rates, torch.device("cpu"), seed=0)
    rows, width, vocab = 20_000, len(rates), 3
    torch.manual_seed(0)
    drafts, scores = torch.randint(vocab, (rows, width)), torch.randn(rows, width + 1, vocab)
    lengths = torch.full((rows,), width)
    lengths[:100] = 2
    planted.restart()
    got = planted(drafts, None, scores, lengths, do_sample=False)
    assert torch.equal(got.next_token, accept(drafts, None, scores, lengths, do_sample=False).next_token)
    assert int(got.num_accepted[:100].max()) == 2
    for slot, rate in enumerate(rates):
        reached = got.num_accepted[100:] >= slot
        share = (got.num_accepted[100:] > slot)[reached].double()
        error = (rate * (1 - rate) / len(share)) ** 0.5
        assert abs(float(share.mean()) - rate) < 5 * error
    planted.restart()
    again = planted(drafts, None, scores, lengths, do_sample=False)
    assert torch.equal(again.num_accepted, got.num_accepted)
