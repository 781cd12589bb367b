"""Races of tiny pairs: events, texts, agreement, cancelling, errors."""

import functools
import threading

import pytest
import torch
from demo_races import job_of, lanes_of, oracle_for
from tiny import greedy, tiny_drafter, tiny_target

from dspark_hf import CheckpointFormatError
from dspark_hf.demo import race as race_module
from dspark_hf.demo.events import LaneDone, LaneReady, LaneStopped, RaceFailed, StepDone, TextsCompared
from dspark_hf.demo.race import compare_texts, is_out_of_memory, readable, run_race
from dspark_hf.demo.turns import Turns
from dspark_hf.evaluation import ComparisonError

PROMPT = (5, 9, 3)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def race(job, lanes, **options):
    events = []
    run_race(job, lanes, events.append, **{"is_cancelled": lambda: False} | options)
    return events


def of_lane(events, kind, lane):
    return [event for event in events if isinstance(event, kind) and event.lane == lane]


def committed(steps):
    """The committed text of a lane's pieces."""
    return "".join(piece.text for step in steps for piece in step.pieces if piece.kind != "rejected")


@pytest.mark.parametrize("first", [0, 1])
def test_both_lanes_stream_the_text_of_plain_generation(target, first):
    job = job_of(target, max_new_tokens=24)
    drafter = oracle_for(target)
    events = race(job, lanes_of(None, drafter), first=first)
    expected = greedy(target, job.ids, max_new_tokens=24)[0, len(PROMPT) :].tolist()
    plain, dspark = (of_lane(events, StepDone, lane) for lane in (0, 1))
    ended = [of_lane(events, LaneDone, lane)[0] for lane in (0, 1)]
    assert [list(lane.new_ids[0]) for lane in ended] == [expected] * 2
    assert committed(plain) == committed(dspark) == job.tokenizer.decode(expected)
    assert ended[0].num_target_forwards == len(plain) == 24
    assert ended[1].num_target_forwards == len(dspark) < 24
    assert isinstance(events[-1], TextsCompared)
    assert (events[-1].num_same, events[-1].is_error) == (1, False)


def test_pieces_agree_with_the_report(target):
    events = race(job_of(target, max_new_tokens=24), lanes_of(None, oracle_for(target)))
    steps, ended = of_lane(events, StepDone, 1), of_lane(events, LaneDone, 1)[0]
    pieces = [piece for step in steps for piece in step.pieces]
    accepted = [piece for piece in pieces if piece.kind == "accepted"]
    assert 0 < len(accepted) <= sum(ended.accepted_per_slot)
    per_slot = [sum(piece.slot == slot + 1 for piece in accepted) for slot in range(len(ended.accepted_per_slot))]
    assert per_slot[0] == ended.accepted_per_slot[0]  # deeper ones may have been cut off by the end
    assert any(piece.kind == "rejected" for piece in pieces)
    assert all(0 <= piece.confidence <= 1 for piece in pieces if piece.slot is not None)
    assert all(piece.confidence is None for piece in pieces if piece.slot is None)
    # A round reads: accepted drafts in their slots, perhaps the rejected one behind them, the target's own token.
    for step in steps[1:-1]:
        kinds = [piece.kind for piece in step.pieces]
        num_accepted = step.rows[0].num_accepted
        assert kinds[:num_accepted] == ["accepted"] * num_accepted
        assert kinds[num_accepted:] in (["rejected", "own"], ["own"])
        assert step.rows[0].num_new_tokens == num_accepted + 1


def test_stage_seconds_fill_the_lanes_time_and_not_the_time_it_waits(target):
    events = race(job_of(target, max_new_tokens=40), lanes_of(None, tiny_drafter(target)))
    ended = of_lane(events, LaneDone, 1)[0]
    assert list(ended.stage_s) == ["prompt", "draft", "verify", "accept", "other"]
    assert sum(ended.stage_s.values()) == pytest.approx(ended.device_s)
    assert all(seconds > 0 for seconds in ended.stage_s.values())
    plain = of_lane(events, LaneDone, 0)[0]
    assert plain.stage_s is None and plain.device_s > 0


def test_lanes_run_in_turn(target, monkeypatch):
    monkeypatch.setattr(race_module, "Turns", functools.partial(Turns, slice_s=0.0))
    events = race(job_of(target, max_new_tokens=60), lanes_of(None, tiny_drafter(target)))
    lanes = [event.lane for event in events if isinstance(event, StepDone)]
    assert sum(a != b for a, b in zip(lanes, lanes[1:], strict=False)) > 10


def test_two_drafters_say_the_same(target):
    job = job_of(target, max_new_tokens=16)
    drafters = tiny_drafter(target, seed=1), tiny_drafter(target, seed=2, block_size=3)
    events = race(job, lanes_of(*drafters))
    ready = [event for event in events if isinstance(event, LaneReady)]
    assert [(event.policy, event.num_draft_tokens) for event in ready] == [("full", 4), ("full", 3)]
    assert events[-1].num_same == 1


def test_a_batch_tells_budgets_of_each_row(target):
    rows = ((5, 9, 3), (7, 2), (11, 4, 8, 1))
    job = job_of(target, rows, max_new_tokens=12, policy="threshold", threshold=0.5)
    events = race(job, lanes_of(None, tiny_drafter(target), policy="threshold"))
    steps, ended = of_lane(events, StepDone, 1), of_lane(events, LaneDone, 1)[0]
    assert steps[0].is_prompt and {row.row for row in steps[0].rows} == {0, 1, 2}
    verified = {row.num_verified for step in steps[1:] for row in step.rows}
    assert len(verified) > 1 and verified <= set(range(5))
    assert all(not step.pieces for step in steps)
    assert events[-1].num_rows == events[-1].num_same == 3
    for row, ids in enumerate(rows):
        alone = greedy(target, job.ids.new_tensor([ids]), max_new_tokens=12)[0, len(ids) :]
        assert list(ended.new_ids[row]) == alone.tolist()
    plain = of_lane(events, LaneDone, 0)[0]
    assert plain.num_target_forwards == len(of_lane(events, StepDone, 0)) == 12


def test_rows_of_a_plain_batch_that_have_ended_are_not_counted_further(target):
    rows = ((5, 9, 3), (7, 2, 6))
    texts = [greedy(target, torch.tensor([row]), max_new_tokens=12)[0, 3:].tolist() for row in rows]
    end = next(token for token in texts[0][2:6] if token not in texts[1])
    target.generation_config.eos_token_id = end
    try:
        events = race(job_of(target, rows, max_new_tokens=12), lanes_of(None, tiny_drafter(target)))
    finally:
        target.generation_config.eos_token_id = None
    for lane in (0, 1):
        new_ids = of_lane(events, LaneDone, lane)[0].new_ids
        assert list(new_ids[0]) == texts[0][: texts[0].index(end) + 1]
        assert list(new_ids[1]) == texts[1]
    told = sum(row.num_new_tokens for step in of_lane(events, StepDone, 0) for row in step.rows)
    assert told == sum(map(len, of_lane(events, LaneDone, 0)[0].new_ids))


def test_sampled_lanes_each_repeat_with_their_seed_whoever_goes_first(target):
    job = job_of(target, max_new_tokens=20, temperature=1.0, seed=3)
    lanes = lanes_of(None, tiny_drafter(target))
    texts = []
    for first in (0, 1):
        events = race(job, lanes, first=first)
        texts.append([of_lane(events, LaneDone, lane)[0].new_ids for lane in (0, 1)])
        assert events[-1].is_greedy is False
    assert texts[0] == texts[1]


def test_cancelling_ends_both_lanes_after_the_step_in_progress(target):
    cancelled = threading.Event()
    events = []

    def put(event):
        events.append(event)
        if isinstance(event, StepDone) and event.lane == 1:
            cancelled.set()

    run_race(
        job_of(target, max_new_tokens=200), lanes_of(None, tiny_drafter(target)), put, is_cancelled=cancelled.is_set
    )
    assert {event.lane for event in events if isinstance(event, LaneStopped)} == {0, 1}
    assert not any(isinstance(event, LaneDone | TextsCompared) for event in events)
    assert len(of_lane(events, StepDone, 1)) == 1
    # The pair is as good as new.
    again = race(job_of(target), lanes_of(None, tiny_drafter(target)))
    assert again[-1].num_same == 1


def test_an_error_in_a_lane_ends_the_race_and_tells_why(target):
    drafter = tiny_drafter(target)

    def forward(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    drafter.forward = forward
    events = race(job_of(target, max_new_tokens=200), lanes_of(None, drafter), first=1)
    failed = [event for event in events if isinstance(event, RaceFailed)]
    assert [event.message for event in failed] == [
        "The device is out of memory: choose fewer rows or tokens, or a smaller model."
    ]
    assert of_lane(events, LaneStopped, 0)
    assert race(job_of(target), lanes_of(None, tiny_drafter(target)))[-1].num_same == 1


def test_settings_that_a_drafter_cannot_honour_are_refused_before_anything_runs(target):
    events = []
    job = job_of(target, num_assistant_tokens=9)
    with pytest.raises(ComparisonError, match="num_assistant_tokens must be at most 4"):
        run_race(job, lanes_of(None, tiny_drafter(target)), events.append, is_cancelled=lambda: False)
    assert not any(isinstance(event, StepDone) for event in events)


def test_a_difference_is_explained(target):
    job = job_of(target, max_new_tokens=6)
    right = greedy(target, job.ids, max_new_tokens=6)[0, 3:].tolist()
    wrong = [*right[:2], (right[2] + 1) % 61, *right[3:]]
    same, other = (LaneDone(lane, (tuple(ids),), 1.0, 1) for lane, ids in enumerate((right, wrong)))
    found = compare_texts(job, same, other)
    assert (found.num_same, found.first_row, found.position, found.is_error) == (0, 0, 2, True)
    assert found.token_gap > 1e-4 and found.dtype == "float32"


def test_messages_are_one_line_and_keep_what_is_not_the_readers_in_the_log(caplog):
    assert readable(CheckpointFormatError("no\n  drafter")) == "no drafter"
    assert "out of memory" in readable(MemoryError())
    assert "out of memory" in readable(RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    message = readable(KeyError("/secret/path"))
    assert "KeyError" in message and "/secret" not in message
    assert "/secret/path" in caplog.text
