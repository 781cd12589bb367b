"""Generations in turns: what they say stays the same, and the time of each is its own."""

import time

import pytest
import torch
from batches import ragged
from tiny import greedy, random_ids, tiny_drafter, tiny_target

from dspark_hf.evaluation import interleave as module
from dspark_hf.evaluation.interleave import interleave, twin_of
from dspark_hf.fitting.step_residuals import StepResiduals


def test_twins_share_weights_and_nothing_else():
    target = tiny_target()
    twin = twin_of(target)
    shared = dict(target.named_parameters()) | dict(target.named_buffers())
    assert shared and all(mine is shared[name] for name, mine in (*twin.named_parameters(), *twin.named_buffers()))
    twin.config._attn_implementation = "eager"
    twin.register_forward_pre_hook(lambda *_: None)
    assert target.config._attn_implementation != "eager" and not target._forward_pre_hooks


@pytest.mark.parametrize("num_rows", [1, 3])
def test_each_way_says_what_it_says_alone(num_rows):
    target = tiny_target()
    inputs = ragged([5, 9, 3][:num_rows])
    options = {
        "plain": {},
        "static": {"cache_implementation": "static"},
        "full": {"assistant_model": tiny_drafter(target), "verification_policy": "full"},
        "other": {"assistant_model": tiny_drafter(target, seed=3), "num_assistant_tokens": 2},
    }
    alone = {name: greedy(target, **inputs, max_new_tokens=12, **more) for name, more in options.items()}
    before = target.config._attn_implementation
    turns = interleave(
        target,
        {
            name: lambda twin, more=more: greedy(twin, **inputs, max_new_tokens=12, **more)
            for name, more in options.items()
        },
    )
    assert all(torch.equal(turns[name].result, alone[name]) for name in options)
    assert turns["plain"].num_forwards == turns["static"].num_forwards == 12
    assert target.config._attn_implementation == before and not target._forward_pre_hooks


def test_seconds_are_of_a_ways_own_turns(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])

    def way(cost_s):
        def run(twin):
            ids = random_ids(4)
            for number in range(5):
                twin(ids)
                now[0] += cost_s * (10 if number == 0 else 1)

        return run

    turns = interleave(tiny_target(), {"quick": way(1.0), "slow": way(7.0)})
    assert (turns["quick"].seconds, turns["slow"].seconds) == (14.0, 98.0)
    assert (turns["quick"].first_turns_s, turns["slow"].first_turns_s) == (10.0, 70.0)


def test_ways_get_through_together():
    order = []

    def way(name, num_forwards):
        def run(twin):
            for _ in range(num_forwards):
                twin(random_ids(2))
                order.append(name)

        return run

    counts = {"long": 30, "short": 10}
    interleave(tiny_target(), {name: way(name, n) for name, n in counts.items()}, counts)
    middle = order[:20]
    assert abs(middle.count("short") - 5) <= 1
    order.clear()
    interleave(tiny_target(), {name: way(name, n) for name, n in counts.items()})  # control: as many each
    assert order[:20].count("short") == 10


def test_an_error_ends_all_and_leaves_nothing():
    target, unwound = tiny_target(), []

    def breaks(twin):
        twin(random_ids(2))
        raise ArithmeticError("mine")

    def waits(twin):
        try:
            greedy(twin, random_ids(3), max_new_tokens=50, assistant_model=tiny_drafter(target))
        finally:
            unwound.append(True)

    twins = {"waits": twin_of(target), "breaks": twin_of(target)}
    with pytest.raises(ArithmeticError, match="mine"):
        interleave(target, {"waits": waits, "breaks": breaks}, twins=twins)
    assert unwound and not any(twin._forward_pre_hooks for twin in twins.values())
    again = interleave(target, {"waits": lambda twin: greedy(twin, random_ids(3), max_new_tokens=4)})
    assert torch.equal(again["waits"].result, greedy(target, random_ids(3), max_new_tokens=4))
    assert torch.is_grad_enabled()


def test_steps_are_not_held_against_the_profile(monkeypatch):
    heard = []

    class Profile:
        def covers(self, *_):
            heard.append(True)
            return False

    residuals = StepResiduals(Profile())
    interleave(tiny_target(), {"only": lambda twin: residuals.observe(1, 1, 1, time.perf_counter())})
    assert not heard
    residuals.observe(1, 1, 1, 1.0)
    assert heard


@pytest.mark.parametrize(
    ("ways", "counts", "says"),
    [({}, None, "no ways"), ({"a": len}, {"b": 1}, "must be the same"), ({"a": len}, {"a": 0}, "1 or more")],
)
def test_refusals(ways, counts, says):
    with pytest.raises(ValueError, match=says):
        interleave(tiny_target(), ways, counts)
