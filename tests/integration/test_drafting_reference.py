"""Every round of a real generation drafts what the slow float64 reference drafts from the committed text alone.

The reference knows nothing of caches, chunks or roll-back: it takes the target's hidden states of the whole text, reads
feature layer k as `hidden_states[k + 1]` (the output of decoder layer k), uses the positions strictly before the anchor
as context, and puts the block at the anchor's position.
"""

import pytest
import torch
from batches import ragged
from reference import block_hidden, double_weights, greedy_block
from tiny import greedy, random_ids, tiny_drafter, tiny_target

from dspark_hf.decoding import candidate_generator


def text_of(prefix_ids):
    """The text of one row, int64 `[1, length]`, also where it runs on the caches of a batch."""
    whole = prefix_ids if isinstance(prefix_ids, torch.Tensor) else prefix_ids.ids[:, : prefix_ids.lengths[0]]
    return whole.clone()


@pytest.fixture
def rounds(monkeypatch):
    """`(text, block)` of every round that a generate() call drafts."""
    seen = []
    original = candidate_generator.draft_block

    def spy(drafter, hidden, base_logits, prefix_ids, *args, **kwargs):
        block = original(drafter, hidden, base_logits, prefix_ids, *args, **kwargs)
        seen.append((text_of(prefix_ids), block))
        return block

    monkeypatch.setattr(candidate_generator, "draft_block", spy)
    return seen


@pytest.mark.parametrize("layers", [[0, 1, 2], [-1, 2], [1]], ids=str)
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 4}, {"cache_implementation": "static"}], ids=str)
@torch.no_grad()
def test_rounds_equal_the_reference(rounds, layers, padding, options):
    target = tiny_target()
    drafter = tiny_drafter(target, target_layer_ids=layers)
    ids = torch.cat([torch.zeros(1, padding, dtype=torch.long), random_ids(9)], dim=1)
    mask = (torch.arange(9 + padding) >= padding).long()[None]
    greedy(target, ids, attention_mask=mask, max_new_tokens=40, pad_token_id=0, assistant_model=drafter, **options)
    assert len(rounds) > 10
    weights, config = double_weights(drafter), drafter.config
    head = target.lm_head.weight.double()
    embedding = target.get_input_embeddings().weight.double()
    for text, block in rounds:
        text = text[:, padding:]
        anchor = text.shape[1] - 1
        states = target(text, output_hidden_states=True).hidden_states
        features = torch.cat([states[k + 1][0, :anchor] for k in layers], dim=-1).double()
        block_ids = [int(text[0, -1])] + [config.mask_token_id] * (config.block_size - 1)
        hidden = block_hidden(weights, config, features, embedding[block_ids], anchor)
        drafts, confidences = greedy_block(weights, hidden, head, int(text[0, -1]))
        num_slots = block.tokens.shape[1]
        assert block.tokens[0].tolist() == drafts[:num_slots]
        assert block.confidence_logits[0].tolist() == pytest.approx(confidences[:num_slots], abs=1e-4)


def test_each_committed_token_is_projected_once():
    target, ids = tiny_target(), random_ids(9)
    drafter = tiny_drafter(target)
    num_projected = []
    drafter.fc.register_forward_hook(lambda module, inputs, output: num_projected.append(inputs[0].shape[1]))
    output = greedy(target, ids, max_new_tokens=24, assistant_model=drafter)
    # all but what the last rounds committed, which no draft follows
    assert output.shape[1] - 6 <= sum(num_projected) <= output.shape[1] - 1


LAYOUTS = {
    "fill_in": {"draft_layout": "fill_in", "markov_head_type": "rnn"},
    "sliding": {
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "window_start": "anchor",
        "causal_layers": "sliding",
    },
    "fill_in_sliding": {
        "draft_layout": "fill_in", "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3,
        "causal_layers": "all",
    },
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "options", [{}, {"prefill_chunk_size": 4}, {"cache_implementation": "static"}, {"num_assistant_tokens": 2}], ids=str
)
@torch.no_grad()
def test_rounds_of_other_layouts_equal_the_reference(rounds, layout, options):
    target, padding, layers = tiny_target(), 3, [0, 2]
    drafter = tiny_drafter(target, target_layer_ids=layers, **LAYOUTS[layout])
    ids = torch.cat([torch.zeros(1, padding, dtype=torch.long), random_ids(9)], dim=1)
    mask = (torch.arange(9 + padding) >= padding).long()[None]
    common = {"attention_mask": mask, "max_new_tokens": 24, "pad_token_id": 0}
    plain = greedy(target, ids, **common)
    assert torch.equal(greedy(target, ids, **common, assistant_model=drafter, **options), plain)
    weights, config = double_weights(drafter), drafter.config
    head = target.lm_head.weight.double()
    embedding = target.get_input_embeddings().weight.double()
    first = 1 if config.draft_layout == "fill_in" else 0
    for text, block in rounds:
        text = text[:, padding:]
        anchor = text.shape[1] - 1
        states = target(text, output_hidden_states=True).hidden_states
        features = torch.cat([states[k + 1][0, :anchor] for k in layers], dim=-1).double()
        block_ids = [int(text[0, -1])] + [config.mask_token_id] * (first + config.block_size - 1)
        hidden = block_hidden(weights, config, features, embedding[block_ids], anchor)
        drafts, confidences = greedy_block(
            weights, hidden[first:], head, int(text[0, -1]), kind=config.markov_head_type,
            anchor_hidden=hidden[0] if first else None,
        )  # fmt: skip
        num_slots = block.tokens.shape[1]
        assert block.tokens[0].tolist() == drafts[:num_slots]
        assert block.confidence_logits[0].tolist() == pytest.approx(confidences[:num_slots], abs=1e-4)


ROW_LAYOUTS = LAYOUTS | {
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3},
    "gemma4": {
        "layer_style": "gemma4", "attention_k_eq_v": True, "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("layout", ROW_LAYOUTS)
@pytest.mark.parametrize("options", [{"verification_layout": "padded"}, {"verification_layout": "flat"}], ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_rows_of_a_batch_draft_what_they_draft_alone(monkeypatch, layout, options, attention):
    seen, original, paddings = [], candidate_generator.draft_block, [6, 0, 4]

    def spy(drafter, hidden, base_logits, prefix_ids, *args, **kwargs):
        block = original(drafter, hidden, base_logits, prefix_ids, *args, **kwargs)
        if isinstance(prefix_ids, torch.Tensor):
            texts = [prefix_ids[0]]
        else:
            places = zip(prefix_ids.ids, prefix_ids.rows, prefix_ids.lengths, strict=True)
            texts = [ids[paddings[row] : length] for ids, row, length in places]
        numbers = zip(texts, block.tokens, block.confidence_logits, strict=True)
        seen.extend((tuple(text.tolist()), tokens.tolist(), logits) for text, tokens, logits in numbers)
        return block

    monkeypatch.setattr(candidate_generator, "draft_block", spy)
    target, inputs = tiny_target(), ragged([3, 9, 5])
    drafter = tiny_drafter(target, **ROW_LAYOUTS[layout])
    drafter.set_attn_implementation(attention)
    texts = greedy(target, **inputs, max_new_tokens=14, assistant_model=drafter, **options)
    together = list(seen)
    seen.clear()
    for text, padding in zip(texts, paddings, strict=True):
        greedy(target, text[None, padding:9], max_new_tokens=14, assistant_model=drafter)
    alone = {text: numbers for text, *numbers in seen}
    # With others a row drafts also where it has no room for a draft.
    assert len(alone) > 30 and {text for text, *_ in together} >= set(alone)
    for text, tokens, logits in together:
        if text not in alone:
            continue
        num_slots = min(len(tokens), len(alone[text][0]))
        assert tokens[:num_slots] == alone[text][0][:num_slots]
        torch.testing.assert_close(logits[:num_slots], alone[text][1][:num_slots], atol=1e-4, rtol=0)
