"""The law of sampled output under every stateless processor that generate() builds, for each head, draft vocabulary
and policy. Through the stages in `make test`; through generate() itself in `make test-full`."""

import inspect
import itertools
import re

import pytest
import torch
from sampled_law import (
    ALONE,
    CAUGHT,
    HEADS,
    LEVEL,
    OPTIONS,
    generated_p_value,
    processors_of,
    small_drafter,
    small_target,
    staged_p_value,
    staged_rounds,
)
from transformers.generation import GenerationMixin
from transformers.generation import logits_process as lp

from dspark_hf import record_speculation
from dspark_hf.decoding import draft as draft_stage
from dspark_hf.decoding.refusals import STATEFUL_PROCESSORS
from dspark_hf.decoding.sampling import law

NUM_ROWS = 4000
NUM_DRAWS = 300
VOCABULARIES = {"whole": None, "reduced": (0, 1, 4)}
POLICIES = ("full", "threshold")
CELLS = list(itertools.product(HEADS, VOCABULARIES, POLICIES))
EACH = LEVEL / (len(OPTIONS) * len(CELLS))


@pytest.fixture(scope="module")
def target():
    return small_target()


@pytest.fixture(scope="module")
def drafters(target):
    return {
        (head, name): small_drafter(target, head, seed=3, ids=ids)
        for head, (name, ids) in itertools.product(HEADS, VOCABULARIES.items())
    }


@pytest.fixture(scope="module")
def knobs(target, drafters):
    """Arguments of each cell's policy; a threshold lets slot 1 through, and slot 2 after about half of the tokens."""
    chosen = {}
    for head, vocabulary, policy in CELLS:
        arguments = {"verification_policy": policy}
        if policy == "threshold":
            _, _, proposal, _ = staged_rounds(target, drafters[head, vocabulary], {}, 200, seed=0)
            first, second = proposal.confidence.conditional.T
            threshold = min(first[0], second.unique().median() + 1e-6)
            arguments["assistant_confidence_threshold"] = float(threshold)
        chosen[head, vocabulary, policy] = arguments
    return chosen


def check_rounds(target, drafters, knobs, name, cells):
    processors = processors_of(target, OPTIONS[name])
    for cell in cells:
        drafter = drafters[cell[:2]]
        assert staged_p_value(target, drafter, {}, NUM_ROWS, seed=1, processors=processors, **knobs[cell]) > EACH, cell


@pytest.mark.parametrize("name", OPTIONS)
def test_rounds_follow_the_target_law(target, drafters, knobs, name):
    """Each head once with each draft vocabulary, and once with each policy."""
    shift = list(OPTIONS).index(name)
    cells = [
        (head, vocabulary, POLICIES[(shift + i + j) % 2])
        for (i, head), (j, vocabulary) in itertools.product(enumerate(HEADS), enumerate(VOCABULARIES))
    ]
    check_rounds(target, drafters, knobs, name, cells)


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIONS)
def test_rounds_of_the_whole_grid_follow_the_target_law(target, drafters, knobs, name):
    check_rounds(target, drafters, knobs, name, CELLS)


def test_the_cells_accept_some_drafts_and_cut_some(target, drafters, knobs):
    is_cut = {}
    for cell in CELLS:
        _, _, proposal, acceptance = staged_rounds(target, drafters[cell[:2]], {}, NUM_ROWS, seed=1, **knobs[cell])
        accepted, verified = int(acceptance.num_accepted.sum()), int(proposal.lengths.sum())
        assert 0 < accepted < verified, cell
        is_cut[cell] = verified < proposal.block.tokens.numel()
    assert not any(is_cut[cell] for cell in CELLS if cell[2] == "full")
    assert sum(is_cut.values()) >= len(CELLS) // 4


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("head", HEADS)
def test_control_dropping_a_draft_by_its_value_is_caught(target, drafters, head, vocabulary):
    def biased(tokens, lengths):
        return torch.where(tokens[:, 0] <= 1, 0, lengths)

    assert staged_p_value(target, drafters[head, vocabulary], {}, NUM_ROWS, seed=1, lengths_of=biased) < CAUGHT


# Without effect on these two tokens, or with the last alone.
NO_CHANGE = {"temperature_1", "begin_suppress_tokens", "forced_eos_token_id", "remove_invalid_values"}


@pytest.mark.parametrize("name", sorted(OPTIONS.keys() - NO_CHANGE))
def test_control_the_unprocessed_draft_law_is_caught(target, drafters, monkeypatch, name):
    draw = draft_stage._draw

    def biased(logits, *args):
        unprocessed = law(logits.clone())
        return draw(logits, *args)._replace(probs=unprocessed)

    monkeypatch.setattr(draft_stage, "_draw", biased)
    assert staged_p_value(target, drafters["vanilla", "whole"], OPTIONS[name], NUM_ROWS, seed=1) < CAUGHT


def test_every_processor_that_generate_builds_is_in_the_grid(target):
    source = inspect.getsource(GenerationMixin._get_logits_processor)
    known = set(re.findall(r"\b([A-Z]\w+)\(", source)) & set(vars(lp))
    known.add("WatermarkLogitsProcessor")  # built by its config
    # ForcedBOS acts after a single id; nothing is drafted there.
    out_of_reach = {kind.__name__ for kind in STATEFUL_PROCESSORS} | {"ForcedBOSTokenLogitsProcessor"}
    kinds = {type(processor).__name__ for options in ALONE.values() for processor in processors_of(target, options)}
    assert known - out_of_reach - {"LogitsProcessorList"} == kinds


@pytest.mark.full
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", OPTIONS)
def test_generate_follows_the_target_law(target, drafters, knobs, name, head):
    with record_speculation() as report:
        for cell in (cell for cell in CELLS if cell[0] == head):
            drafter, options = drafters[cell[:2]], OPTIONS[name]
            assert generated_p_value(target, drafter, options, NUM_DRAWS, seed=1, **knobs[cell]) > EACH, cell
    assert 0 < report.num_accepted < report.num_verified < report.num_drafted
