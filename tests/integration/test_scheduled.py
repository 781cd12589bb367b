"""Policies that weigh drafts against step times, in generate(): what a profile says, what a gate decides, and no token
is another."""

import pytest
import torch
from batches import prefixes_of_one_text, ragged
from machines import Machine
from tiny import OracleDrafter, greedy, random_ids, tiny_drafter, tiny_target

from dspark_hf import UnsupportedGenerationError, record_speculation
from dspark_hf.decoding import candidate_generator, settings
from dspark_hf.decoding.policies.registry import COST_POLICIES
from dspark_hf.decoding.scheduler import Scheduler

NUM_NEW = 24


class Steps:
    """Notes the steps that are compared with a profile."""

    def __init__(self, machine):
        machine.steps = self.seen = []

    def observe(self, *step):
        self.seen.append(step)


MACHINES = {
    "flat": lambda b: 1.0,
    "linear": lambda b: 1.0 + 0.1 * b,
    "stairs": lambda b: 1.0 + 0.5 * (b // 4),
}


@pytest.fixture
def on(monkeypatch):
    """Puts a machine's profile where generate() finds it."""

    def put(machine):
        monkeypatch.setattr("dspark_hf.decoding.scheduler.find_profile", lambda target, drafter: machine)
        # Its seconds are no seconds of this machine.
        monkeypatch.setattr("dspark_hf.decoding.scheduler.residuals_of", lambda profile: Steps(machine))
        return machine

    return put


@pytest.mark.parametrize("policy", sorted(COST_POLICIES))
@pytest.mark.parametrize("num_rows", [1, 3, 8])
@pytest.mark.parametrize("machine", MACHINES)
def test_scheduled_rows_say_what_plain_ones_say(machine, num_rows, policy, on):
    on(Machine(MACHINES[machine], draft_s=0.3))
    target = tiny_target()
    whole, inputs = prefixes_of_one_text(target, num_rows)
    for options in ({}, {"eos_token_id": list(range(3, 12))}, {"cache_implementation": "static"}):
        expected = greedy(target, **inputs, max_new_tokens=NUM_NEW, **options)
        for drafter in (tiny_drafter(target), OracleDrafter.for_target(target, whole, hit_rate=0.7)):
            got = greedy(
                target, **inputs, max_new_tokens=NUM_NEW, **options, verification_policy=policy,
                assistant_model=drafter,
            )  # fmt: skip
            assert torch.equal(got, expected)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_goodput_needs_no_confidence_head(num_rows, on):
    on(Machine(lambda b: 1.0 + 0.01 * b, draft_s=0.05))
    target = tiny_target()
    whole, inputs = prefixes_of_one_text(target, num_rows)
    drafter = OracleDrafter.for_target(target, whole, hit_rate=0.7, enable_confidence_head=False)
    with record_speculation() as report:
        got = greedy(
            target, **inputs, max_new_tokens=NUM_NEW, verification_policy="goodput", assistant_model=drafter
        )  # fmt: skip
    assert torch.equal(got, greedy(target, **inputs, max_new_tokens=NUM_NEW))
    assert 0 < report.num_accepted <= report.num_verified


@pytest.mark.parametrize("layout", ["padded", "flat"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_every_step_is_compared_with_the_profile(num_rows, layout, on):
    machine, target = on(Machine(MACHINES["linear"])), tiny_target()
    whole, inputs = prefixes_of_one_text(target, num_rows)
    computed = []
    target.register_forward_pre_hook(lambda _, args, kw: computed.append(kw["input_ids"].numel()), with_kwargs=True)
    oracle = OracleDrafter.for_target(target, whole, hit_rate=0.7)
    with record_speculation() as report:
        greedy(
            target, **inputs, max_new_tokens=NUM_NEW, verification_policy="block", verification_layout=layout,
            assistant_model=oracle,
        )  # fmt: skip
    assert [num_tokens for _, num_tokens, _, _ in machine.steps] == computed[1:]
    assert {step[0] for step in machine.steps[:1]} == {num_rows}
    first, last = machine.steps[0][2], machine.steps[-1][2]
    assert inputs["input_ids"].shape[1] <= first < last <= inputs["input_ids"].shape[1] + NUM_NEW
    assert sum(seconds for *_, seconds in machine.steps) == pytest.approx(report.verify_s)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_no_draft_is_made_where_none_can_pay(num_rows, on):
    machine = on(Machine(lambda b: 1.0, draft_s=100.0))
    target = tiny_target()
    inputs = ragged([5] * num_rows)
    with record_speculation() as report:
        got = greedy(
            target, **inputs, max_new_tokens=NUM_NEW, verification_policy="block", assistant_model=tiny_drafter(target)
        )
    assert torch.equal(got, greedy(target, **inputs, max_new_tokens=NUM_NEW))
    assert report.num_drafted == 0
    assert report.num_target_forwards == NUM_NEW
    assert machine.asked[0] == (num_rows, 5)


@pytest.mark.parametrize(("shares", "is_drafted"), [([0.9, 0.8, 0.7, 0.6], True), ([0.01, 0.0, 0.0, 0.0], False)])
def test_a_call_begins_with_what_calibration_saw(shares, is_drafted, on):
    on(Machine(lambda b: 1.0, draft_s=0.3))
    target = tiny_target()
    entry = {"temperatures": [1.0] * 4, "platt": None, "settings": {}, "share_accepted": shares}
    drafter = tiny_drafter(target, calibration={"greedy": entry})
    inputs = ragged([5] * 3)
    with record_speculation() as report:
        got = greedy(target, **inputs, max_new_tokens=8, verification_policy="block", assistant_model=drafter)
    assert torch.equal(got, greedy(target, **inputs, max_new_tokens=8))
    assert (report.num_drafted > 0) == is_drafted


def test_slots_that_cost_more_than_they_bring_are_not_drafted(on, monkeypatch):
    on(Machine(lambda b: 1.0, draft_s=0.5, slot_s=0.1))
    monkeypatch.setattr("dspark_hf.decoding.policies.depth.MIN_ROW_ROUNDS", 6.0)
    target = tiny_target()
    whole, inputs = prefixes_of_one_text(target, 3)
    expected = greedy(target, **inputs, max_new_tokens=40)
    for hit_rate, is_left_out in ((0.3, True), (1.0, False)):
        oracle = OracleDrafter.for_target(target, whole, hit_rate=hit_rate)
        with record_speculation() as report:
            got = greedy(target, **inputs, max_new_tokens=40, verification_policy="block", assistant_model=oracle)
        assert torch.equal(got, expected)
        per_round = report.num_drafted / report.num_rounds
        assert (per_round < 0.7 * oracle.config.block_size) == is_left_out


def test_drafts_are_made_where_steps_cost_nothing_more(on):
    on(Machine(lambda b: 1.0))
    target = tiny_target()
    whole, inputs = prefixes_of_one_text(target, 3)
    oracle = OracleDrafter.for_target(target, whole, hit_rate=1.0)
    with record_speculation() as report:
        greedy(target, **inputs, max_new_tokens=NUM_NEW, verification_policy="block", assistant_model=oracle)
    assert report.num_verified > 0.5 * report.num_drafted > 0


@pytest.mark.parametrize("num_rows", [1, 3])
def test_drafts_after_plain_rounds_are_those_of_one_that_drafts_always(num_rows, monkeypatch):
    """The drafter has seen every committed token, also those of rounds without a draft."""
    target = tiny_target(vocab_size=5, seed=3)
    drafter = tiny_drafter(target)
    inputs = ragged([5, 9, 7][:num_rows], vocab_size=5)
    draft, seen = candidate_generator.draft_block, {}

    def spy(drafter, hidden, base_logits, prefix, *args, **kwargs):
        block = draft(drafter, hidden, base_logits, prefix, *args, **kwargs)
        rows = [prefix[0]] if num_rows == 1 else [ids[:n] for ids, n in zip(prefix.ids, prefix.lengths, strict=True)]
        for text, tokens in zip(rows, block.tokens.tolist(), strict=True):
            seen.setdefault(tuple(text.tolist()), []).append(tokens)
        return block

    monkeypatch.setattr(candidate_generator, "draft_block", spy)
    expected = greedy(target, **inputs, max_new_tokens=NUM_NEW, assistant_model=drafter)
    rounds = []
    monkeypatch.setattr(Scheduler, "wants_draft", lambda *args: rounds.append(1) or len(rounds) % 5 == 0)
    with record_speculation() as report:
        got = greedy(target, **inputs, max_new_tokens=NUM_NEW, assistant_model=drafter)
    assert torch.equal(got, expected)
    assert 0 < report.num_drafted < report.num_rounds * drafter.config.block_size
    compared = [tokens for tokens in seen.values() if len(tokens) > 1]
    assert len(compared) >= 3
    for first, *others in compared:
        for other in others:
            num_slots = min(len(first), len(other))  # fewer near max_length
            assert other[:num_slots] == first[:num_slots]


def test_without_a_profile_a_named_policy_is_refused_and_a_default_gives_way(on, caplog):
    on(None)
    settings._warn_of_missing_costs.cache_clear()
    target = tiny_target()
    ids = random_ids(5)
    with pytest.raises(
        UnsupportedGenerationError,
        match="at hand for this pair in float32, .*make one with `dspark profile --target TARGET .*--dtype float32",
    ):
        greedy(target, ids, max_new_tokens=4, verification_policy="prefix", assistant_model=tiny_drafter(target))
    drafter = tiny_drafter(target, verification_policy="block")
    with record_speculation() as report:
        greedy(target, ids, max_new_tokens=NUM_NEW, assistant_model=drafter)
    assert report.num_verified == report.num_drafted > 0
    assert "every draft is verified instead" in caplog.text
    assert "Make a profile with `dspark profile --target TARGET --drafter DRAFTER --dtype float32" in caplog.text


def test_more_rows_than_were_measured_are_refused_or_verified_in_full(on, caplog):
    on(Machine(lambda b: 1.0, max_rows=2))
    settings._warn_of_missing_costs.cache_clear()
    target = tiny_target()
    inputs = ragged([5, 3, 4])
    with pytest.raises(UnsupportedGenerationError, match="knows 1 to 2 rows, and this call has 3.* --batch-size 3 "):
        greedy(target, **inputs, max_new_tokens=4, verification_policy="prefix", assistant_model=tiny_drafter(target))
    drafter = tiny_drafter(target, verification_policy="block")
    expected = greedy(target, **inputs, max_new_tokens=8)
    assert torch.equal(greedy(target, **inputs, max_new_tokens=8, assistant_model=drafter), expected)
    assert "knows 1 to 2 rows" in caplog.text


@pytest.mark.parametrize("policy", sorted(COST_POLICIES))
def test_transformers_own_loop_runs_them_too(policy, on, monkeypatch):
    on(Machine(MACHINES["linear"]))
    target, ids = tiny_target(), random_ids(7)
    expected = greedy(target, ids, max_new_tokens=NUM_NEW)
    told = []
    observe = Scheduler.observe
    monkeypatch.setattr(Scheduler, "observe", lambda self, *args: told.append(args[2:]) or observe(self, *args))
    from dspark_hf.decoding import route

    stock = route.GenerationMixin._assisted_decoding.__wrapped__
    monkeypatch.setattr(route.GenerationMixin, "_assisted_decoding", stock)
    drafter = OracleDrafter.for_target(target, greedy(target, ids, max_new_tokens=NUM_NEW + 8)[0], hit_rate=0.8)
    got = greedy(target, ids, max_new_tokens=NUM_NEW, verification_policy=policy, assistant_model=drafter)
    assert torch.equal(got, expected)
    assert sum(lengths[0] for _, lengths in told) >= sum(accepted[0] for accepted, _ in told) > 0
