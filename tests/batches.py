"""Batches of tiny prompts."""

import torch
from tiny import greedy, random_ids

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
    whole = greedy(target, random_ids(start), max_new_tokens=60)[0]
    return whole, padded([whole[: start + 3 * (row % 5) + row // 5] for row in range(num_rows)])
