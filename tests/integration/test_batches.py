"""Batches: every row says what plain batched generation says, whatever its neighbours accept."""

import pytest
import torch
from batches import POLICIES, check_plain_and_solo, prefixes_of_one_text, ragged, together
from families import FAMILIES, NAMED_FAMILIES, OTHER_FAMILIES
from tiny import OracleDrafter, greedy, tiny_drafter, tiny_target
from transformers.generation.stopping_criteria import StoppingCriteria

from dspark_hf import UnsupportedGenerationError, record_speculation
from dspark_hf.decoding import batch as batch_module
from dspark_hf.decoding import row_target

NUM_NEW = 20


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy["verification_policy"])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 17])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_rows_say_what_plain_batches_and_solo_runs_say(kind, num_rows, policy):
    check_plain_and_solo(tiny_target(kind), num_rows, NUM_NEW, **policy)


@pytest.mark.parametrize("hit_rate", [0.5, 0.8, 1.0])
@pytest.mark.parametrize("num_rows", [2, 8])
def test_rows_that_accept_different_numbers(num_rows, hit_rate):
    target = tiny_target()
    whole, inputs = prefixes_of_one_text(target, num_rows)
    oracle = OracleDrafter.for_target(target, whole, hit_rate=hit_rate)
    for num_new in (1, 2, 9, NUM_NEW):
        expected = greedy(target, **inputs, max_new_tokens=num_new)
        with record_speculation() as report:
            got = target.generate(**inputs, do_sample=False, max_new_tokens=num_new, assistant_model=oracle)
        assert torch.equal(got, expected)
    assert report.tau > {0.5: 1.5, 0.8: 2.5, 1.0: 6.0}[hit_rate]


OPTIONS = [
    {"eos_token_id": list(range(3, 12))},
    {"repetition_penalty": 1.4},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[3], [4, 5]], "sequence_bias": [[[7], 2.0]]},
    {"min_new_tokens": 8, "eos_token_id": list(range(3, 20))},
    {"forced_eos_token_id": 7, "eos_token_id": 7},
    {"prefill_chunk_size": 4},
    {"encoder_repetition_penalty": 1.5},
    {"encoder_no_repeat_ngram_size": 2},
    {"max_new_tokens": 3},
    {"do_sample": True, "top_k": 1, "num_return_sequences": 2, "repetition_penalty": 1.3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
@pytest.mark.parametrize("compacts_at", [0.01, 0.25, 2.0])
def test_options_of_generate(options, compacts_at, monkeypatch):
    monkeypatch.setattr(batch_module, "COMPACT_SHARE", compacts_at)
    target = tiny_target()
    whole, inputs = prefixes_of_one_text(target, 5)
    common = {"do_sample": False, "max_new_tokens": NUM_NEW} | options
    expected = target.generate(**inputs, **common)
    for drafter in (tiny_drafter(target), OracleDrafter.for_target(target, whole, hit_rate=0.8)):
        got = target.generate(**inputs, **common, assistant_model=drafter)
        assert torch.equal(got, expected)


def test_prefix_allowed_tokens_are_asked_with_the_number_of_the_prompt():
    target = tiny_target()
    inputs = ragged([3, 7, 5])

    def allowed(prompt, ids):
        return [token for token in range(61) if (token + int(ids[-1]) + prompt) % 3]

    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 1, "num_return_sequences": 2}):
        common = options | {"max_new_tokens": 12, "prefix_allowed_tokens_fn": allowed}
        expected = target.generate(**inputs, **common)
        assert torch.equal(target.generate(**inputs, **common, assistant_model=tiny_drafter(target)), expected)


class EndsOnMultiples(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 7 == 0


@pytest.mark.parametrize("eos", [{"eos_token_id": 3}, {}], ids=["padded_behind_a_stop", "until_the_last_row_stops"])
@pytest.mark.parametrize("num_new", [NUM_NEW, 60])
def test_custom_criteria(eos, num_new):
    target = tiny_target()
    whole, inputs = prefixes_of_one_text(target, 4)
    common = {"max_new_tokens": num_new, "stopping_criteria": [EndsOnMultiples()], "return_dict_in_generate": True}
    common |= {"output_scores": True} | eos
    expected = greedy(target, **inputs, **common)
    for drafter in (tiny_drafter(target), OracleDrafter.for_target(target, whole, hit_rate=0.8)):
        got = together(target, drafter, inputs, **common)
        assert torch.equal(got.sequences, expected.sequences)
        assert len(got.scores) == len(expected.scores)


def test_scores_logits_and_reports():
    target = tiny_target()
    whole, inputs = prefixes_of_one_text(target, 3)
    common = {
        "max_new_tokens": NUM_NEW, "return_dict_in_generate": True, "output_scores": True, "output_logits": True,
        "repetition_penalty": 1.2,
    }  # fmt: skip
    expected = greedy(target, **inputs, **common)
    got = together(target, OracleDrafter.for_target(target, whole, hit_rate=0.8), inputs, **common)
    assert torch.equal(got.sequences, expected.sequences)
    for name in ("scores", "logits"):
        assert len(getattr(got, name)) == NUM_NEW
        for mine, theirs in zip(getattr(got, name), getattr(expected, name), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    assert got.speculation.num_new_tokens == 3 * NUM_NEW
    assert got.cache is None


@pytest.mark.parametrize(
    "family",
    [*NAMED_FAMILIES, *(pytest.param(name, marks=pytest.mark.full) for name in OTHER_FAMILIES)],
)
def test_families(family):
    target = FAMILIES[family].build()
    inputs = ragged([9, 4, 12, 1], vocab_size=128)
    for options in ({}, {"eos_token_id": list(range(3, 40))}, {"prefill_chunk_size": 5, "repetition_penalty": 1.2}):
        common = {"max_new_tokens": NUM_NEW} | options
        expected = greedy(target, **inputs, **common)
        for drafter in (tiny_drafter(target), OracleDrafter.for_target(target, expected[0, 3:], hit_rate=0.8)):
            assert torch.equal(greedy(target, **inputs, **common, assistant_model=drafter), expected)


def test_what_rows_cannot_share_runs_one_by_one(caplog):
    target = tiny_target()
    inputs = ragged([3, 6])
    expected = greedy(target, **inputs, max_new_tokens=8, return_dict_in_generate=True, output_hidden_states=True)
    got = greedy(
        target, **inputs, max_new_tokens=8, return_dict_in_generate=True, output_hidden_states=True,
        assistant_model=tiny_drafter(target),
    )  # fmt: skip
    assert torch.equal(got.sequences, expected.sequences)
    for mine, theirs in zip(got.hidden_states[1:], expected.hidden_states[1:], strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert "one after the other" in caplog.text


def test_a_time_limit_is_refused_where_rows_run_one_by_one():
    target = tiny_target()
    common = {"return_dict_in_generate": True, "output_hidden_states": True, "max_new_tokens": 4, "max_time": 60.0}
    with pytest.raises(UnsupportedGenerationError, match="max_time would be used up.*leave it"):
        greedy(target, **ragged([3, 6]), **common, assistant_model=tiny_drafter(target))
    del common["output_hidden_states"]
    assert greedy(target, **ragged([3, 6]), **common, assistant_model=tiny_drafter(target)).sequences.shape == (2, 10)


def test_time_that_runs_out_ends_all_rows():
    target = tiny_target()
    inputs = ragged([3, 6, 4])
    output = greedy(target, **inputs, max_new_tokens=500, max_time=0.0, assistant_model=tiny_drafter(target))
    assert output.shape == (3, 7)


class NamesEndTokens(EndsOnMultiples):
    eos_token_id = torch.tensor([3])


def test_rows_behind_the_stop_of_a_criterion_that_names_end_tokens_are_padded():
    target = tiny_target()
    whole, inputs = prefixes_of_one_text(target, 4)
    common = {"max_new_tokens": NUM_NEW, "stopping_criteria": [NamesEndTokens()]}
    expected = greedy(target, **inputs, **common)
    assert (expected == 0).any()
    for drafter in (tiny_drafter(target), OracleDrafter.for_target(target, whole, hit_rate=0.8)):
        assert torch.equal(together(target, drafter, inputs, **common), expected)


def test_the_prompt_runs_before_the_target_is_made_ready_for_decoding(monkeypatch):
    """What transformers then does to mixtures of experts copies weights for each token."""
    target, order = tiny_target(), []
    prefill, ready = row_target.RowTarget.prefill, type(target)._optimize_model_for_decode
    monkeypatch.setattr(
        row_target.RowTarget, "prefill", lambda self, *a, **k: order.append("prompt") or prefill(self, *a, **k)
    )
    monkeypatch.setattr(type(target), "_optimize_model_for_decode", lambda self: order.append("ready") or ready(self))
    greedy(target, **ragged([3, 6]), max_new_tokens=4, assistant_model=tiny_drafter(target))
    assert order == ["prompt", "ready"]


def test_a_map_of_one_device_is_no_spread():
    target = tiny_target()
    target.hf_device_map = {"": "cpu"}
    assert row_target.why_not_together(target) is None
    target.hf_device_map = {"model": "cpu", "lm_head": "disk"}
    assert "spread over devices" in row_target.why_not_together(target)
