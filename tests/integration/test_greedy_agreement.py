"""Greedy float32 output equals plain generate, token by token, on tiny random targets."""

import pytest
import torch
from tiny import OracleDrafter, greedy, random_ids, tiny_drafter, tiny_target

POLICIES = [
    {"verification_policy": "full"},
    {"verification_policy": "threshold", "assistant_confidence_threshold": 0.3},
    {"verification_policy": "threshold", "assistant_confidence_threshold": 0.9},
]


def policy_id(policy):
    return "-".join(str(value) for value in policy.values())


def drafters(target, ids, num_new):
    whole = greedy(target, ids, max_new_tokens=num_new + 8)[0]
    return {
        "untrained": tiny_drafter(target),
        "oracle": OracleDrafter.for_target(target, whole),
        "always_right": OracleDrafter.for_target(target, whole, hit_rate=1.0),
        "rank_0": tiny_drafter(target, markov_rank=0, confidence_head_with_markov=False),
        "rnn": tiny_drafter(target, markov_head_type="rnn"),
        "gated": tiny_drafter(target, markov_head_type="gated"),
    }


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("policy", POLICIES, ids=policy_id)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_every_drafter_and_policy(kind, policy, cache):
    target, ids = tiny_target(kind), random_ids(9)
    expected = greedy(target, ids, max_new_tokens=32)
    for name, drafter in drafters(target, ids, 32).items():
        got = greedy(
            target,
            ids,
            max_new_tokens=32,
            assistant_model=drafter,
            cache_implementation=cache,
            **policy,
        )
        assert torch.equal(got, expected), name


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("num_new", range(1, 13))
def test_every_length(num_new, cache):
    target, ids = tiny_target(), random_ids(5)
    whole = greedy(target, ids, max_new_tokens=24)[0]
    for hit_rate in (0.7, 1.0):
        drafter = OracleDrafter.for_target(target, whole, hit_rate=hit_rate)
        output = greedy(
            target, ids, max_new_tokens=num_new, assistant_model=drafter, cache_implementation=cache,
            return_dict_in_generate=True,
        )  # fmt: skip
        assert torch.equal(output.sequences[0], whole[: 5 + num_new])
        assert output.cache.get_seq_length() == 5 + num_new - 1


def test_right_drafts_save_target_forwards():
    target, ids = tiny_target(), random_ids(5)
    whole = greedy(target, ids, max_new_tokens=72)[0]
    drafter = OracleDrafter.for_target(target, whole, hit_rate=1.0)
    report = greedy(target, ids, max_new_tokens=64, assistant_model=drafter, return_dict_in_generate=True).speculation
    assert report.num_new_tokens == 64
    assert report.num_target_forwards == 1 + 8  # the prompt, then 8 tokens a round
    assert report.tau == pytest.approx(7.875)  # the last round may draft 6 only
    assert report.conditional_acceptance == [1.0] * 7


@pytest.mark.parametrize("num_draft", [1, 2, 3])
def test_shorter_drafts_per_call(num_draft):
    target, ids = tiny_target(), random_ids(5)
    whole = greedy(target, ids, max_new_tokens=40)[0]
    drafter = OracleDrafter.for_target(target, whole, hit_rate=1.0)
    output = greedy(
        target, ids, max_new_tokens=32, assistant_model=drafter, num_assistant_tokens=num_draft,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert torch.equal(output.sequences[0], whole[:37])
    assert len(output.speculation.verified_per_slot) == num_draft


def test_left_padding():
    target = tiny_target()
    ids = random_ids(9)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], dim=1)
    mask = torch.cat([torch.zeros(1, 4, dtype=torch.long), torch.ones_like(ids)], dim=1)
    expected = greedy(target, padded, attention_mask=mask, max_new_tokens=24, pad_token_id=0)
    solo = greedy(target, ids, max_new_tokens=40)[0]
    for drafter in (tiny_drafter(target), OracleDrafter.for_target(target, solo, hit_rate=1.0)):
        output = greedy(
            target, padded, attention_mask=mask, max_new_tokens=24, pad_token_id=0, assistant_model=drafter,
            return_dict_in_generate=True,
        )  # fmt: skip
        assert torch.equal(output.sequences, expected)
    # The oracle is indexed by position, so it can only be right if padding does not count.
    assert output.speculation.tau > 6


def test_drafts_do_not_depend_on_padding():
    target, ids = tiny_target(), random_ids(9)
    drafter = tiny_drafter(target)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], dim=1)
    mask = torch.cat([torch.zeros(1, 4, dtype=torch.long), torch.ones_like(ids)], dim=1)
    common = {
        "max_new_tokens": 24,
        "assistant_model": drafter,
        "return_dict_in_generate": True,
        "pad_token_id": 0,
    }
    without = greedy(target, ids, **common).speculation
    with_padding = greedy(target, padded, attention_mask=mask, **common).speculation
    assert without.accepted_per_slot == with_padding.accepted_per_slot


@pytest.mark.parametrize("chunk", [1, 3, 8, 100])
def test_prefill_in_chunks(chunk):
    target, ids = tiny_target(), random_ids(17)
    drafter = tiny_drafter(target)
    expected = greedy(target, ids, max_new_tokens=16)
    got = greedy(
        target, ids, max_new_tokens=16, assistant_model=drafter, prefill_chunk_size=chunk,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert torch.equal(got.sequences, expected)
    assert got.speculation.num_target_forwards - got.speculation.num_rounds == -(-17 // chunk)


def test_prompts_longer_than_one_projection_chunk(monkeypatch):
    from dspark_hf.decoding import candidate_generator

    target, ids = tiny_target(), random_ids(40)
    drafter = tiny_drafter(target)
    common = {"max_new_tokens": 16, "assistant_model": drafter, "return_dict_in_generate": True}
    whole = greedy(target, ids, **common)
    monkeypatch.setattr(candidate_generator, "CONTEXT_CHUNK_TOKENS", 7)
    chunked = greedy(target, ids, **common)
    assert torch.equal(whole.sequences, chunked.sequences)
    assert whole.speculation.accepted_per_slot == chunked.speculation.accepted_per_slot


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[3], [4, 5]]},
        {"min_new_tokens": 20, "eos_token_id": 7},
        {"forced_eos_token_id": 7, "eos_token_id": 7},
        {"suppress_tokens": [1, 2, 3]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_logits_processors(options):
    target, ids = tiny_target(), random_ids(9)
    expected = greedy(target, ids, max_new_tokens=32, **options)
    assert torch.equal(
        greedy(target, ids, max_new_tokens=32, assistant_model=tiny_drafter(target), **options),
        expected,
    )
