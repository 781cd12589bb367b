"""Batches of tiny prompts, and what every batch has to say, on whatever device its target stands."""

import torch
from tiny import OracleDrafter, greedy, random_ids, tiny_drafter

from dspark_hf import record_speculation

POLICIES = [
    {"verification_policy": "full"},
    {"verification_policy": "threshold", "assistant_confidence_threshold": 0.3},
]


def padded(rows):
    """Ids and mask int64 `[rows, longest]` of prompts int64 `[length]`, padded on the left with 0."""
    longest = max(len(row) for row in rows)
    ids = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in rows])
    mask = torch.stack([(torch.arange(longest) >= longest - len(row)).long() for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "pad_token_id": 0}


def ragged(lengths, vocab_size=61):
    return padded([random_ids(n, vocab_size=vocab_size, seed=i)[0] for i, n in enumerate(lengths)])


def prefixes_of_one_text(target, num_rows, start=4):
    """Prompts that all go on as the same greedy text, so that one oracle knows what each row will say."""
    whole = greedy(target, random_ids(start).to(target.device), max_new_tokens=60)[0].cpu()
    prompts = padded([whole[: start + 3 * (row % 5) + row // 5] for row in range(num_rows)])
    return whole, on_device_of(target, prompts)


def on_device_of(target, inputs):
    return {key: value.to(target.device) if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}


def together(target, drafter, inputs, **options):
    """Greedy generation with a drafter; raises unless the rows shared their forwards."""
    with record_speculation() as report:
        output = target.generate(**inputs, do_sample=False, assistant_model=drafter, **options)
    num_rows = inputs["input_ids"].shape[0]
    assert report.num_calls == num_rows
    assert report.num_target_forwards < report.num_rounds + num_rows or num_rows == 1
    return output


def check_plain_and_solo(target, num_rows, num_new, **options):
    """Ragged rows say what a plain batch says, and what each says alone, whatever the drafter."""
    inputs = on_device_of(target, ragged([3 + 5 * row % 11 for row in range(num_rows)]))
    expected = greedy(target, **inputs, max_new_tokens=num_new)
    for settings in ({}, {"markov_head_type": "rnn"}, {"draft_vocab_size": 40}):
        drafter = tiny_drafter(target, **settings).to(target.device)
        assert torch.equal(together(target, drafter, inputs, max_new_tokens=num_new, **options), expected)
    for row in range(num_rows):
        ids = inputs["input_ids"][row : row + 1, inputs["attention_mask"][row] == 1]
        solo = greedy(target, ids, max_new_tokens=num_new)
        assert torch.equal(solo[0, ids.shape[1] :], expected[row, -num_new:])


def check_layout(target, num_rows, num_new, layout, **options):
    """Rows that accept different numbers of drafts say what a plain batch says, with stops and a processor too."""
    whole, inputs = prefixes_of_one_text(target, num_rows)
    for more in ({}, {"eos_token_id": list(range(3, 12)), "repetition_penalty": 1.3}):
        common = {"max_new_tokens": num_new} | more
        expected = greedy(target, **inputs, **common)
        for drafter in (tiny_drafter(target), OracleDrafter.for_target(target, whole, hit_rate=0.7)):
            drafter.to(target.device)
            got = greedy(target, **inputs, **common, **options, verification_layout=layout, assistant_model=drafter)
            assert torch.equal(got, expected)
