"""Lanes take turns: one at a time, the one that is behind goes on, and a race can be ended."""

import threading
import time

import pytest

from dspark_hf.demo.turns import RaceStopped, Turns


def run_lanes(turns, steps_s):
    """Lanes whose steps take so many seconds; what ran, in order, and whether two ever ran at once."""
    order, running, overlaps = [], set(), []

    def lane(number):
        try:
            turns.begin(number)
            for step_s in steps_s[number]:
                running.add(number)
                time.sleep(step_s)
                overlaps.append(len(running))
                running.discard(number)
                order.append(number)
                turns.pass_on(number)
        except RaceStopped:
            order.append(("stopped", number))
        finally:
            turns.end(number)

    threads = [threading.Thread(target=lane, args=(i,)) for i in range(len(steps_s))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()
    return order, max(overlaps, default=0)


def test_never_two_at_once_and_equal_seconds_for_each():
    turns = Turns(2, lambda: False, slice_s=0.02)
    order, most_at_once = run_lanes(turns, [[0.01] * 12, [0.005] * 24])
    assert most_at_once == 1
    assert order.count(0) == 12 and order.count(1) == 24
    # Neither is ever ahead by more than a slice and a step: at each change the seconds are close.
    seconds = [0.0, 0.0]
    for number in order[:30]:
        seconds[number] += (0.01, 0.005)[number]
        assert abs(seconds[0] - seconds[1]) < 0.06


@pytest.mark.parametrize("first", [0, 1])
def test_the_first_lane_begins(first):
    turns = Turns(2, lambda: False, first=first, slice_s=10.0)
    order, _ = run_lanes(turns, [[0.001] * 2] * 2)
    assert order == [first] * 2 + [1 - first] * 2


def test_seconds_of_a_lane_are_its_own():
    now = [0.0]
    turns = Turns(2, lambda: False, slice_s=1.0, clock=lambda: now[0])
    turns.begin(0)
    now[0] += 0.75
    assert turns.mark(0) == 0.75
    assert turns.pass_on(0) is False  # ahead by less than a slice
    now[0] += 0.5
    other = []

    def second():
        turns.begin(1)
        now[0] += 5.0
        other.append(turns.end(1))

    thread = threading.Thread(target=second)
    thread.start()
    assert turns.pass_on(0) is True
    thread.join(timeout=10)
    now[0] += 0.25
    assert (turns.end(0), other) == (1.5, [5.0])
    now[0] += 9.0
    assert turns.end(0) == 1.5  # ended before


def test_a_cancelled_race_ends_in_every_lane_between_two_steps():
    cancelled = threading.Event()
    turns = Turns(2, cancelled.is_set, slice_s=0.0)
    timer = threading.Timer(0.05, cancelled.set)
    timer.start()
    order, _ = run_lanes(turns, [[0.005] * 1000] * 2)
    timer.join()
    assert {entry for entry in order if isinstance(entry, tuple)} == {("stopped", 0), ("stopped", 1)}
    assert len(order) < 100


def test_a_lane_that_fails_ends_the_others():
    turns = Turns(2, lambda: False, slice_s=0.0)
    turns.begin(0)
    turns.fail()
    with pytest.raises(RaceStopped):
        turns.pass_on(0)
    turns.end(0)
    with pytest.raises(RaceStopped):
        turns.begin(1)
