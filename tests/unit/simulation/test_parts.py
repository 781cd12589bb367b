"""Traffic, machines, intervals and comparisons of a simulation, each against what is known of it."""

import json
import math

import numpy as np
import pytest
from simulated import bank, random_bank, system
from throughput_machines import StaircaseMachine, profile_of

from dspark_hf import ThroughputProfileError
from dspark_hf.evaluation.settings import ComparisonError
from dspark_hf.evaluation.simulation import SimulationRequest
from dspark_hf.evaluation.simulation.bank import RoundBank, same_texts
from dspark_hf.evaluation.simulation.loads import LoadPoint, gain_at_load, gain_at_throughput, gain_at_user_speed
from dspark_hf.evaluation.simulation.machine import STAIR_TOKENS, accelerator, machine_of, staircase
from dspark_hf.evaluation.simulation.measures import at_matched, over_seeds, ratio_over_seeds
from dspark_hf.evaluation.simulation.paper import fitted_round, paper_models
from dspark_hf.evaluation.simulation.setting import setting_of
from dspark_hf.evaluation.simulation.workload import (
    ClosedLoop,
    LengthLaw,
    PoissonArrivals,
    RequestStream,
    TrafficMix,
)
from dspark_hf.evaluation.synthetic_traces import synthetic_traces
from dspark_hf.fitting.profile_store import save_profile

# -- traffic ----------------------------------------------------------------------------------------------------------


def test_poisson_arrivals_come_at_their_rate_and_without_memory():
    arrivals = PoissonArrivals(5.0, 1)
    times = []
    for _ in range(20_000):
        times.append(arrivals.due_s())
        arrivals.take()
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.2, rel=4 / math.sqrt(len(gaps)))
    assert gaps.std() == pytest.approx(0.2, rel=0.05), "as spread as an exponential law"
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 4 / math.sqrt(len(gaps))


def test_users_of_a_closed_loop_ask_again_when_answered():
    arrivals = ClosedLoop(2)
    arrivals.take()
    arrivals.take()
    assert arrivals.due_s() is None
    arrivals.finished(3.5)
    assert arrivals.due_s() == 3.5


def test_a_mix_is_asked_for_in_its_shares_and_changes_in_time():
    drafts = bank([[1], [2], [3]], domains=["a", "b", "b"])
    stream = RequestStream(drafts, TrafficMix({"a": 3.0, "b": 1.0}, {"b": 1.0}, shift_s=10.0), LengthLaw(), seed=0)
    before = [drafts.domains[stream.next(1.0).text] for _ in range(2000)]
    assert before.count("a") == pytest.approx(1500, abs=4 * math.sqrt(2000 * 0.75 * 0.25))
    assert {drafts.domains[stream.next(10.0).text] for _ in range(50)} == {"b"}


def test_lengths_follow_their_law():
    drafts = random_bank()
    for text, expected in (("traces", None), ("fixed:7,9", (7, 9))):
        stream = RequestStream(drafts, TrafficMix.even(drafts), LengthLaw.parse(text), seed=0)
        for _ in range(20):
            request = stream.next(0.0)
            own = int(drafts.prompt_tokens[request.text]), int(drafts.answer_tokens[request.text])
            assert (request.prompt_tokens, request.answer_tokens) == (expected or own)
    stream = RequestStream(drafts, TrafficMix.even(drafts), LengthLaw.parse("geometric:7,20"), seed=0)
    answers = [stream.next(0.0).answer_tokens for _ in range(4000)]
    assert np.mean(answers) == pytest.approx(20, abs=4 * math.sqrt(380 / 4000)) and min(answers) == 1


@pytest.mark.parametrize("text", ["long", "fixed:1", "fixed:0,5", "geometric:3,-1", "traces:4,4", "fixed:1,2,3"])
def test_unknown_lengths_are_refused(text):
    with pytest.raises(ComparisonError, match=r"lengths must|need 1 token"):
        LengthLaw.parse(text)


@pytest.mark.parametrize("weights", [{"c": 1.0}, {}, {"a": 0.0}, {"a": 1.0, "b": -1.0}])
def test_a_mix_of_unknown_domains_is_refused(weights):
    with pytest.raises(ComparisonError, match="domains that were recorded, a, b"):
        RequestStream(bank([[1], [2]], domains=["a", "b"]), TrafficMix(weights), LengthLaw(), seed=0)


def test_another_drafters_traces_must_be_of_the_same_texts():
    drafts = bank([[1, 2], [2]])
    other = bank([[1], [1, 0]])
    assert same_texts(drafts, other).answer_tokens.tolist() == drafts.answer_tokens.tolist()
    with pytest.raises(ComparisonError, match="the same prompts in the same order"):
        same_texts(drafts, bank([[1]]))


def test_a_bank_is_its_traces():
    traces = synthetic_traces({"a": [0.7, 0.6], "b": [0.9, 0.8]}, num_prompts=3, num_rounds=5, seed=0)
    drafts = RoundBank.of(traces)
    assert drafts.domains == ("a",) * 3 + ("b",) * 3
    for i, prompt in enumerate(traces.prompts):
        own = slice(drafts.starts[i], drafts.starts[i + 1])
        np.testing.assert_allclose(drafts.survival[own], prompt.survival, rtol=1e-6)
        inside = abs(prompt.confidence_logits) < 6  # beyond, float32 probabilities have lost digits
        np.testing.assert_allclose(drafts.logits[own][inside], prompt.confidence_logits[inside], atol=1e-4)
        assert drafts.answer_tokens[i] == prompt.num_tokens
    assert drafts.first_slots(1).num_accepted.max() == 1


# -- machines ---------------------------------------------------------------------------------------------------------


def test_the_accelerator_has_the_shape_of_the_papers_curve():
    """MTP-1 alone, by formula: as the paper's curve between 16 and 300 requests, up to one factor."""
    machine, flash = accelerator(5), paper_models()[0]
    curve = [(users, speed) for users, speed in flash.throughput["mtp-1"] if 16 < users < 300]
    ratios = []
    for users, speed in curve:
        costs = machine.costs(round(users), 256)
        ratios.append(users / (costs.without_slots(4).round_seconds(round(2 * users))) / speed)
    assert len(curve) >= 8
    assert max(ratios) / min(ratios) < 1.03
    assert 400 < fitted_round("V4-Flash").tokens_per_base < 700
    assert 200 < fitted_round("V4-Pro").tokens_per_base < 400


def test_a_staircase_rises_at_its_edges_only():
    costs = staircase(5).costs(100, 0)
    rises = [b for b in range(2, len(costs.seconds)) if costs.seconds[b] > costs.seconds[b - 1]]
    assert rises == list(range(STAIR_TOKENS + 1, len(costs.seconds), STAIR_TOKENS))


def test_a_profile_is_asked_as_it_answers(tmp_path):
    profile = profile_of(StaircaseMachine())
    path = save_profile(profile, tmp_path / "mine.json")
    machine = machine_of(str(path), 3)
    assert (machine.max_rows, machine.block_size) == (4, 3)
    for num_rows, context in ((1, 16), (3, 32), (4, 16)):
        costs = machine.costs(num_rows, context)
        for num_tokens in range(num_rows, 4 * num_rows + 1):
            expected = profile.step_s(num_rows, num_tokens, context)
            assert costs.seconds[num_tokens] == pytest.approx(expected)
        assert costs.draft_s == pytest.approx(profile.draft_s(num_rows, context))
    assert machine.prefill_token_s == pytest.approx(profile.step_s(4, 16, 10) / 16)


def test_machines_that_do_not_exist_are_refused(tmp_path):
    with pytest.raises(ComparisonError, match="dspark profile --json"):
        machine_of("h200", 5)
    (tmp_path / "bad.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(ThroughputProfileError, match="no throughput profile"):
        machine_of(str(tmp_path / "bad.json"), 5)


def test_a_profile_of_shorter_blocks_is_refused(tmp_path):
    path = save_profile(profile_of(StaircaseMachine()), tmp_path / "mine.json")
    traces = synthetic_traces({"a": [0.7] * 5}, num_prompts=1, num_rounds=5, seed=0)
    request = SimulationRequest(tmp_path, machines=(str(path),))
    with pytest.raises(ComparisonError, match="up to 3 drafts, and traces have 5"):
        setting_of(str(path), RoundBank.of(traces), None, request)


def test_more_drafts_than_recorded_are_refused():
    with pytest.raises(ComparisonError, match="fixed-9 needs blocks of 9 drafts"):
        system("fixed-9").planner(accelerator(5), 5)


@pytest.mark.parametrize("name", ["mtp", "fixed-0", "fixed-", "hindsight"])
def test_unknown_systems_are_refused(name):
    with pytest.raises(ComparisonError, match="systems must be plain"):
        system(name)


@pytest.mark.parametrize(
    "changes",
    [
        {"machines": ()},
        {"systems": ("full", "full")},
        {"concurrency": (0,)},
        {"concurrency": ()},
        {"loads": (0.0,)},
        {"max_rows": 0},
        {"prefill_token_ms": -1.0},
        {"min_drafts_every": 0},
        {"odds_factor": 0.0},
        {"num_requests": 1},
        {"study_rounds": 39},
        {"num_seeds": 0},
        {"seed": -1},
    ],
)
def test_requests_that_make_no_sense_are_refused(tmp_path, changes):
    with pytest.raises(ComparisonError, match=f"{next(iter(changes))} must be"):
        SimulationRequest(tmp_path, **changes)


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_intervals_over_seeds_cover_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(0)
    found = [over_seeds(rng.normal(3.0, 1.0, size=4).tolist()) for _ in range(1000)]
    covered = sum(one.low <= 3.0 <= one.high for one in found)
    assert 925 <= covered <= 975
    assert over_seeds([2.0]).low is None and over_seeds([2.0]).value == 2.0


def test_ratios_compare_runs_of_one_seed():
    estimate = ratio_over_seeds([2.0, 20.0, 200.0], [1.0, 10.0, 100.0])
    assert (estimate.value, estimate.low, estimate.high) == (pytest.approx(2), pytest.approx(2), pytest.approx(2))


def test_curves_are_read_between_their_points_only():
    assert at_matched([100.0, 1.0], [10.0, 1.0], 10.0) == pytest.approx(math.sqrt(10))
    assert at_matched([1.0, 100.0], [1.0, 10.0], 101.0) is None


def test_gains_on_curves_that_are_known():
    """Speed of a user `a / (1 + users / 10)`; the better system has twice the `a`."""
    points = []
    for users in (1.0, 4.0, 16.0, 64.0, 256.0):
        for name, a in (("mtp-1", 1.0), ("ours", 2.0)):
            speed = a / (1 + users / 10)
            numbers = {"user_tok_s_mean": [speed] * 2, "throughput_tok_s": [users * speed] * 2}
            points.append(LoadPoint(name, users, None, numbers))
    assert gain_at_load(points, "ours", "mtp-1", 16.0).value == pytest.approx(2)
    # As much of all together with u users: 2 u / (1 + u / 10) = t; its users get 2 / (1 + u / 10) = 2 - t / 10.
    t = 16 / 2.6
    assert gain_at_throughput(points, "ours", "mtp-1", 16.0).value == pytest.approx((2 - t / 10) * 2.6, rel=0.05)
    # As quick: 1 + u / 10 = 2 * 2.6, so u = 42 users.
    assert gain_at_user_speed(points, "ours", "mtp-1", 16.0).value == pytest.approx(42 / 16, rel=0.05)
    assert gain_at_throughput(points, "ours", "mtp-1", 1.0) is None, "less than the better system gives one user"
