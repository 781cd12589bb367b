"""Random generate() calls say the same with a drafter as without; 300 of them in `make test`, 10,000 more in full."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import fuzz
import pytest
import torch
from fuzz import Case, cases, check_and_print, snippet
from hypothesis import HealthCheck, given, settings
from transformers.generation.stopping_criteria import EosTokenCriteria

from dspark_hf.decoding import accept, stopping

ROOT = Path(__file__).parents[2]
MAX_NEAR_TIES = 1 / 1000  # of the calls; each makes about ten tokens


def run(num_cases, **how):
    """Check that many random cases; how many there were, and how many of them were near ties."""
    outcomes = []

    @settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        **how,
    )
    @given(cases())
    def check_one(case):
        outcomes.append(check_and_print(case))

    check_one()
    return len(outcomes), outcomes.count(False)


@pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers")  # generate() comments on odd combinations
def test_300_random_calls():
    num_cases, num_ties = run(300, derandomize=True)
    assert num_cases >= 300
    assert num_ties <= 1


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers")
def test_10000_random_calls():
    num_cases, num_ties = run(10_000, print_blob=True)
    assert num_cases >= 10_000
    assert num_ties <= MAX_NEAR_TIES * num_cases


CASE = Case("Llama", 5, 0, 0, (), {"hit_rate": 1.0}, {"do_sample": False, "eos_token_id": [3]}, {})


def test_a_failing_case_is_printed_as_a_program_that_runs(monkeypatch):
    end = int(fuzz.generate(CASE).sequences[0, 8])  # inside the first block
    case = Case(**{**vars(CASE), "call": {"do_sample": False, "eos_token_id": [end]}})
    assert check_and_print(case)
    with monkeypatch.context() as planted:  # a stop inside a block is overlooked
        planted.setitem(stopping._BATCHED, EosTokenCriteria, lambda criterion, ids, num_new: None)
        with pytest.raises(AssertionError) as failure:
            check_and_print(case)
    program = str(failure.value).partition("alone:\n\n")[2]
    assert program.strip() == snippet(case)
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, timeout=120)


def test_the_search_finds_a_planted_fault(monkeypatch):
    """A drafter's token that is kept although the target says another: some of 300 cases must show it."""
    right = accept.accept_greedy

    def wrong(drafts, target_tokens, lengths):
        acceptance = right(drafts, target_tokens, lengths)
        is_odd = (drafts[:, :1] % 7 == 3).any(1) if drafts.shape[1] else torch.zeros(1, dtype=torch.bool)
        return replace(acceptance, num_accepted=acceptance.num_accepted.clamp(min=is_odd.long()))

    monkeypatch.setattr(accept, "accept_greedy", wrong)
    with pytest.raises(AssertionError, match="To run this case alone"):
        run(300, derandomize=True)


def test_near_ties_are_told_from_differences(monkeypatch):
    expected = fuzz.generate(CASE).sequences
    best = fuzz.generate(Case(**{**vars(CASE), "call": CASE.call | {"output_scores": True}})).scores[2].topk(3)
    second, third = expected.clone(), expected.clone()
    second[0, 7], third[0, 7] = best.indices[0, 1], best.indices[0, 2]
    assert not fuzz._is_near_tie(CASE, second, expected)  # the gap is wide
    assert not fuzz._is_near_tie(CASE, expected[:, :8], expected)  # one only ends earlier
    monkeypatch.setattr(fuzz, "MAX_GAP", 1.01 * float(best.values[0, 0] - best.values[0, 1]))
    assert fuzz._is_near_tie(CASE, second, expected)
    assert not fuzz._is_near_tie(CASE, third, expected)  # not one of the two best
