"""Replays of schedules: books against a slow reference, closed forms, and that nobody looks ahead but the controls."""

import numpy as np
import pytest
import torch

from dspark_hf.decoding.policies.block import BlockPolicy
from dspark_hf.decoding.policies.facts import StepCosts
from dspark_hf.decoding.policies.goodput import GoodputPolicy
from dspark_hf.decoding.policies.lagged import LaggedPolicy
from dspark_hf.decoding.policies.prefix import PrefixPolicy, SmoothedPolicy
from dspark_hf.decoding.policies.simple import FullPolicy, SurvivalPolicy
from dspark_hf.evaluation import schedules
from dspark_hf.evaluation.hindsight import HindsightPolicy
from dspark_hf.evaluation.lookahead import check_lookahead
from dspark_hf.evaluation.machines import machines_for, staircase
from dspark_hf.evaluation.schedules import (
    GeneratedSchedule,
    GoodputSchedule,
    PolicySchedule,
    StaticSchedule,
    fixed,
    survival_threshold,
)
from dspark_hf.evaluation.settings import ComparisonError
from dspark_hf.evaluation.synthetic_traces import synthetic_traces
from dspark_hf.evaluation.trace_replay import FlatTraces, deal, replay
from dspark_hf.evaluation.traces import AcceptanceTraces, prompt_trace

SLOTS = 3
RATES = {"math": [0.9, 0.85, 0.8], "chat": [0.6, 0.5, 0.5]}


def synthetic(**changes):
    return FlatTraces.of(synthetic_traces(RATES, **({"num_prompts": 6, "num_rounds": 30, "seed": 1} | changes)))


def by_position(num_prompts=5, num_tokens=40, seed=0):
    rng = np.random.default_rng(seed)
    prompts = tuple(
        prompt_trace(
            f"a/{i}",
            rng.normal(size=(num_tokens + i, SLOTS)),
            rng.integers(0, SLOTS + 1, size=num_tokens + i),
            layout="positions",
        )
        for i in range(num_prompts)
    )
    return FlatTraces.of(AcceptanceTraces(prompts, "greedy"))


def stair_costs(num_rows, width=4, scale=16, **more):
    return StepCosts.of([1 + width * -(-b // width) / scale for b in range(num_rows * (1 + SLOTS) + 1)], **more)


def slowly(traces, load, length_at, num_slots):
    """The same books with dicts and single rows."""
    num_texts = len(load.prompts)
    waiting = list(range(load.num_rows, 100 * num_texts))
    rows = [{"text": i, "place": int(load.starts[i]), "wait": 0} for i in range(load.num_rows)]
    books = {
        i: {"first": 0, "tokens": 0, "drafts": 0, "accepted": 0, "starved": 0, "wait": 0} for i in range(num_texts)
    }
    verified, number = [], 0
    while any("last" not in book for book in books.values()):
        total = 0
        for row in rows:
            length = length_at[row["place"]]
            accepted = min(int(traces.num_accepted[row["place"]]), length)
            limit = int(load.limits[row["text"] % num_texts])
            following = min(row["place"] + accepted + 1, limit) if traces.is_by_position else row["place"] + 1
            total += 1 + length
            row["wait"] = 0 if length else row["wait"] + 1
            book = books.get(row["text"])
            if book is not None:
                book["tokens"] += following - row["place"] if traces.is_by_position else accepted + 1
                book["drafts"] += length
                book["accepted"] += accepted
                book["starved"] += length == 0
                book["wait"] = max(book["wait"], row["wait"])
            row["place"] = following
        verified.append(total)
        number += 1
        for row in rows:
            if row["place"] >= int(load.ends[row["text"] % num_texts]):
                if row["text"] < num_texts:
                    books[row["text"]]["last"] = number - 1
                text = waiting.pop(0)
                row.update(text=text, place=int(load.starts[text % num_texts]), wait=0)
                if text < num_texts:
                    books[text]["first"] = number
    return verified, books


@pytest.mark.parametrize("num_rows", [1, 3, 8])
@pytest.mark.parametrize("traces", [synthetic(), by_position()], ids=["rounds", "positions"])
def test_books_are_those_of_a_slow_reference(traces, num_rows):
    load = deal(traces, num_rows, max_rounds=40, seed=2)
    lengths = np.random.default_rng(3).integers(0, SLOTS + 1, size=len(traces.num_accepted))
    log = replay(traces, load, StaticSchedule(lengths, SLOTS))
    verified, books = slowly(traces, load, lengths.tolist(), SLOTS)
    assert log.num_verified.tolist() == verified
    for name, key in (
        ("first", "first"), ("last", "last"), ("tokens", "tokens"), ("drafts", "drafts"), ("accepted", "accepted"),
        ("starved", "starved"), ("longest_wait", "wait"),
    ):  # fmt: skip
        assert getattr(log, name).tolist() == [book[key] for book in books.values()], name


def test_every_text_is_committed_once_under_every_schedule():
    traces = by_position()
    load = deal(traces, 4, max_rounds=1000, seed=0)
    for length in range(SLOTS + 1):
        assert (replay(traces, load, fixed(traces, length)).tokens == load.ends - load.starts).all()


def test_a_round_goes_beyond_a_piece_and_not_beyond_its_prompt():
    """Else the last round of each piece would commit less than it did, and short pieces would look slow."""
    one = prompt_trace("a/0", np.zeros((60, SLOTS)), np.full(60, 2), layout="positions")
    traces = FlatTraces.of(AcceptanceTraces((one,), "greedy"))
    load = deal(traces, 1, max_rounds=6, seed=1)
    assert (load.ends - load.starts < 30).all() and (load.limits == 60).all()
    log = replay(traces, load, fixed(traces, SLOTS))
    left = load.limits - load.starts
    np.testing.assert_array_equal(log.tokens, np.minimum(log.rounds * 3, left))
    assert (log.tokens > load.ends - load.starts).any()


def test_a_queue_holds_each_prompt_equally_often_and_pieces_lie_inside_them():
    traces = by_position()
    load = deal(traces, 9, max_rounds=10, seed=4)
    assert np.bincount(load.prompts).tolist() == [4] * 5  # 20 texts for 9 rows
    assert (load.starts >= traces.starts[load.prompts]).all() and (load.ends <= traces.ends[load.prompts]).all()
    assert len(set((load.ends - load.starts).tolist())) == 1 and len(set(load.starts.tolist())) > 5
    again, other = deal(traces, 9, max_rounds=10, seed=4), deal(traces, 9, max_rounds=10, seed=5)
    assert (again.starts == load.starts).all() and (other.starts != load.starts).any()
    whole = deal(traces, 9, max_rounds=10_000, seed=4)
    assert (whole.ends - whole.starts == (traces.ends - traces.starts)[whole.prompts]).all()
    with pytest.raises(ComparisonError, match="rows"):
        deal(traces, 0, max_rounds=10, seed=0)


def test_theta_of_constant_acceptance_is_the_formula():
    one = prompt_trace("a/0", np.zeros((50, SLOTS)), np.full(50, 2), layout="rounds")
    other = prompt_trace("a/1", np.zeros((20, SLOTS)), np.full(20, 2), layout="rounds")
    traces = FlatTraces.of(AcceptanceTraces((one, other), "greedy"))
    costs = stair_costs(4, draft_s=0.5, overhead_s=0.25, slot_s=0.1)
    load = deal(traces, 4, max_rounds=1000, seed=0)
    for length in range(SLOTS + 1):
        log = replay(traces, load, fixed(traces, length))
        spent = costs.seconds[4 * (1 + length)] + 0.25 + (0.5 - (SLOTS - length) * 0.1 if length else 0.0)
        theta = 4 * (1 + min(2, length)) / spent
        by_text = log.tokens / log.text_seconds(costs)
        np.testing.assert_allclose(by_text, theta / 1.0)
    for text in range(len(load.prompts)):
        shares = log.seconds(costs)[log.first[text] : log.last[text] + 1] / 4
        assert log.text_seconds(costs)[text] == pytest.approx(shares.sum())


# -- schedules ------------------------------------------------------------------------------------------------------


def same_books(one, other):
    for name in ("num_verified", "num_slots", "tokens", "drafts", "accepted", "first", "last"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


@pytest.mark.parametrize("traces", [synthetic(), by_position()], ids=["rounds", "positions"])
def test_static_schedules_are_the_policies_of_that_name(traces):
    load, costs = deal(traces, 3, max_rounds=60, seed=0), stair_costs(3)
    same_books(
        replay(traces, load, fixed(traces, SLOTS)), replay(traces, load, PolicySchedule(FullPolicy(), traces, costs, 3))
    )
    for threshold in (0.0, 0.3, 0.7):
        policy = PolicySchedule(SurvivalPolicy(threshold), traces, costs, 3)
        same_books(replay(traces, load, survival_threshold(traces, threshold)), replay(traces, load, policy))


def test_where_drafts_are_free_generate_runs_a_policy_as_it_is():
    traces = synthetic()
    load, costs = deal(traces, 3, max_rounds=60, seed=0), stair_costs(3)
    plain = replay(traces, load, PolicySchedule(BlockPolicy(), traces, costs, 3))
    same_books(plain, replay(traces, load, GeneratedSchedule(BlockPolicy(), traces, costs, 3)))


def test_where_drafts_are_dear_generate_leaves_them_out():
    traces = synthetic()
    load, costs = deal(traces, 3, max_rounds=200, seed=0), stair_costs(3, draft_s=20.0, slot_s=5.0)
    log = replay(traces, load, GeneratedSchedule(BlockPolicy(), traces, costs, 3))
    assert (log.num_slots == 0).mean() > 0.9 and (log.num_verified[log.num_slots == 0] == 3).all()
    cut = stair_costs(3, draft_s=0.3, slot_s=0.14)  # the last slots are worth less than they cost
    low = synthetic_traces({"a": [0.9, 0.1, 0.1]}, num_prompts=6, num_rounds=60, seed=0)
    traces = FlatTraces.of(low)
    log = replay(traces, deal(traces, 3, max_rounds=200, seed=0), GeneratedSchedule(BlockPolicy(), traces, cut, 3))
    assert (log.num_slots[:10] == 3).all() and (log.num_slots[-40:] <= 2).mean() > 0.6


def test_goodput_drafts_what_it_verifies_and_tries_again_where_plain_steps_look_best(monkeypatch):
    traces = synthetic()
    load = deal(traces, 3, max_rounds=300, seed=0)
    log = replay(traces, load, GoodputSchedule(traces, stair_costs(3), 3))
    assert (log.num_verified == 3 * (1 + log.num_slots)).all()
    monkeypatch.setattr(schedules, "TRIAL_EVERY", 9)
    dear = replay(traces, load, GoodputSchedule(traces, stair_costs(3, draft_s=9.0, slot_s=1.0), 3))
    drafted = np.flatnonzero(dear.num_slots)
    assert (np.diff(drafted) == 10).all() and (dear.num_slots[drafted] == 1).all() and len(drafted) > 3


def test_goodput_finds_the_best_length_of_known_acceptance():
    rate, num_rows = 0.8, 4
    constant = synthetic_traces({"a": [rate] * SLOTS}, num_prompts=8, num_rounds=200, concentration=1e6, seed=0)
    traces = FlatTraces.of(constant)
    costs = StepCosts.of([1 + 0.05 * b for b in range(num_rows * (1 + SLOTS) + 1)], draft_s=0.9, slot_s=0.3)
    theta = [num_rows / (1 + 0.05 * num_rows)]
    for n in range(1, SLOTS + 1):
        spent = 1 + 0.05 * num_rows * (1 + n) + 0.9 - 0.3 * (SLOTS - n)
        theta.append(num_rows * sum(rate**j for j in range(n + 1)) / spent)
    log = replay(traces, deal(traces, num_rows, max_rounds=200, seed=0), GoodputSchedule(traces, costs, num_rows))
    assert np.bincount(log.num_slots[30:]).argmax() == int(np.argmax(theta))


POLICIES = (PrefixPolicy, SmoothedPolicy, BlockPolicy, LaggedPolicy, GoodputPolicy, FullPolicy)


@pytest.mark.parametrize("num_rows", [1, 6])
def test_hindsight_expects_no_less_than_any_other_in_any_round(num_rows):
    traces = synthetic()  # of recorded rounds: every schedule meets the same rounds
    load, costs = deal(traces, num_rows, max_rounds=40, seed=0), stair_costs(num_rows)

    def expected(make):
        log = replay(traces, load, PolicySchedule(make(), traces, costs, num_rows))
        return log.expected_tokens / log.seconds(costs)

    best = expected(HindsightPolicy)
    gaps = [(best - expected(make)).min() for make in POLICIES]
    assert min(gaps) > -1e-6
    if num_rows > 1:
        assert all((best - expected(make)).max() > 1e-3 for make in (PrefixPolicy, FullPolicy))


class Clairvoyant(StaticSchedule):
    """Verifies what will be accepted: no schedule may know it."""

    def __init__(self, traces):
        super().__init__(traces.num_accepted, SLOTS)


def test_control_who_knows_the_outcome_is_above_hindsight():
    traces = synthetic(num_prompts=20)
    load, costs = deal(traces, 6, max_rounds=200, seed=0), stair_costs(6)

    def theta(schedule):
        log = replay(traces, load, schedule)
        return log.tokens.sum() / log.text_seconds(costs).sum()

    bound = theta(PolicySchedule(HindsightPolicy(), traces, costs, 6))
    assert theta(Clairvoyant(traces)) > 1.05 * bound
    assert theta(PolicySchedule(BlockPolicy(), traces, costs, 6)) < 1.01 * bound


class NoLag(LaggedPolicy):
    """The capacity follows from the confidences of the round itself."""

    def _stale(self, like, facts):
        return like


@pytest.mark.parametrize("make", [*POLICIES, lambda: SurvivalPolicy(0.5)])
def test_no_policy_looks_ahead(make):
    assert check_lookahead(make(), synthetic(), stair_costs(4), 4, seed=0).num_violations == 0


@pytest.mark.parametrize("make", [HindsightPolicy, NoLag])
def test_control_who_looks_ahead_is_found_out(make):
    check = check_lookahead(make(), synthetic(), stair_costs(4), 4, seed=0)
    assert check.num_violations >= 3 and check.num_trials == 200


# -- machines -------------------------------------------------------------------------------------------------------


def test_staircases_are_their_formula():
    machine = staircase(8, SLOTS)
    costs = machine.costs(5)
    assert costs.seconds == tuple(1 + 8 * np.ceil(b / 8) / 256 for b in range(21))
    assert (machine.name, costs.draft_s) == ("1 + 8⌈B/8⌉/256", 0.0)
    assert machine.plain_costs(5).seconds[5] == costs.seconds[5], "a plain step of a formula is its step"
    assert [m.name for m in machines_for([1, 4], None, SLOTS, 9)] == ["1 + B/256", "1 + 4⌈B/4⌉/256"]


def test_torch_counts_are_left_alone():
    """The rows' ids are those of texts, so that policies with a memory do not take one text for another."""
    seen = []

    class Watching(FullPolicy):
        def observe(self, confidence, lengths, num_accepted, facts):
            seen.append((facts.row_ids, num_accepted.clone()))
            assert torch.equal(lengths, torch.full((3,), SLOTS))

    traces = synthetic(num_prompts=2)
    load = deal(traces, 3, max_rounds=40, seed=0)
    replay(traces, load, PolicySchedule(Watching(), traces, stair_costs(3), 3))
    ids = [row_ids for row_ids, _ in seen]
    assert ids[0] == (0, 1, 2) and max(ids[-1]) >= len(load.prompts) - 1
    assert all(len(set(one)) == 3 for one in ids)
