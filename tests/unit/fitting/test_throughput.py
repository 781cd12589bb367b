"""Throughput profiles: what was measured comes back, between points it is linear, and the rest is refused."""

import itertools
import json
from collections import Counter

import pytest
import torch
from throughput_machines import BLOCK_SIZE, StaircaseMachine, profile_of

from dspark_hf import ThroughputProfile, ThroughputProfileError
from dspark_hf.fitting.measuring import ProfilePlan, num_measurements
from dspark_hf.fitting.profile_plot import plot_profile


@pytest.fixture(scope="module")
def profile():
    return profile_of(StaircaseMachine())


def with_steps(profile, steps_s):
    """The profile of one row and one context whose steps take `steps_s`, by repeats `[tokens, repeats]`."""

    class Recorded(StaircaseMachine):
        def step_s(self, tokens_per_row, context):
            return next(left[tokens_per_row - 1])

    left = [iter(samples) for samples in steps_s]
    return profile_of(Recorded(), num_rows=(1,), contexts=(10,), num_repeats=len(steps_s[0]))


# --- queries


def test_measured_points_come_back(profile):
    machine = StaircaseMachine()
    for num_rows, context in itertools.product((1, 2, 4), (10, 30)):
        machine.open(num_rows)
        for tokens in range(1, BLOCK_SIZE + 2):
            assert profile.step_s(num_rows, num_rows * tokens, context) == machine.step_s(tokens, context)
        assert profile.draft_s(num_rows, context) == machine.draft_s(context)
        assert profile.plain_step_s(num_rows, context) == machine.plain_step_s(context)
        assert profile.overhead_s(num_rows) == machine.overhead_s()


def test_between_points_seconds_are_linear(profile):
    # 4 rows, context 10: 1, 2, 3, 4 stairs of 1.1 ms at B = 4, 8, 12, 16
    assert profile.step_s(4, 7, 10) == pytest.approx(1.75 * 1.1e-3)
    assert profile.step_s(4, 12, 20) == pytest.approx(3 * 1.2e-3)
    # 3 rows, 2 tokens each: halfway between 2 rows (4 tokens, 1 stair) and 4 rows (8 tokens, 2 stairs)
    assert profile.step_s(3, 6, 10) == pytest.approx(1.5 * 1.1e-3)
    assert profile.draft_s(3, 20) == pytest.approx(3 * 1e-4 * 1.2)
    assert profile.overhead_s(3) == pytest.approx(6e-5)


def test_contexts_outside_are_those_at_the_edge(profile):
    for outside, edge in ((1, 10), (5000, 30)):
        assert profile.step_s(2, 6, outside) == profile.step_s(2, 6, edge)
        assert profile.draft_s(2, outside) == profile.draft_s(2, edge)


def test_costs_by_tokens_are_those_of_single_queries(profile):
    for num_rows in (1, 2, 3, 4):
        step_s, draft_s, slot_s = profile.step_costs(num_rows, 17)
        assert step_s.dtype == torch.float64
        assert step_s[1:].tolist() == [profile.step_s(num_rows, b, 17) for b in range(1, len(step_s))]
        assert len(step_s) == num_rows * (BLOCK_SIZE + 1) + 1
        assert draft_s == profile.draft_s(num_rows, 17)
        assert slot_s == pytest.approx(0.5 * draft_s / (BLOCK_SIZE - 1)), "half of a block is for its first slot"


def test_fewer_tokens_than_rows_cost_one_token_a_row(profile):
    assert profile.step_s(4, 1, 10) == profile.step_s(4, 4, 10)
    assert profile.step_s(4, 4, 10) < profile.step_s(4, 5, 10)


def test_one_number_of_rows_and_one_context_are_enough():
    profile = profile_of(StaircaseMachine(), num_rows=(2,), contexts=(10,))
    assert profile.step_s(2, 8, 999) == pytest.approx(2 * 1.1e-3)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (lambda p: p.step_s(5, 5, 10), "5 rows .*knows 1 to 4; renew .*dspark profile.* --batch-size 5"),
        (lambda p: p.step_costs(0, 10), "0 rows"),
        (lambda p: p.draft_s(64, 10), "64 rows"),
        (lambda p: p.plain_step_s(64, 10), "64 rows"),
        (lambda p: p.overhead_s(64), "64 rows"),
        (lambda p: p.step_s(2, 9, 10), "9 tokens for 2 rows .*1 to 8"),
        (lambda p: p.step_s(2, 0, 10), "0 tokens for 2 rows"),
    ],
)
def test_what_was_not_measured_is_refused(profile, query, message):
    with pytest.raises(ThroughputProfileError, match=message):
        query(profile)


def test_covers_says_what_is_refused(profile):
    covered = {(r, b) for r in range(7) for b in range(30) if profile.covers(r, b)}
    assert covered == {(r, b) for r in range(1, 5) for b in range(1, r * (BLOCK_SIZE + 1) + 1)}


# --- measuring


def test_every_point_is_measured_as_often_as_asked_in_changing_order():
    machine = StaircaseMachine()
    profile = profile_of(machine, num_repeats=3)
    plan = ProfilePlan((1, 2, 4), (10, 30), 3)
    counts = Counter(machine.calls)
    assert set(counts.values()) == {3}
    assert len(machine.calls) == num_measurements(plan, profile.grid) == 3 * 3 * (4 * 2 + 2 + 2 + 2 + 1)
    third = len(machine.calls) // 3
    rounds = [machine.calls[start : start + third] for start in range(0, len(machine.calls), third)]
    assert len({tuple(calls) for calls in rounds}) == 3
    assert len({tuple(sorted(calls)) for calls in rounds}) == 1


def test_the_order_follows_from_the_seed():
    orders = []
    for seed in (0, 0, 1):
        machine = StaircaseMachine()
        profile_of(machine, seed=seed)
        orders.append(machine.calls)
    assert orders[0] == orders[1] != orders[2]


def test_a_machine_that_slows_down_bends_no_curve():
    class Slowing(StaircaseMachine):
        """All steps take the same, and 1 % more with each."""

        def step_s(self, tokens_per_row, context):
            super().step_s(tokens_per_row, context)
            return 1.0 + 0.01 * len(self.calls)

    profile = profile_of(Slowing(), num_rows=(1,), contexts=(10,), num_repeats=200)
    median_s = profile.step.median_s[0, :, 0]
    spread_s = (profile.step.q3_s - profile.step.q1_s)[0, :, 0]
    assert float(median_s.max() - median_s.min()) < 0.05 * float(spread_s.min())


def test_timings_are_medians_and_quartiles(profile):
    timings = with_steps(profile, [[1.0, 2.0, 3.0, 4.0, 90.0], *[[1.0] * 5] * BLOCK_SIZE]).step
    numbers = [float(table[0, 0, 0]) for table in (timings.q1_s, timings.median_s, timings.q3_s)]
    assert numbers == [2.0, 3.0, 4.0]


def test_rises_and_jumps_are_counted(profile):
    noisy_rise = [[4.0, 5.0, 6.0], [3.9, 4.9, 5.9]]  # faster by less than the quartiles are apart
    clear_rise = [[2.0, 2.0, 2.0]]
    jump = [[7.0, 7.0, 7.0]]
    (shape,) = with_steps(profile, noisy_rise + clear_rise + jump).curve_shapes()
    assert (shape.num_steps, shape.num_rises, shape.num_clear_rises) == (3, 2, 1)
    assert (shape.largest_jump, shape.jump_at_num_tokens) == (3.5, 3)


def test_jumps_of_a_staircase(profile):
    shapes = {(shape.num_rows, shape.context): shape for shape in profile.curve_shapes()}
    assert len(shapes) == 6
    assert shapes[1, 10].largest_jump == 1.0  # B = 1 to 4 is one stair
    assert shapes[2, 30].largest_jump == 2.0
    assert shapes[2, 30].jump_at_num_tokens == 4
    assert all(shape.num_rises == 0 for shape in shapes.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_rows": ()}, r"num_rows .* one or more whole numbers >= 1, got \[\]"),
        ({"num_rows": (4, 0)}, r"num_rows .*>= 1.* got \[0, 4\]"),
        ({"contexts": (-1,)}, "contexts"),
        ({"num_repeats": 0}, "num_repeats must be >= 1, got 0"),
    ],
)
def test_plans_are_checked(arguments, message):
    with pytest.raises(ThroughputProfileError, match=message):
        ProfilePlan(**arguments)


def test_a_plan_sorts_its_points():
    plan = ProfilePlan((8, 1, 8), (512, 64))
    assert (plan.num_rows, plan.contexts) == ((1, 8), (64, 512))


# --- JSON and picture


def test_a_profile_survives_json(profile):
    text = json.dumps(profile.to_dict(), allow_nan=False)
    read = ThroughputProfile.from_dict(json.loads(text))
    assert json.dumps(read.to_dict()) == text
    assert read.fingerprint == profile.fingerprint
    assert read.step_s(3, 7, 22) == profile.step_s(3, 7, 22)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: c.pop("step"), "no 'step'"),
        (lambda c: c.update(format_version=99), "format_version is 99"),
        (lambda c: c["step"]["median_s"].pop(), r"step.median_s has the shape \(2, 4, 2\), and the grid \(3, 4, 2\)"),
        (lambda c: c["draft"].update(q1_s=[[1.0, None]] * 3), "no throughput profile"),
        (lambda c: c["overhead"].update(median_s=[1.0, -1.0, 1.0]), "overhead.median_s must be finite and above 0"),
        (lambda c: c["plain"].update(extra=[[1.0, 1.0]] * 3), "extra"),
        (lambda c: c["grid"].update(contexts=[30, 10]), "grid.contexts must be .* ascending"),
        (lambda c: c["grid"].update(tokens_per_row=[2, 3, 4, 5]), "grid.tokens_per_row must begin with 1"),
        (lambda c: c["grid"].pop("num_rows"), "num_rows"),
        (lambda c: c["fingerprint"].pop("device"), "device"),
        (lambda c: c.update(grid=[1]), "no throughput profile"),
        (lambda c: c.update(num_repeats=float("inf")), "infinity"),
        (lambda c: c["grid"].update(contexts=[10, float("inf")]), "infinity"),
        (lambda c: c["grid"].update(contexts=[10, 10**400]), "grid.contexts must be whole numbers from 1 to"),
        (lambda c: c["overhead"].update(median_s=[1.0, 10**400, 1.0]), "no throughput profile"),
        (lambda c: c["fingerprint"].update(versions=[]), "fingerprint.versions must be texts by name"),
        (lambda c: c["fingerprint"].update(versions={"torch": 2}), "fingerprint.versions must be texts by name"),
        (lambda c: c["fingerprint"].update(dtype=5), "fingerprint.dtype must be text"),
        (lambda c: c["fingerprint"].update(num_threads=[2]), "fingerprint.num_threads must be a whole number or null"),
    ],
)
def test_damaged_content_is_refused(profile, damage, message):
    content = json.loads(json.dumps(profile.to_dict()))
    damage(content)
    with pytest.raises(ThroughputProfileError, match=message) as caught:
        ThroughputProfile.from_dict(content)
    assert "make a new one with `dspark profile`" in str(caught.value)


@pytest.mark.parametrize("content", [None, [], "text", {}])
def test_other_json_is_refused(content):
    with pytest.raises(ThroughputProfileError, match="no throughput profile"):
        ThroughputProfile.from_dict(content)


def test_the_plot_is_written(profile, tmp_path):
    path = tmp_path / "sps.png"
    assert plot_profile(profile, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir()] == ["sps.png"]
