"""Each documented format, built from its keys and tensor names, drafts what an independent float64 reference drafts.

The reference reads the stored tensors and what the format's documentation says, none of this package's config.
"""

import pytest
import torch
from foreign import FIXTURES, LAYER_IDS, tiny_gemma4
from reference import block_hidden, greedy_block
from tiny import greedy, random_ids, tiny_target

from dspark_hf import DSparkDraftModel
from dspark_hf.decoding import candidate_generator

BATCH = [9, 4, 12]  # lengths of the rows
NARROWED = [name for name in FIXTURES if "sliding" in name or "causal" in name]


@pytest.fixture
def rounds(monkeypatch):
    """`(rows, texts, block)` of every round that a generate() call drafts: which rows, and the text of each."""
    seen = []
    original = candidate_generator.draft_block

    def spy(drafter, hidden, base_logits, prefix_ids, *args, **kwargs):
        block = original(drafter, hidden, base_logits, prefix_ids, *args, **kwargs)
        if isinstance(prefix_ids, torch.Tensor):
            rows, texts = (0,), [row.clone() for row in prefix_ids]
        else:
            rows = prefix_ids.rows
            texts = [row[:end].clone() for row, end in zip(prefix_ids.ids, prefix_ids.lengths, strict=True)]
        seen.append((rows, texts, block))
        return block

    monkeypatch.setattr(candidate_generator, "draft_block", spy)
    return seen


def target_of(name):
    return tiny_gemma4() if "gemma4" in name else tiny_target()


def expected_block(target, foreign, text):
    """Drafts and confidence logits after `text`, from the target's hidden states of the text alone."""
    stored = {name.removeprefix("logit_head."): tensor for name, tensor in foreign.tensors.items()}
    weights = {name: t.double() if t.is_floating_point() else t for name, t in stored.items()}
    anchor = len(text) - 1
    states = target(text[None], output_hidden_states=True).hidden_states
    features = torch.cat([states[k + 1][0, :anchor] for k in LAYER_IDS], dim=-1).double()
    mask = foreign.config.get("mask_token_id") or foreign.config["dflash_config"]["mask_token_id"]
    num_tokens = foreign.first_slot + foreign.num_drafts
    block_ids = torch.tensor([int(text[-1])] + [mask] * (num_tokens - 1))
    block = target.get_input_embeddings()(block_ids).double()
    hidden = block_hidden(weights, foreign.facts, features, block, anchor)
    anchor_hidden = hidden[0] if foreign.first_slot else None
    head = target.get_output_embeddings().weight.double()
    return greedy_block(
        weights,
        hidden[foreign.first_slot :],
        head,
        int(text[-1]),
        kind=foreign.head_kind,
        cap=foreign.cap,
        anchor_hidden=anchor_hidden,
    )


@torch.no_grad()
def check(target, foreign, rounds, padding):
    assert len(rounds) > 4
    for rows, texts, block in rounds:
        for row, (number, text) in enumerate(zip(rows, texts, strict=True)):
            drafts, confidences = expected_block(target, foreign, text[padding[number] :])
            num_slots = block.tokens.shape[1]
            assert block.tokens[row].tolist() == drafts[:num_slots]
            if confidences:
                assert block.confidence_logits[row].tolist() == pytest.approx(confidences[:num_slots], abs=1e-4)
            else:
                assert block.confidence_logits is None


@pytest.mark.parametrize(
    ("name", "attention"),
    [*((name, "sdpa") for name in FIXTURES), *((name, "eager") for name in ("deepspec_gemma4", *NARROWED))],
)
def test_one_row_drafts_what_the_reference_drafts(name, attention, rounds, tmp_path):
    target, foreign = target_of(name), FIXTURES[name]()
    drafter = DSparkDraftModel.from_pretrained(foreign.write(tmp_path), attn_implementation=attention).eval()
    ids = random_ids(9)
    plain = greedy(target, ids, max_new_tokens=16)
    assert torch.equal(greedy(target, ids, max_new_tokens=16, assistant_model=drafter), plain)
    check(target, foreign, rounds, [0])
    assert drafter.config.block_size == foreign.num_drafts


@pytest.mark.parametrize(
    ("name", "layout"),
    [*((name, "padded") for name in FIXTURES), *((name, "flat") for name in ("deepspec_gemma4", "zlab", *NARROWED))],
)
def test_rows_of_a_batch_draft_what_the_reference_drafts(name, layout, rounds, tmp_path):
    target, foreign = target_of(name), FIXTURES[name]()
    drafter = DSparkDraftModel.from_pretrained(foreign.write(tmp_path)).eval()
    ids = torch.stack([torch.nn.functional.pad(random_ids(n, seed=n)[0], (max(BATCH) - n, 0)) for n in BATCH])
    inputs = {
        "input_ids": ids, "attention_mask": (ids > 0).long(), "pad_token_id": 0, "max_new_tokens": 14,
    }  # fmt: skip
    plain = greedy(target, **inputs)
    assert torch.equal(greedy(target, **inputs, assistant_model=drafter, verification_layout=layout), plain)
    assert any(len(rows) == len(BATCH) for rows, _, _ in rounds)
    check(target, foreign, rounds, [max(BATCH) - n for n in BATCH])
