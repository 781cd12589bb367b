"""The ablation as a whole: tuning on one half, paired gains, fairness, what is written."""

import json
from pathlib import Path

import numpy as np
import pytest
from throughput_machines import StaircaseMachine, profile_of
from typer.testing import CliRunner

from dspark_cli import app
from dspark_hf import ThroughputProfileError
from dspark_hf.evaluation.ablation import SCHEDULES, THRESHOLDS, AblationRequest, run_ablation
from dspark_hf.evaluation.ablation_cells import Place, cells_of
from dspark_hf.evaluation.ablation_page import page_of
from dspark_hf.evaluation.machines import measured, staircase
from dspark_hf.evaluation.schedules import StaticSchedule, fixed
from dspark_hf.evaluation.settings import ComparisonError
from dspark_hf.evaluation.synthetic_traces import synthetic_traces
from dspark_hf.evaluation.trace_replay import FlatTraces, deal, replay
from dspark_hf.evaluation.traces import save_traces
from dspark_hf.fitting.profile_store import save_profile

RATES = {"math": [0.9, 0.85, 0.8], "chat": [0.5, 0.4, 0.3]}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    for mode, seed in (("greedy", 1), ("sampled", 2)):
        traces = synthetic_traces(RATES, num_prompts=8, num_rounds=40, seed=seed)
        object.__setattr__(traces, "mode", mode)
        save_traces(folder / f"{mode}.jsonl", traces)
    save_profile(profile_of(StaircaseMachine()), folder / "profile.json")
    return folder


@pytest.fixture(scope="module", autouse=True)
def _few_trials():
    """Time goes into lookahead trials and resamples, of which a test needs few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dspark_hf.evaluation.lookahead.NUM_TRIALS", 120)
        patch.setattr("dspark_hf.evaluation.ablation_cells.NUM_RESAMPLES", 300)
        yield


@pytest.fixture(scope="module")
def report(files):
    request = AblationRequest(
        traces=(files / "greedy.jsonl", files / "sampled.jsonl"),
        profile=files / "profile.json",
        num_rows=(1, 16),
        stair_widths=(16,),
        max_rounds=15,
    )
    return run_ablation(request)


def test_every_schedule_is_judged_at_every_load_that_a_machine_has(report):
    places = {(cell.mode, cell.machine, cell.num_rows) for cell in report.cells}
    measured_machine, stairs = report.machines
    context = int(measured_machine.split()[2])  # 64 tokens of the prompt, half of some 80 to 120 behind it
    assert 64 + 40 <= context <= 64 + 60
    loads = [(measured_machine, 1), (stairs, 1), (stairs, 16)]  # 16 rows were not measured
    assert places == {(mode, *load) for mode in ("greedy", "sampled") for load in loads}
    assert len(report.cells) == len(places) * len(SCHEDULES)


def cell_of(report, policy, *, mode="greedy", num_rows=16):
    return next(c for c in report.cells if (c.policy, c.mode, c.num_rows) == (policy, mode, num_rows))


def test_gains_are_ratios_of_theta_and_of_nothing_else(report):
    for cell in report.cells:
        others = {
            c.policy: c
            for c in report.cells
            if (c.mode, c.machine, c.num_rows) == (cell.mode, cell.machine, cell.num_rows)
        }
        for name, gain in (("plain", cell.over_plain), ("full", cell.over_full), ("hindsight", cell.over_hindsight)):
            if cell.policy == name:
                assert gain is None
            else:
                assert gain.value == pytest.approx(cell.theta.value / others[name].theta.value - 1)
                assert gain.low <= gain.value <= gain.high
        statics = [others[name] for name in ("fixed", "survival")]
        assert sum(c.over_static is None for c in statics) == 1
        assert cell.theta.n == 8 and cell.theta.low <= cell.theta.value <= cell.theta.high
        assert cell.tau == pytest.approx(1 + (cell.share_accepted or 0) * cell.budget)


def test_the_schedulers_share_is_of_the_logarithms(report):
    cell, full = (cell_of(report, name) for name in ("block", "full"))
    plain = cell_of(report, "plain").theta.value
    want = np.log(cell.theta.value / full.theta.value) / np.log(cell.theta.value / plain)
    assert cell.scheduler_share.value == pytest.approx(want)
    assert full.scheduler_share is None and cell_of(report, "plain").scheduler_share is None


def test_plain_and_full_are_what_they_say(report):
    plain, full = cell_of(report, "plain"), cell_of(report, "full")
    assert (plain.budget, plain.tau, plain.share_plain, plain.share_accepted) == (0.0, 1.0, 1.0, None)
    assert (full.budget, full.share_plain) == (3.0, 0.0)
    assert plain.theta.value == pytest.approx(16 / (1 + 16 / 256))  # 16 tokens fill a stair
    assert full.theta.value == pytest.approx(16 * full.tau / (1 + 64 / 256))
    assert full.fairness.jain == pytest.approx(1.0) and full.fairness.longest_wait == 0
    assert plain.fairness.jain is None and plain.fairness.share_starved == 1.0


def test_plain_decoding_costs_the_steps_of_plain_generate(report):
    """Not a step of the drafter's loop and its overhead, which are dearer or cheaper by chance."""
    (machine,) = (name for name in report.machines if name.startswith("measured"))
    profile, context = profile_of(StaircaseMachine()), int(machine.split()[2])
    loop_s = profile.step_s(1, 1, context) + profile.overhead_s(1)
    assert profile.plain_step_s(1, context) < 0.7 * loop_s, "or the test could not tell"
    cells = {c.policy: c for c in report.cells if (c.mode, c.machine, c.num_rows) == ("greedy", machine, 1)}
    plain, full = cells["plain"].theta.value, cells["full"]
    assert plain == pytest.approx(1 / profile.plain_step_s(1, context))
    assert cells["plain"].expected_theta == pytest.approx(plain)
    round_s = profile.step_s(1, 4, context) + profile.draft_s(1, context) + profile.overhead_s(1)
    assert full.over_plain.value == pytest.approx(full.tau / round_s / plain - 1)


def test_a_fixed_length_of_none_is_plain_decoding():
    from dspark_hf.evaluation.ablation import _load_cells, _Statics

    traces = FlatTraces.of(synthetic_traces({"a": [0.05] * 3}, num_prompts=4, num_rounds=40, seed=0))
    request = AblationRequest((Path("x"),), max_rounds=20)
    machine = measured(profile_of(StaircaseMachine()), 3, 20)
    statics = _Statics(traces, traces, 1, request)
    setting, theta = statics.tune(machine.costs(1), machine.plain_costs(1))["fixed"]
    cells = {c.policy: c for c in _load_cells(statics, Place("greedy", "m", 1), machine, request)}
    assert (setting, cells["fixed"].setting) == (0, 0.0)
    assert theta == pytest.approx(1 / profile_of(StaircaseMachine()).plain_step_s(1, 20))
    assert cells["fixed"].theta == cells["plain"].theta and cells["fixed"].over_plain.value == 0.0


def test_uneven_schedules_show_who_goes_without(report):
    fair = cell_of(report, "block").fairness
    assert fair.budget_by_domain["math"] > fair.budget_by_domain["chat"] + 0.1
    assert 1 / 8 < fair.jain < 1.0 and 0 <= fair.lowest_budget < cell_of(report, "block").budget


def test_static_schedules_are_tuned_on_the_other_half(files):
    """On prompts of low acceptance a short draft is best; what is judged has high acceptance, unseen by tuning."""
    low = synthetic_traces({"a": [0.2, 0.2, 0.2]}, num_prompts=4, num_rounds=60, seed=0)
    high = synthetic_traces({"a": [0.95, 0.95, 0.95]}, num_prompts=4, num_rounds=60, seed=0)
    from dspark_hf.evaluation.ablation import _Statics

    request = AblationRequest((Path("x"),), max_rounds=60)
    machine = staircase(1, 3, scale=16)
    found = {}
    for tuned, judged in ((low, high), (high, low)):
        statics = _Statics(FlatTraces.of(tuned), FlatTraces.of(judged), 8, request)
        found[tuned] = statics.tune(machine.costs(8), machine.plain_costs(8))
    assert found[low]["fixed"][0] <= 1 and found[high]["fixed"][0] == 3
    assert found[high]["survival"][0] in THRESHOLDS


def test_tuning_finds_the_best_length_of_known_acceptance():
    rate = 0.7
    from dspark_hf.evaluation.ablation import _Statics

    traces = FlatTraces.of(
        synthetic_traces({"a": [rate] * 3}, num_prompts=10, num_rounds=120, concentration=1e6, seed=3)
    )
    statics = _Statics(traces, traces, 8, AblationRequest((Path("x"),), max_rounds=10**6))
    for scale in (4, 16, 64, 256):
        machine = staircase(1, 3, scale)
        theta = {n: 8 * sum(rate**j for j in range(n + 1)) / (1 + 8 * (1 + n) / scale) for n in range(4)}
        setting, got = statics.tune(machine.costs(8), machine.plain_costs(8))["fixed"]
        assert setting == max(theta, key=theta.get)
        assert got == pytest.approx(theta[setting], rel=0.04)


def test_intervals_of_a_difference_are_paired():
    """Prompts differ widely, and one schedule is a little better on each: unpaired intervals would overlap."""
    rates = {f"d{i}": [0.05 + 0.09 * i] * 3 for i in range(10)}
    traces = FlatTraces.of(synthetic_traces(rates, num_prompts=2, num_rounds=300, seed=0))
    costs = staircase(1, 3).costs(2)
    load = deal(traces, 2, max_rounds=10_000, seed=0)
    logs = {name: replay(traces, load, fixed(traces, n)) for name, n in (("plain", 0), ("full", 3), ("fixed", 2))}
    logs |= {"survival": logs["full"], "hindsight": logs["full"]}
    by_name = dict.fromkeys(logs, costs)
    found = cells_of(Place("greedy", "m", 2), logs, {"fixed": 2.0}, "survival", traces, by_name, seed=0)
    cells = {c.policy: c for c in found}
    one, two = cells["full"].theta, cells["fixed"].theta
    assert one.low < two.high  # each by itself
    assert cells["full"].over_static.value == 0.0 and cells["full"].over_static.low == 0.0
    assert cells["fixed"].over_full.high < 0


def test_one_domain_can_starve():
    traces = FlatTraces.of(synthetic_traces(RATES, num_prompts=3, num_rounds=30, seed=0))
    lengths = np.concatenate(
        [
            np.full(end - start, 3 * (domain == "math"))
            for start, end, domain in zip(traces.starts, traces.ends, traces.domains, strict=True)
        ]
    )
    load = deal(traces, 3, max_rounds=1000, seed=0)
    starving = replay(traces, load, StaticSchedule(lengths, 3))
    logs = {name: replay(traces, load, fixed(traces, 3)) for name in ("full", "hindsight", "fixed", "survival")}
    logs |= {"plain": replay(traces, load, fixed(traces, 0)), "starving": starving}
    costs = dict.fromkeys(logs, staircase(1, 3).costs(3))
    cells = cells_of(Place("greedy", "m", 3), logs, {}, "fixed", traces, costs, seed=0)
    fair = next(c for c in cells if c.policy == "starving").fairness
    assert fair.budget_by_domain == {"chat": 0.0, "math": 3.0}
    assert (fair.jain, fair.lowest_budget, fair.share_starved, fair.longest_wait) == (0.5, 0.0, 0.5, 30)
    assert fair.slow_speed < next(c for c in cells if c.policy == "full").fairness.slow_speed


def test_only_hindsight_looks_ahead(report):
    found = {name: check.num_violations for name, check in report.lookahead.items()}
    assert found.pop("hindsight") > 0
    assert set(found.values()) == {0} and {"prefix", "smoothed", "block", "lagged", "goodput", "survival"} <= set(found)


def test_the_page_and_the_json_hold_every_load(report, tmp_path):
    content = json.loads(json.dumps(report.to_dict()))
    assert content["kind"] == "ablation" and len(content["cells"]) == len(report.cells)
    assert content["traces"][0]["domains"] == {"chat": 4, "math": 4}
    page = page_of(report, "figure.png")
    assert page.count("\n## ") == 4 + 3 and "](figure.png)" in page
    block = cell_of(report, "block")
    assert f"{1 + block.over_plain.value:.2f} ± " in page and f"{block.over_static.value:+.1%} ± " in page
    assert "| `hindsight` |" in page
    assert "held fixed" in page and "steps of plain generate()" in page


def test_the_command_writes_all_three_files(files, tmp_path):
    out = {name: tmp_path / f"ablation.{name}" for name in ("json", "md", "png")}
    arguments = ["ablate", "--traces", str(files / "greedy.jsonl"), "--smoke", "--rows", "2", "--max-rounds", "8"]
    arguments += ["--json", str(out["json"]), "--markdown", str(out["md"]), "--plot", str(out["png"])]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "policies whose decisions follow from later slots: hindsight" in result.output
    content = json.loads(out["json"].read_text())
    assert {cell["num_rows"] for cell in content["cells"]} == {2} and content["provenance"]["n"] == 8
    assert "](ablation.png)" in out["md"].read_text() and out["png"].read_bytes()[:4] == b"\x89PNG"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ablation.json", "ablation.md", "ablation.png"]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"traces": ()}, "traces must be one file"),
        ({"num_rows": (0,)}, "num_rows must be whole numbers"),
        ({"num_rows": (2, 2)}, "each given once"),
        ({"num_rows": ()}, "num_rows must be one at least"),
        ({"stair_widths": ()}, "stair_widths must be one at least"),
        ({"max_rounds": 0}, "max_rounds"),
        ({"context": 0}, "context"),
    ],
)
def test_values_outside_their_rules_are_refused(changes, what):
    with pytest.raises(ComparisonError, match=what):
        AblationRequest(**({"traces": (Path("x"),)} | changes))


def test_two_recordings_of_one_mode_are_refused(files):
    with pytest.raises(ComparisonError, match="different modes"):
        run_ablation(AblationRequest((files / "greedy.jsonl", files / "greedy.jsonl")))


def test_a_profile_of_shorter_blocks_is_refused():
    profile = profile_of(StaircaseMachine())
    with pytest.raises(ThroughputProfileError, match="blocks of 3 drafts, and the traces 5"):
        measured(profile, 5, 20)
    costs = measured(profile, 2, 20).costs(4)
    assert costs.draft_s == pytest.approx(profile.draft_s(4, 20) - profile.step_costs(4, 20).slot_s)
    assert costs.seconds == pytest.approx(profile.step_costs(4, 20).step_s[:13].tolist())
