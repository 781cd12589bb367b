"""Scripts behind docs/questions: they find what was planted, and their reports make tables."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from throughput_machines import StaircaseMachine, profile_of

from dspark_hf import zoo
from dspark_hf.decoding.calibrate import SlotCalibration
from dspark_hf.decoding.policies.facts import StepCosts
from dspark_hf.evaluation import calibration_quality
from dspark_hf.evaluation.traces import AcceptanceTraces, prompt_trace
from dspark_hf.fitting.profile_store import save_profile
from dspark_hf.fitting.proposals import Proposals
from dspark_hf.hub.card_facts import cache_bytes_per_token

SCRIPTS = Path(__file__).parents[2] / "scripts"
BUNDLED = zoo.BUNDLED_ROOT / "smollm2-135m-instruct"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def load(name):
        spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_sizes_are_those_of_the_weights(script):
    overhead = script("drafter_overhead")
    config, target = next(iter(overhead.pairs().values()))
    found = overhead.overhead_of(config, target)
    with safe_open(BUNDLED / "model.safetensors", "pt") as file:
        shapes = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert found.parameters == sum(t.numel() for t in shapes.values() if t.is_floating_point())
    assert all(size > 0 for size in found.parts.values())
    report = json.loads((BUNDLED / "reports" / "evaluation.json").read_text())
    (pair,) = report["pairs"].values()
    assert found.target_parameters == pair["target_num_parameters"]
    assert found.cache_bytes == cache_bytes_per_token(config) == 1536
    assert found.target_cache_bytes == 30 * 2 * 3 * 64 * 2


def test_times_are_those_of_the_profile(script):
    profile = profile_of(StaircaseMachine())
    text = script("drafter_overhead").time_table(profile, 10)
    row = next(line for line in text.splitlines() if line.startswith("| 4 |"))
    draft_s, step_s, rest_s = profile.draft_s(4, 10), profile.step_s(4, 16, 10), profile.overhead_s(4)
    assert f"| {1e3 * draft_s:.1f} | {1e3 * step_s:.1f} | {1e3 * rest_s:.1f} |" in row
    assert f"| {draft_s / (draft_s + step_s + rest_s):.0%} |" in row


# -- vocabulary -------------------------------------------------------------------------------------------------------


def test_a_line_and_its_fit_are_found(script):
    cost = script("vocabulary_cost")
    assert cost.line_through([1, 2, 4], [3.0, 5.0, 9.0]) == pytest.approx((1.0, 2.0, 1.0))
    assert cost.line_through([1, 2, 3, 4], [1.0, -1.0, -1.0, 1.0])[2] == pytest.approx(0.0, abs=1e-9)


def test_every_part_is_timed_at_every_vocabulary(script, tmp_path, monkeypatch, capsys):
    cost = script("vocabulary_cost")
    path = tmp_path / "cost.json"
    words = ["--vocab-size", "256", "512", "--hidden-size", "64", "--rank", "8", "--block-size", "2", "--repeats", "2"]
    monkeypatch.setattr(sys, "argv", ["vocabulary_cost.py", *words, "--json", str(path)])
    cost.main()
    content = json.loads(path.read_text())
    assert all(len(content["median_s"][part]) == 2 and min(content["median_s"][part]) > 0 for part in cost.PARTS)
    assert content["loop_operations"] == [2 * 2 * 8 * 256, 2 * 2 * 8 * 512]
    assert content["loop_bytes"] == [2 * 2 * 8 * 256, 2 * 2 * 8 * 512]
    assert "| 512 |" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--vocab-size", "256"], ["--hidden-size", "100"], ["--rank", "0"]])
def test_sizes_that_cannot_be_measured_are_refused(script, monkeypatch, capsys, words):
    monkeypatch.setattr(sys, "argv", ["vocabulary_cost.py", *words])
    with pytest.raises(SystemExit):
        script("vocabulary_cost").main()
    assert "two vocabularies or more" in capsys.readouterr().err


# -- calibration ------------------------------------------------------------------------------------------------------


def rounds_of(num_prompts, seed, shift=0.0, scale=1.0):
    """Rounds whose logits say `scale * logit + shift` of the truth; three slots, 150 rounds a prompt."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(150 * num_prompts, 3, generator=generator)
    stands = torch.rand(truth.shape, generator=generator) < torch.sigmoid(truth)
    return Proposals(
        logits=truth * scale + shift,
        is_accepted=stands.long().cumprod(dim=-1).bool(),
        is_verified=torch.ones_like(stands),
        prompt=torch.arange(num_prompts).repeat_interleave(150),
    )


@pytest.fixture
def study(script, monkeypatch):
    module = script("calibration_analysis")
    monkeypatch.setattr(module, "NUM_RESAMPLES", 50)
    monkeypatch.setattr(module, "NUM_SPLITS", 2)
    return module


NO_MAPS = SlotCalibration(torch.ones(3), torch.zeros(3))
ROUNDS = {"greedy": {"math": rounds_of(24, 1), "chat": rounds_of(24, 2, shift=1.0, scale=1.5)}}


def test_changed_traffic_is_noticed_and_a_refit_mends_it(study):
    found = {one.fitted_on: one for one in study.by_traffic(ROUNDS, seed=0)}["math and code"]
    assert found.before.value < 0.05 and found.warned_before is None
    assert found.after.value > 0.08 and found.warned_after is not None
    assert found.largest_gap > 0.1
    assert found.refitted.value < 0.5 * found.after.value
    assert found.refitted.value < 3 * found.floor


def test_traffic_that_stays_the_same_is_left_alone(study):
    same = {"greedy": {"math": rounds_of(24, 3), "chat": rounds_of(24, 4)}}
    for found in study.by_traffic(same, seed=0):
        assert found.warned_after is None and abs(found.largest_gap) < 0.05


def test_kinds_of_maps_mend_what_they_can(study):
    (found,) = study.by_shape({"greedy": {"a": rounds_of(24, 5, shift=1.0)}}, seed=0)
    errors = {name: np.mean(values) for name, values in found["errors"].items()}
    assert errors["none"] > 0.1
    assert errors["platt"] < errors["temperature"] and errors["isotonic"] < errors["temperature"]
    assert errors["platt"] < 2 * found["floor"]


def test_the_mean_error_is_that_of_the_slots(study, monkeypatch):
    monkeypatch.setattr(calibration_quality, "calibrated_error_floor", lambda predicted, seed: (0.01, 0.02))
    proposals = rounds_of(4, 6, shift=0.5)
    slots = calibration_quality.slot_qualities(proposals, NO_MAPS, seed=0)
    mean = np.mean([slot.before.ece.value for slot in slots])
    assert study.mean_error(proposals, None, 0).value == pytest.approx(mean, abs=1e-6)


def test_prompts_of_joined_parts_are_different(study):
    parts = [rounds_of(3, 7), rounds_of(4, 8)]
    assert study.joined(parts).num_prompts == 7
    assert torch.equal(study.joined(parts).logits, torch.cat([part.logits for part in parts]))


def test_rounds_of_traces_are_those_that_whole_drafts_visit(study, script):
    text = prompt_trace("gsm8k/1", [[float(i), 0.0] for i in range(6)], [2, 0, 0, 0, 1, 0], layout="positions")
    others = [prompt_trace(name, [[9.0, 9.0]], [1], layout="positions") for name in ("mt-bench/1", "poems/1")]
    whole = script("calibration_study")
    assert whole.visited(text) == [0, 3, 4]
    traces = AcceptanceTraces((text, *others), "sampled", source={"law": {"temperature": 0.7}})
    rounds = whole.rounds_of([traces])
    assert {name: len(part) for name, part in rounds["T 0.7"].items()} == {"math": 3, "chat": 1, "poems": 1}
    assert rounds["T 0.7"]["math"].is_accepted.sum(dim=1).tolist() == [2, 0, 1]
    with pytest.raises(ValueError, match="two files of traces are of setting 'T 0.7'"):
        whole.rounds_of([traces, traces])


def test_a_report_makes_the_tables(study, script, monkeypatch):
    monkeypatch.setattr(calibration_quality, "NUM_RESAMPLES", 20)
    monkeypatch.setattr(calibration_quality, "calibrated_error_floor", lambda predicted, seed: (0.01, 0.02))
    rounds = {"greedy": {"math": rounds_of(8, 1), "chat": rounds_of(8, 2)}}
    made = script("calibration_study").study(rounds, {"greedy": NO_MAPS}, [], 0)
    content = json.loads(json.dumps(made))
    content["sources"] = [content]
    pages = script("question_pages")
    monkeypatch.setattr(pages, "report", lambda name: content)
    for name in ("domains", "settings", "shapes", "traffic", "from-calibration"):
        text = pages.TABLES[name]()
        widths = {line.count("|") for line in text.splitlines()}
        assert len(widths) == 1, name
    assert pages.domains().count("greedy") == 2


# -- rows -------------------------------------------------------------------------------------------------------------


def test_a_floor_ends_the_wait_of_a_row_that_would_starve(script):
    rows = script("rows_study")
    costs = StepCosts.of([1 + b for b in range(3 * 8 + 1)])  # verification is dear: only the best rows get a draft
    mean = np.array([[0.05] * 7, [0.5] * 7, [0.999] * 7])
    found = {(one["policy"], one["floor"]): one for one in rows.starving("dear", 3, costs, mean, 40, 0)}
    without, with_floor = found["block", None], found["block", rows.FLOORS[1]]
    assert without["starved"]["chat"] > 0.9 and without["longest_wait"] > rows.FLOORS[1]
    assert with_floor["longest_wait"] == rows.FLOORS[1] - 1
    assert with_floor["drafts"]["chat"] >= 1 / rows.FLOORS[1]
    assert with_floor["lost_to_floor"]["value"] > 0


def test_waits_are_counted_by_row(script):
    lengths = torch.tensor([[0, 1], [0, 0], [1, 0], [0, 0], [0, 1]])
    assert script("rows_study").longest_wait(lengths).tolist() == [2, 3]


def test_a_wrong_opinion_costs_only_rows_without_history(script, monkeypatch):
    rows = script("rows_study")
    monkeypatch.setattr(rows, "OPINIONS", (0.85, 0.0))
    monkeypatch.setattr(rows, "HISTORY_SCALES", {4: 256})
    right, wrong = (one["losses"] for one in rows.history(4, 15, 0))
    assert wrong["1"]["value"] > 0.3 > right["1"]["value"]
    later = "3 to 8"
    assert wrong[later]["value"] == pytest.approx(right[later]["value"], abs=0.02)


def test_a_report_of_rows_makes_the_tables(script, tmp_path, monkeypatch):
    rows, pages = script("rows_study"), script("question_pages")
    profile = save_profile(profile_of(StaircaseMachine()), tmp_path / "profile.json")
    for name, value in {"NUM_ROWS": 3, "SCALES": (16,), "HISTORY_ROWS": (1,), "HISTORY_ROUNDS": 3}.items():
        monkeypatch.setattr(rows, name, value)
    path = tmp_path / "rows.json"
    words = ["--profile", str(profile), "--profile-rows", "4", "--num-rounds", "4", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["rows_study.py", *words])
    rows.main()
    content = json.loads(path.read_text())
    monkeypatch.setattr(pages, "report", lambda name: content)
    monkeypatch.setattr(pages, "profile", lambda: profile_of(StaircaseMachine()))
    for name in ("starving", "history", "on-profile", "from-rows", "curve", "contexts", "draft-times"):
        assert len({line.count("|") for line in pages.TABLES[name]().splitlines()}) == 1, name
    assert [one["rows"] for one in content["on_profile"]] == [1, 2, 4]
    assert all(one["losses"]["full"]["value"] >= -1e-9 for one in content["on_profile"])
