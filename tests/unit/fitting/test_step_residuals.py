"""The running check of a profile: past steps only, and one warning."""

import logging

import pytest
from throughput_machines import StaircaseMachine, profile_of

from dspark_hf.fitting.step_residuals import StepResiduals


@pytest.fixture(scope="module")
def profile():
    return profile_of(StaircaseMachine())


def observe(residuals, profile, factor, num_steps, num_rows=2):
    for _ in range(num_steps):
        residuals.observe(num_rows, 6, 10, factor * profile.step_s(num_rows, 6, 10))


def test_ratios_are_medians_of_the_latest_steps(profile):
    residuals = StepResiduals(profile, window_steps=5, min_steps=3)
    observe(residuals, profile, 1.5, 2)
    assert residuals.ratio is None
    observe(residuals, profile, 1.2, 3, num_rows=4)
    assert residuals.ratio == pytest.approx(1.2)
    assert residuals.ratios_by_rows == pytest.approx({2: 1.5, 4: 1.2})
    observe(residuals, profile, 0.9, 5)
    assert residuals.ratio == pytest.approx(0.9)
    assert residuals.ratios_by_rows == pytest.approx({2: 0.9})


@pytest.mark.parametrize("factor", [2.5, 0.3])
def test_a_profile_that_is_off_is_warned_of_once(profile, caplog, factor):
    residuals = StepResiduals(profile, min_steps=4)
    with caplog.at_level(logging.WARNING):
        observe(residuals, profile, factor, 3)
        assert not residuals.is_off
        observe(residuals, profile, factor, 20)
    assert residuals.is_off
    (record,) = caplog.records
    assert f"{factor:.2f} times as long" in record.getMessage()
    assert "dspark profile --target owner/target --drafter 'my drafter'" in record.getMessage()


def test_a_busy_machine_and_a_single_stall_are_not(profile, caplog):
    residuals = StepResiduals(profile, min_steps=4)
    observe(residuals, profile, 1.9, 20)
    observe(residuals, profile, 1000.0, 1)
    assert not residuals.is_off
    assert not caplog.records


def test_steps_that_say_nothing_are_passed_over(profile):
    residuals = StepResiduals(profile, min_steps=1)
    for num_rows, num_tokens, measured_s in [(64, 64, 9.0), (2, 99, 9.0), (2, 6, 0.0), (2, 6, float("nan"))]:
        residuals.observe(num_rows, num_tokens, 10, measured_s)
    assert residuals.ratio is None


def test_a_factor_that_always_warns_is_refused(profile):
    with pytest.raises(ValueError, match="warn_factor must be above 1, got 1.0"):
        StepResiduals(profile, warn_factor=1.0)
