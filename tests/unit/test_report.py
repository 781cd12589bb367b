"""Counts per round, merging, and `record_speculation`."""

import math

import pytest
import torch
from tiny import OracleDrafter, greedy, random_ids, tiny_drafter, tiny_target

from dspark_hf import SpeculationReport, record_speculation
from dspark_hf.decoding.report import StageClock


def test_counts_of_rounds():
    report = SpeculationReport(num_calls=1, num_new_tokens=1 + 4 + 2 + 1)
    report.count_round(num_drafted=3, num_verified=3, num_accepted=3)
    report.count_round(num_drafted=3, num_verified=2, num_accepted=1)
    report.count_round(num_drafted=3, num_verified=0, num_accepted=0)
    assert report.verified_per_slot == [2, 2, 1]
    assert report.accepted_per_slot == [2, 1, 1]
    assert report.reached_per_slot == [2, 2, 1]
    assert report.conditional_acceptance == [1.0, 0.5, 1.0]
    assert (report.num_drafted, report.num_verified, report.num_accepted) == (9, 5, 4)
    assert report.tau == pytest.approx(7 / 3)


def test_a_slot_never_reached_has_no_acceptance():
    report = SpeculationReport()
    report.count_round(num_drafted=2, num_verified=2, num_accepted=0)
    assert report.conditional_acceptance[0] == 0.0
    assert math.isnan(report.conditional_acceptance[1])
    assert math.isnan(SpeculationReport().tau)


def test_tau_counts_committed_tokens_only():
    target, ids = tiny_target(), random_ids(5)
    whole = greedy(target, ids, max_new_tokens=30)[0]
    drafter = OracleDrafter.for_target(target, whole, hit_rate=1.0)
    eos = int(whole[5 + 4])  # the fourth new token of the first round
    assert eos not in whole[5 : 5 + 4].tolist()
    report = greedy(
        target, ids, max_new_tokens=24, eos_token_id=eos, pad_token_id=0, assistant_model=drafter,
        return_dict_in_generate=True,
    ).speculation  # fmt: skip
    assert (report.num_new_tokens, report.num_rounds, report.num_accepted) == (5, 1, 7)
    assert report.tau == 4.0


def test_merge_adds_everything():
    first, second = SpeculationReport(draft_s=1.0), SpeculationReport(draft_s=0.5, num_calls=1)
    first.count_round(2, 2, 1)
    second.count_round(4, 3, 3)
    first.merge(second)
    assert (first.num_rounds, first.num_calls, first.draft_s) == (2, 1, 1.5)
    assert first.accepted_per_slot == [2, 1, 1, 0]


def test_recording_nests_and_covers_tensor_outputs():
    target, ids = tiny_target(), random_ids(5)
    drafter = tiny_drafter(target)
    with record_speculation() as outer:
        greedy(target, ids, max_new_tokens=6, assistant_model=drafter)
        with record_speculation() as inner:
            output = greedy(target, ids, max_new_tokens=9, assistant_model=drafter)
            greedy(target, ids, max_new_tokens=9)  # plain generation is not counted
    greedy(target, ids, max_new_tokens=9, assistant_model=drafter)
    assert isinstance(output, torch.Tensor)
    assert (inner.num_calls, inner.num_new_tokens) == (1, 9)
    assert (outer.num_calls, outer.num_new_tokens) == (2, 15)


def test_output_report_adds_up():
    target, ids = tiny_target(), random_ids(5)
    output = greedy(
        target,
        ids,
        max_new_tokens=30,
        assistant_model=tiny_drafter(target),
        return_dict_in_generate=True,
    )
    report = output.speculation
    assert report.num_new_tokens == output.sequences.shape[1] - 5 == 30
    assert report.num_target_forwards == report.num_rounds + 1
    assert report.num_accepted + report.num_rounds + 1 == 30
    stages = [report.prefill_s, report.draft_s, report.verify_s, report.accept_s, report.other_s]
    assert all(seconds > 0 for seconds in stages)
    assert report.total_s == pytest.approx(sum(stages))
    assert output["sequences"] is output.sequences
    assert output.attentions is None


def test_a_mark_tells_the_seconds_that_it_booked():
    report = SpeculationReport()
    clock = StageClock(report)
    booked = [clock.mark("verify_s") for _ in range(3)]
    assert min(booked) >= 0
    assert report.verify_s == pytest.approx(sum(booked))
