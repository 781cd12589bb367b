"""Acceptance traces: how a schedule steps through them, files, and traces of known acceptance."""

import json

import numpy as np
import pytest
import torch

from dspark_hf.decoding.calibrate import SlotCalibration
from dspark_hf.evaluation.settings import ComparisonError
from dspark_hf.evaluation.synthetic_traces import synthetic_traces
from dspark_hf.evaluation.traces import AcceptanceTraces, load_traces, prompt_trace, save_traces

LOGITS = [[0.0, 1.0], [2.0, -1.0], [0.5, 0.5], [0.1, 0.2]]
MAPS = SlotCalibration(torch.tensor([2.0, 0.5]), torch.tensor([0.0, 1.0]))


def traces_of(*layouts, calibration=None, **more):
    prompts = [
        prompt_trace(f"math/{i}", LOGITS, [2, 0, 1, 0], layout=layout, calibration=calibration, prompt_length=7)
        for i, layout in enumerate(layouts)
    ]
    return AcceptanceTraces(tuple(prompts), "greedy", calibration, **more)


def test_a_cut_draft_keeps_what_was_accepted_before_the_cut():
    one = traces_of("rounds").prompts[0]
    assert [one[0].kept(length) for length in range(4)] == [0, 1, 2, 2]
    assert one[0].survival == pytest.approx((0.5, 0.5 / (1 + np.exp(-1.0))))
    assert one[1].num_accepted == 0 and one[1].confidence_logits == (2.0, -1.0)


def test_recorded_rounds_follow_each_other_whatever_was_cut():
    one = traces_of("rounds").prompts[0]
    assert one.num_tokens == 4 + 3
    assert one.step(0, 2) == (1, 2, 3)
    assert one.step(0, 1) == (1, 1, 2)
    assert one.step(3, 0) == (4, 0, 1)


@pytest.mark.parametrize("length", [0, 1, 2])
def test_on_positions_every_schedule_commits_every_token_once(length):
    one = traces_of("positions").prompts[0]
    place, tokens, places = 0, 0, []
    while place < len(one):
        places.append(place)
        place, _, num_tokens = one.step(place, length)
        tokens += num_tokens
    assert tokens == one.num_tokens == 4
    assert places == {0: [0, 1, 2, 3], 1: [0, 2], 2: [0, 3]}[length]


def test_the_last_round_of_a_text_commits_what_is_left():
    one = prompt_trace("a/1", LOGITS[:3], [0, 2, 1], layout="positions")
    assert one.step(1, 2) == (3, 2, 2)  # two tokens are left, and both were drafted
    assert one.step(2, 2) == (3, 1, 1)


def test_traces_go_to_a_file_and_back(tmp_path):
    path = tmp_path / "traces.jsonl"
    written = traces_of("positions", "positions", calibration=MAPS, source={"target": "a target"})
    save_traces(path, written)
    read = load_traces(path)
    assert (read.mode, read.layout, read.num_slots, read.source) == ("greedy", "positions", 2, {"target": "a target"})
    for one, other in zip(written.prompts, read.prompts, strict=True):
        assert (one.id, one.domain, one.prompt_length) == (other.id, other.domain, other.prompt_length)
        for name in ("confidence_logits", "conditional", "survival", "num_accepted"):
            np.testing.assert_allclose(getattr(one, name), getattr(other, name), atol=1e-5)
    assert not list(tmp_path.glob(".*"))


def test_a_calibration_changes_what_policies_see_and_not_what_was_accepted():
    raw = traces_of("rounds")
    mapped = raw.with_calibration(MAPS)
    first = 1 / (1 + np.exp(-np.array([0.0 * 2, 1.0 * 0.5 + 1.0])))
    np.testing.assert_allclose(mapped.prompts[0].conditional[0], first, rtol=1e-6)
    np.testing.assert_allclose(mapped.prompts[0].survival[0], first.cumprod(), rtol=1e-6)
    assert (mapped.prompts[0].num_accepted == raw.prompts[0].num_accepted).all()
    np.testing.assert_array_equal(mapped.with_calibration(None).prompts[0].survival, raw.prompts[0].survival)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"confidence_logits": [[0.0, float("nan")]]}, "finite"),
        ({"num_accepted": [1, 2]}, "as many"),
        ({"num_accepted": [3]}, "0 to 2, got 3"),
        ({"confidence_logits": [], "num_accepted": []}, "places, slots"),
    ],
)
def test_traces_that_cannot_be_are_refused(changes, what):
    with pytest.raises(ComparisonError, match=what):
        prompt_trace("a/1", **({"confidence_logits": [[0.0, 1.0]], "num_accepted": [1], "layout": "rounds"} | changes))


def test_prompts_of_two_kinds_are_refused():
    with pytest.raises(ComparisonError, match="one layout"):
        traces_of("rounds", "positions")


@pytest.mark.parametrize("damage", ["{}", "no JSON", '{"kind": "traces", "format_version": 99}', ""])
def test_other_files_are_refused_with_the_way_out(tmp_path, damage):
    path = tmp_path / "traces.jsonl"
    path.write_text(damage)
    with pytest.raises(ComparisonError, match="dspark traces"):
        load_traces(path)
    with pytest.raises(ComparisonError, match="dspark traces"):
        load_traces(tmp_path / "absent.jsonl")


def test_a_damaged_line_is_refused(tmp_path):
    path = tmp_path / "traces.jsonl"
    save_traces(path, traces_of("rounds"))
    header, line = path.read_text().splitlines()
    path.write_text(f"{header}\n{json.dumps(json.loads(line) | {'num_accepted': [9, 0, 0, 0]})}\n")
    with pytest.raises(ComparisonError, match="0 to 2, got 0 to 9"):
        load_traces(path)


# -- known acceptance ---------------------------------------------------------------------------------------------

RATES = {"math": [0.9, 0.8, 0.7], "chat": [0.6, 0.5, 0.5]}


def synthetic(**changes):
    return synthetic_traces(RATES, **({"num_prompts": 40, "num_rounds": 250, "seed": 1} | changes))


@pytest.mark.parametrize("persistence", [0.0, 0.8])
def test_synthetic_slots_are_accepted_at_their_rates(persistence):
    traces = synthetic(persistence=persistence)
    for domain, rates in RATES.items():
        accepted = np.concatenate([p.num_accepted for p in traces.prompts if p.domain == domain])
        for k, rate in enumerate(rates):
            reached = accepted >= k
            # Persistence makes rounds of a prompt alike: the effective number is smaller by (1 + rho) / (1 - rho).
            n = reached.sum() * (1 - persistence) / (1 + persistence)
            assert (accepted[reached] > k).mean() == pytest.approx(rate, abs=4 * np.sqrt(rate * (1 - rate) / n))


def test_synthetic_confidences_are_calibrated_unless_they_are_told_not_to_be():
    calibrated, wrong = synthetic(), synthetic(logit_scale=2.0, logit_shift=1.0)
    for traces, holds in ((calibrated, True), (wrong, False)):
        survival = np.concatenate([p.survival for p in traces.prompts])
        accepted = np.concatenate([p.num_accepted for p in traces.prompts])
        distance = [abs(survival[:, k].mean() - (accepted > k).mean()) for k in range(3)]
        assert bool(max(distance) < 0.02) is holds
    unscaled = wrong.with_calibration(SlotCalibration(torch.full((3,), 0.5), torch.full((3,), -0.5)))
    for one, other in zip(unscaled.prompts, calibrated.prompts, strict=True):
        np.testing.assert_allclose(one.survival, other.survival, atol=1e-4)


def test_persistence_is_the_correlation_of_neighbouring_rounds():
    for persistence in (0.0, 0.7):
        traces = synthetic(persistence=persistence, num_prompts=20, num_rounds=500)
        pairs = np.concatenate(
            [np.stack([p.conditional[:-1, 0], p.conditional[1:, 0]]) for p in traces.prompts[:20]], 1
        )
        assert np.corrcoef(pairs)[0, 1] == pytest.approx(persistence, abs=0.05)


def test_the_seed_decides():
    assert (synthetic().prompts[3].num_accepted == synthetic().prompts[3].num_accepted).all()
    assert (synthetic().prompts[3].num_accepted != synthetic(seed=2).prompts[3].num_accepted).any()


def test_halves_share_no_prompt_and_each_domain_is_in_both():
    traces = synthetic(num_rounds=2)
    first, second = traces.halves(seed=3)
    ids = [{p.id for p in part.prompts} for part in (first, second)]
    assert not ids[0] & ids[1] and len(ids[0] | ids[1]) == len(traces.prompts)
    assert first.domains == second.domains == ("chat", "math")
    with pytest.raises(ComparisonError, match="record more"):
        traces.select(lambda prompt: prompt.id == "chat/0").halves(seed=0)


@pytest.mark.parametrize(
    "changes", [{"num_prompts": 0}, {"num_rounds": 0}, {"persistence": 1.0}, {"concentration": 0.0}]
)
def test_values_outside_their_rules_are_refused(changes):
    with pytest.raises(ComparisonError, match=next(iter(changes))):
        synthetic(**changes)
    with pytest.raises(ComparisonError, match="rates"):
        synthetic_traces({"a": [0.5, 1.0]}, num_prompts=1, num_rounds=1, seed=0)
