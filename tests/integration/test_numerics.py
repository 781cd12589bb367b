"""A drafter whose numbers are NaN, infinite or overflow: output stays that of plain generate(), greedy token by token
and sampled by its law. test_edge_laws.py has sound numbers at the edge, and targets that are broken themselves."""

import math

import pytest
import torch
from sampled_law import (
    CAUGHT,
    LEVEL,
    generated,
    p_value,
    small_drafter,
    small_target,
    staged_p_value,
    staged_rounds,
)
from tiny import OracleDrafter, greedy, random_ids, tiny_drafter, tiny_target
from torch import nn

NUM_ROWS = 4000
EACH = LEVEL / 60
IDS = random_ids(7)
BROKEN = {"nan": math.nan, "inf": math.inf, "all_impossible": -math.inf}


@pytest.fixture(scope="module")
def small():
    return small_target()


@pytest.fixture(scope="module")
def shared_target():
    return tiny_target()


@pytest.fixture(scope="module")
def expected(shared_target):
    return greedy(shared_target, IDS, max_new_tokens=24)


def break_logits(drafter, slot, value, *, rounds=lambda number: True):
    """Put `value` into the logits of one slot, in the chosen rounds."""
    base_logits, number = drafter.base_logits, iter(range(10_000))

    def broken(*args):
        logits = base_logits(*args)
        if slot < logits.shape[1] and rounds(next(number)):
            # One NaN or +inf is enough to break a law; -inf breaks it when it is everywhere.
            logits[:, slot, slice(None) if value == -math.inf else slice(3, 4)] = value
        return logits

    drafter.base_logits = broken


class BrokenConfidence(nn.Module):
    def __init__(self, slot, value):
        super().__init__()
        self.slot, self.value = slot, value

    def forward(self, hidden, previous_embedding):
        logits = torch.full(hidden.shape[:2], 5.0)
        logits[:, self.slot : self.slot + 1] = self.value
        return logits


@pytest.mark.parametrize("part", ["logits", "confidence"])
@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("slot", [0, 1, 3])
def test_drafts_before_a_broken_slot_are_verified_and_no_others(shared_target, expected, slot, broken, part, caplog):
    drafter = OracleDrafter.for_target(shared_target, expected[0], hit_rate=1.0, block_size=4)
    if part == "logits":
        break_logits(drafter, slot, BROKEN[broken])
    else:
        drafter.confidence_head = BrokenConfidence(slot, BROKEN[broken])
    output = greedy(shared_target, IDS, max_length=31, assistant_model=drafter, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    report = output.speculation
    assert report.num_unusable_rounds > 0
    # each round commits the `slot` drafts before the broken one, and the target's own token
    assert report.num_rounds == math.ceil(23 / (slot + 1))
    assert caplog.text.count("NaN or infinite") == 1
    greedy(shared_target, IDS, max_length=31, assistant_model=drafter)
    assert caplog.text.count("NaN or infinite") == 2


def test_the_other_rounds_go_on_as_if_nothing_had_been(shared_target, expected, caplog):
    drafter = OracleDrafter.for_target(shared_target, expected[0], hit_rate=1.0, block_size=4)
    break_logits(drafter, 0, math.nan, rounds=lambda number: number % 2 == 1)
    output = greedy(shared_target, IDS, max_length=31, assistant_model=drafter, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert output.speculation.num_rounds == 7  # 5 + 1 + 5 + 1 + 5 + 1 + 5
    assert output.speculation.num_unusable_rounds == 3
    assert caplog.text.count("NaN or infinite") == 1


def test_one_warning_for_all_sequences_of_a_call(shared_target, caplog):
    drafter = tiny_drafter(shared_target)
    break_logits(drafter, 1, math.nan)
    shared_target.generate(IDS, do_sample=True, num_return_sequences=3, max_new_tokens=12, assistant_model=drafter)
    assert caplog.text.count("NaN or infinite") == 1


@pytest.mark.parametrize("policy", ["full", "threshold"])
@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("slot", [0, 1])
def test_a_broken_slot_leaves_the_law(small, slot, broken, policy):
    for part in ("logits", "confidence"):
        drafter = small_drafter(small)
        if part == "logits":
            break_logits(drafter, slot, BROKEN[broken])
        else:
            drafter.confidence_head = BrokenConfidence(slot, BROKEN[broken])
        knobs = {"verification_policy": policy, "assistant_confidence_threshold": 0.01}
        counts, joint, proposal, _ = staged_rounds(small, drafter, {}, NUM_ROWS, seed=1, **knobs)
        assert proposal.lengths.max() <= slot
        assert p_value(counts, joint) > EACH


@pytest.mark.parametrize("broken", ["nan", "inf"])
@pytest.mark.parametrize(
    "options",
    [
        {"top_h": 0.5},
        {"eta_cutoff": 0.3},
        {"top_k": 2},
        {"top_p": 0.5},
        {"typical_p": 0.5},
        {"repetition_penalty": 2.0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_processors_that_refuse_nan_do_not_see_the_drafters(small, options, broken):
    drafter = small_drafter(small)
    break_logits(drafter, 1, BROKEN[broken])
    assert staged_p_value(small, drafter, options, NUM_ROWS, seed=1) > EACH
    generated(small, drafter, 3, seed=1, **options)


@pytest.mark.parametrize("where", ["features", "layer"])
def test_a_float16_drafter_whose_activations_overflow(shared_target, expected, where, caplog):
    drafter = tiny_drafter(shared_target).to(torch.float16)
    with torch.no_grad():
        weight = drafter.fc.weight if where == "features" else drafter.layers[1].mlp.down_proj.weight
        weight.fill_(6e4)
    options = {"max_length": 31, "assistant_model": drafter, "return_dict_in_generate": True}
    output = greedy(shared_target, IDS, **options)
    assert torch.equal(output.sequences, expected)
    assert output.speculation.num_unusable_rounds > 0
    assert caplog.text.count("NaN or infinite") == 1
    assert shared_target.generate(IDS, do_sample=True, **options).sequences.shape == (1, 31)


def test_a_float16_drafter_that_overflows_leaves_the_law(small):
    drafter = small_drafter(small).to(torch.float16)
    with torch.no_grad():
        drafter.markov_head.markov_w1.weight[2] = 6e4  # its bias overflows after token 2
    counts, joint, proposal, _ = staged_rounds(small, drafter, {}, NUM_ROWS, seed=1)
    assert (proposal.lengths[proposal.block.tokens[:, 0] == 2] == 1).all()
    assert proposal.lengths.max() == 2
    assert p_value(counts, joint) > EACH


def test_a_float16_target():
    target = tiny_target().to(torch.float16)
    plain = greedy(target, IDS, max_new_tokens=24)
    for drafter in (tiny_drafter(target), OracleDrafter.for_target(target, plain[0], hit_rate=0.8)):
        assert torch.equal(greedy(target, IDS, max_new_tokens=24, assistant_model=drafter), plain)


def test_control_a_law_that_is_off_by_little_is_caught(small):
    counts, _, _, _ = staged_rounds(small, small_drafter(small), {}, NUM_ROWS, seed=1)
    _, other, _, _ = staged_rounds(small, small_drafter(small), {"temperature": 0.75}, 10, seed=1)
    assert p_value(counts, other) < CAUGHT
