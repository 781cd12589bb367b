"""The simulated server against formulas: rates, waiting, conservation, order, and one replay written out."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from simulated import GAMMA, TableTimes, bank, draft_s, machine, random_bank, setting, step_s, system
from throughput_machines import StaircaseMachine, profile_of

from dspark_hf.evaluation.simulation.bank import RoundBank
from dspark_hf.evaluation.simulation.machine import Machine, machine_of
from dspark_hf.evaluation.simulation.measures import measure
from dspark_hf.evaluation.simulation.systems import Plan, SchedulerPlanner
from dspark_hf.evaluation.simulation.workload import ClosedLoop, PoissonArrivals
from dspark_hf.fitting.profile_store import save_profile

ALL_SYSTEMS = ["plain", "mtp-1", "fixed-2", "full", "threshold", "prefix", "smoothed", "block", "lagged"]

# System, drafts verified, slots drafted.
FIXED = [("plain", 0, 0), ("mtp-1", 1, 1), ("fixed-2", 2, 2), ("full", GAMMA, GAMMA)]


def served_until(count):
    return lambda server: len(server.served) >= count


@pytest.mark.parametrize(("name", "length", "num_slots"), FIXED)
@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_a_lone_user_gets_tau_tokens_a_round(name, length, num_slots, accepted):
    kept = min(accepted, length)
    place = setting(bank([[accepted] * 4]), lengths=f"fixed:16,{12 * (kept + 1)}")
    run = place.closed(system(name), 1, seed=0, first=1, count=3)
    round_s = step_s(1 + length) + (draft_s(num_slots) if num_slots else 0.0)
    numbers = measure(run, 1, 3)
    assert numbers["user_tok_s_mean"] == pytest.approx((kept + 1) / round_s, rel=1e-12)
    assert numbers["throughput_tok_s"] == pytest.approx((kept + 1) / round_s, rel=1e-12)
    assert (numbers["budget"], numbers["tau"]) == (1 + length, 1 + kept)


@pytest.mark.parametrize(("name", "length", "num_slots"), FIXED)
@pytest.mark.parametrize("users", [2, 7])
def test_a_closed_loop_gives_rows_times_tau_a_round(name, length, num_slots, users):
    kept = min(2, length)
    place = setting(bank([[2] * 4]), lengths=f"fixed:16,{10 * (kept + 1)}")
    run = place.closed(system(name), users, seed=0, first=users, count=2 * users)
    round_s = step_s(users * (1 + length)) + (draft_s(num_slots) if num_slots else 0.0)
    numbers = measure(run, users, 2 * users)
    assert numbers["throughput_tok_s"] == pytest.approx(users * (kept + 1) / round_s, rel=1e-12)
    assert numbers["concurrency"] == pytest.approx(users)
    assert numbers["slowest_to_median"] == pytest.approx(1) and numbers["jain_index"] == pytest.approx(1)


class AlwaysPlainLoop(SchedulerPlanner):
    """A policy whose gate never opens."""

    def __init__(self):
        pass

    def plan(self, ids, confidence, context):
        return Plan(0, np.zeros(len(ids), dtype=np.int64))

    def observe(self, plan, num_accepted):
        pass


def profiled(tmp_path):
    """A setting on a measured machine, and the profile."""
    profile = profile_of(StaircaseMachine())
    on = machine_of(str(save_profile(profile, tmp_path / "mine.json")), GAMMA)
    return setting(bank([[0] * 4]), lengths="fixed:16,10", max_rows=2, on=replace(on, prefill_token_s=0.0)), profile


def test_plain_generation_costs_its_own_steps_and_a_closed_gate_those_of_the_drafters_loop(tmp_path):
    place, profile = profiled(tmp_path)
    loop_s = profile.step_s(2, 2, 16) + profile.overhead_s(2)
    plain_s = profile.plain_step_s(2, 16)
    assert abs(plain_s / loop_s - 1) > 0.1, "or the test could not tell"
    plain = place.server(system("plain"), ClosedLoop(2), seed=0).run(served_until(4))
    server = place.server(system("block"), ClosedLoop(2), seed=0)
    server._planner = AlwaysPlainLoop()
    gated = server.run(served_until(4))
    for run, step in ((plain, plain_s), (gated, loop_s)):
        assert {one.num_rows for one in run.rounds} == {2} and {one.num_slots for one in run.rounds} == {0}
        np.testing.assert_allclose([one.seconds for one in run.rounds], step)


def test_what_plain_steps_can_do_is_what_plain_generation_does(tmp_path):
    for place in (profiled(tmp_path)[0], setting(bank([[0] * 4]), lengths="fixed:16,10", max_rows=2)):
        numbers = measure(place.closed(system("plain"), 2, seed=0, first=2, count=8), 2, 8)
        assert place.plain_capacity() == pytest.approx(numbers["throughput_tok_s"])


def test_users_without_a_row_wait():
    place = setting(bank([[0] * 4]), lengths="fixed:16,10", max_rows=2)
    numbers = measure(place.closed(system("plain"), 6, seed=0, first=6, count=12), 6, 12)
    service_s = 10 * step_s(2)
    assert numbers["concurrency"] == pytest.approx(2)
    assert numbers["latency_s_mean"] == pytest.approx(3 * service_s), "two of six are served at a time"


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_waiting_is_that_of_one_server_with_fixed_service_times(load):
    """M/D/1: the mean wait is rho D / (2 (1 - rho)) (Pollaczek and Khinchine)."""
    place = setting(bank([[0]]), lengths="fixed:16,1", max_rows=1)
    service_s = step_s(1)
    waits = []
    for seed in range(8):
        server = place.server(system("plain"), PoissonArrivals(load / service_s, seed), seed=seed)
        run = server.run(served_until(600))
        waits.append(np.mean([one.admitted_s - one.request.issued_s for one in run.served[50:]]))
    expected = load * service_s / (2 * (1 - load))
    error = np.std(waits, ddof=1) / np.sqrt(len(waits))
    assert abs(np.mean(waits) - expected) < 4 * error
    assert error < 0.2 * expected, "or the test could not tell"


@pytest.mark.parametrize("name", ALL_SYSTEMS)
@pytest.mark.parametrize("layout", ["rounds", "positions"])
def test_every_token_is_delivered_once_and_events_are_in_order(name, layout):
    events = []
    place = setting(random_bank(layout=layout), max_rows=4)
    server = place.server(system(name), PoissonArrivals(40.0, 3), seed=3, on_event=events.append)
    run = server.run(served_until(25))
    by_request = {}
    for event in events:
        by_request.setdefault(event.request, []).append(event)
    for one in run.served:
        own = by_request[one.request.id]
        assert [event.time_s for event in own] == sorted(event.time_s for event in own)
        kinds = [kind for kind, _ in itertools.groupby(event.kind for event in own)]
        assert kinds == ["issued", "admitted", "started", "tokens", "finished"]
        delivered = [event for event in own if event.kind == "tokens"]
        indices = [i for event in delivered for i in range(event.first, event.first + event.num_tokens)]
        assert indices == list(range(one.request.answer_tokens))
        assert len(delivered) == one.num_rounds
    in_service = [event for event in events if event.kind != "issued"]
    assert [event.time_s for event in in_service] == sorted(event.time_s for event in in_service)
    assert sum(event.num_tokens for event in events) == sum(one.num_tokens for one in run.rounds)
    admitted = [event.request for event in events if event.kind == "admitted"]
    assert admitted == list(range(len(admitted))), "first come, first served"
    assert max(one.num_rows for one in run.rounds) == 4


@pytest.mark.parametrize("name", ["plain", "prefix"])
def test_seconds_of_rows_are_those_of_requests(name):
    place = setting(random_bank(), max_rows=5)
    server = place.server(system(name), ClosedLoop(5), seed=1)
    run = server.run(served_until(30))
    open_s = {i: run.issued_s[i] for i in range(len(run.issued_s))}
    end_s = server.now_s
    in_rows = sum(one.seconds * one.num_rows for one in run.rounds)
    of_requests = sum(one.finished_s - one.started_s for one in run.served)
    unfinished = sorted(set(open_s) - {one.request.id for one in run.served})
    of_requests += sum(end_s - open_s[i] for i in unfinished)  # in a closed loop nobody waits
    assert in_rows == pytest.approx(of_requests)


@pytest.mark.parametrize("name", ["full", "block", "lagged"])
def test_a_seed_decides_everything(name):
    place = setting(random_bank())
    runs = [place.closed(system(name), 6, seed=seed, first=6, count=10) for seed in (4, 4, 5)]
    assert runs[0].rounds == runs[1].rounds and runs[0].served == runs[1].served
    assert runs[0].rounds != runs[2].rounds


def test_requests_of_a_seed_are_the_same_for_all_systems():
    place = setting(random_bank())
    asked = []
    for name in ("plain", "full"):
        run = place.closed(system(name), 4, seed=7, first=4, count=12)
        by_id = sorted((one.request for one in run.served), key=lambda request: request.id)[:12]
        asked.append([(request.text, request.prompt_tokens, request.answer_tokens) for request in by_id])
    assert asked[0] == asked[1]


@pytest.mark.parametrize("layout", ["rounds", "positions"])
@pytest.mark.parametrize(("name", "length"), [("plain", 0), ("fixed-2", 2), ("full", GAMMA)])
def test_a_request_takes_the_rounds_that_its_text_takes(layout, name, length):
    """One text after the other, against a replay written out."""
    drafts = random_bank(layout=layout)
    place = setting(drafts, max_rows=1)
    run = place.closed(system(name), 1, seed=2, first=1, count=15)
    for one in run.served:
        begin, end = drafts.starts[one.request.text], drafts.starts[one.request.text + 1]
        own, left, place_now, num_rounds = drafts.num_accepted[begin:end], one.request.answer_tokens, 0, 0
        while left > 0:
            num_tokens = min(left, 1 + min(int(own[place_now % len(own)]), length))
            left -= num_tokens
            place_now += num_tokens if layout == "positions" else 1
            num_rounds += 1
        assert one.num_rounds == num_rounds


def test_prompts_hold_up_everybody():
    quick, slow = (
        setting(bank([[0]]), lengths="fixed:100,10", max_rows=2, on=machine(prefill_token_s=seconds))
        for seconds in (0.0, 0.001)
    )
    speeds = [
        measure(place.closed(system("plain"), 2, seed=0, first=2, count=8), 2, 8)["throughput_tok_s"]
        for place in (quick, slow)
    ]
    assert 1 / speeds[1] == pytest.approx(1 / speeds[0] + 0.001 * 100 / 10)


def test_policies_choose_what_the_paper_chooses():
    """Two requests, c = (.9, .5) and (.6, .6), SPS(2..6) = 1, .8, .55, .5, .3: one draft of the first (section 5)."""
    conditional = np.array([[0.9, 0.5], [0.6, 0.6]], dtype=np.float32)
    drafts = RoundBank(
        conditional, np.array([2, 2]), np.array([0, 1, 2]), ("a", "b"), np.array([4, 4]), np.array([1, 1]), "rounds"
    )
    views = []
    place = setting(drafts, on=Machine("table", "", TableTimes([1.0, 1.0, 0.8, 0.55, 0.5, 0.3], 2, 2)), max_rows=2)
    server = place.server(system("prefix"), ClosedLoop(2), seed=0, on_round=views.append)
    server.run(lambda one: len(one.served) >= 40)
    for view in views:
        first = view.confidence.conditional[:, 0].tolist()
        if first == [pytest.approx(0.9), pytest.approx(0.6)]:
            assert view.lengths.tolist() == [1, 0]
            break
    else:
        raise AssertionError("the two texts never met in this order")


def test_a_floor_keeps_rows_from_starving():
    sure, unsure = [[GAMMA] * 4], [[0] * 4]
    drafts = bank(sure + unsure, domains=["sure", "unsure"])
    conditional = drafts.conditional.copy()
    conditional[4:] = 0.02
    drafts = RoundBank(
        **{name: getattr(drafts, name) for name in RoundBank.__dataclass_fields__} | {"conditional": conditional}
    )
    place = setting(drafts, lengths="fixed:16,80")
    starved = {
        floor: measure(place.closed(system("prefix", min_drafts_every=floor), 8, seed=0, first=8, count=16), 8, 16)[
            "starved_share"
        ]
        for floor in (None, 4)
    }
    assert starved[None] > 0.2 and starved[4] == 0.0
