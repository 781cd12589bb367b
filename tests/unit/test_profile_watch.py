"""The scheduler's watch over a profile: on a clock that tells, and for all calls together."""

import logging

import pytest
import torch
from throughput_machines import BLOCK_SIZE, StaircaseMachine, profile_of

from dspark_hf.decoding.policies.registry import policy_factory
from dspark_hf.decoding.scheduler import Scheduler
from dspark_hf.fitting.step_residuals import MIN_STEPS, residuals_of


@pytest.fixture
def profile():
    yield profile_of(StaircaseMachine())
    residuals_of.cache_clear()


def scheduler(profile, policy="block", **options):
    new_policy = policy_factory(policy, 0.5)
    return Scheduler(new_policy(), BLOCK_SIZE, profile, torch.device("cpu"), block_size=BLOCK_SIZE, **options)


def observe(schedulers, profile, factor):
    for one in schedulers:
        one.observe_step(2, 6, 10, factor * profile.step_s(2, 6, 10))


def test_slow_steps_are_warned_of_once_in_all_calls(profile, caplog):
    with caplog.at_level(logging.WARNING):
        observe([scheduler(profile, is_timed=True) for _ in range(MIN_STEPS - 1)], profile, 3.0)
        assert not caplog.records
        observe([scheduler(profile, is_timed=True) for _ in range(MIN_STEPS)], profile, 3.0)
    (record,) = caplog.records
    assert "3.00 times as long" in record.getMessage()


def test_nothing_is_said_where_the_clock_or_the_policy_tells_nothing(profile, caplog):
    for one in (scheduler(profile), scheduler(profile, "full", is_timed=True), scheduler(None, is_timed=True)):
        observe([one] * 2 * MIN_STEPS, profile, 3.0)
    assert not caplog.records
