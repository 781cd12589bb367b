"""Changes over time: harder traffic, and a confidence head that becomes wrong."""

import logging

import pytest
from simulated import setting, system

from dspark_hf.evaluation.simulation.bank import RoundBank
from dspark_hf.evaluation.simulation.machine import accelerator
from dspark_hf.evaluation.simulation.series import calibration_drift, hard_and_easy, study_seconds, traffic_shift
from dspark_hf.evaluation.simulation.workload import TrafficMix
from dspark_hf.evaluation.synthetic_traces import synthetic_traces

USERS = 64


@pytest.fixture(scope="module")
def place():
    rates = {"easy": [0.92, 0.9, 0.88], "hard": [0.55, 0.5, 0.5]}
    traces = synthetic_traces(rates, num_prompts=8, num_rounds=30, persistence=0.5, seed=0)
    return setting(RoundBank.of(traces), max_rows=USERS, on=accelerator(3))


def test_traffic_that_grows_hard_is_verified_less(place):
    assert hard_and_easy(place) == ("hard", "easy")
    end_s = study_seconds(place, USERS, 260)
    mix = TrafficMix({"easy": 1.0}, {"hard": 1.0}, 0.4 * end_s)
    prefix = traffic_shift(place, system("prefix"), USERS, mix, end_s, seed=0)
    fixed = traffic_shift(place, system("full"), USERS, mix, end_s, seed=0)
    early, late = (0.1 * end_s, 0.4 * end_s), (0.6 * end_s, end_s)
    for one in (prefix, fixed):
        assert one.mean("tau", *late) < one.mean("tau", *early) - 0.5
        assert one.mean("tokens_per_s", *late) < one.mean("tokens_per_s", *early)
    assert prefix.mean("budget", *late) < prefix.mean("budget", *early) - 0.3
    assert fixed.mean("budget", *late) == pytest.approx(4) == fixed.mean("budget", *early)


def test_drift_is_warned_of_and_a_new_calibration_mends_it(place, caplog):
    caplog.set_level(logging.WARNING)
    end_s = study_seconds(place, USERS, 260)
    drift_s = 0.3 * end_s
    found = {}
    for name, factor, mends in (("right", 1.0, True), ("drift", 6.0, False), ("mended", 6.0, True)):
        found[name] = calibration_drift(place, system("prefix"), USERS, factor, drift_s, end_s, seed=0, mends=mends)
    assert found["right"].warned_s is None and found["right"].refitted_s is None
    assert drift_s < found["drift"].warned_s and found["drift"].refitted_s is None
    mended = found["mended"]
    assert drift_s < mended.warned_s < mended.refitted_s < 0.8 * end_s
    assert caplog.text.count("has drifted") == 2
    first_bin = int(mended.refitted_s / mended.bin_s) + 1
    gaps = {name: sum(one.survival_gap[first_bin:]) / len(one.survival_gap[first_bin:]) for name, one in found.items()}
    assert abs(gaps["right"]) < 0.02 and gaps["drift"] > 0.1
    assert abs(gaps["mended"]) < 0.35 * gaps["drift"]
    assert found["drift"].mean("budget", mended.refitted_s, end_s) > found["right"].mean(
        "budget", mended.refitted_s, end_s
    )
