"""Packed blocks: the attention against a dense mask, and the drafter's forward against one block at a time."""

import itertools

import pytest
import torch
from tiny import tiny_drafter, tiny_target
from torch.nn import functional as F

from dspark_hf.model.context_cache import DraftContextCache
from dspark_hf.model.draft_window import DraftWindow
from dspark_hf.model.packed_blocks import PackedBlocks, attend_packed

GQA = [(4, 4), (4, 2), (6, 2), (4, 1), (1, 1)]  # query heads, key/value heads
# Two rows: an anchor without context, one that sees all of it, twice the same, and padding (0) at the end.
ANCHORS = torch.tensor([[0, 1, 5, 9], [3, 3, 0, 0]])
CONTEXT = 9


def attention_inputs(heads, kv_heads, size, context=CONTEXT, num_blocks=4):
    g = torch.Generator().manual_seed(heads * 10 + kv_heads)
    new = {"generator": g, "dtype": torch.float64}
    queries = torch.randn(2, heads, num_blocks * size, 8, **new)
    keys = torch.randn(2, kv_heads, context + num_blocks * size, 8, **new)
    values = torch.randn(2, kv_heads, context + num_blocks * size, 8, **new)
    return queries, keys, values


def test_dense_mask_entry_by_entry():
    size = 3
    mask = PackedBlocks(ANCHORS, size).dense(CONTEXT)
    assert mask.shape == (2, 1, 12, CONTEXT + 12)
    for row in range(2):
        for query in range(12):
            for key in range(CONTEXT + 12):
                if key < CONTEXT:
                    sees = key < int(ANCHORS[row, query // size])
                else:
                    sees = (key - CONTEXT) // size == query // size
                assert bool(mask[row, 0, query, key]) == sees


@pytest.mark.parametrize(("heads", "kv_heads"), GQA)
@pytest.mark.parametrize("size", [1, 4])
def test_attention_equals_sdpa_with_the_dense_mask(heads, kv_heads, size):
    check_attention(heads, kv_heads, size, CONTEXT)


def test_attention_without_any_context():
    check_attention(4, 2, 4, 0)


def check_attention(heads, kv_heads, size, context):
    queries, keys, values = (x.requires_grad_() for x in attention_inputs(heads, kv_heads, size, context))
    blocks = PackedBlocks(ANCHORS.clamp(max=context), size)
    expected = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=blocks.dense(context), scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    got = attend_packed(queries, keys, values, blocks, scaling=0.3)
    assert got.shape == (2, 4 * size, heads, 8)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)
    upstream = torch.randn(got.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    grads = [torch.autograd.grad(output, (queries, keys, values), upstream) for output in (got, expected)]
    for grad, expected_grad in zip(*grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, atol=1e-12, rtol=0)


def test_control_another_mask_gives_another_result():
    inputs = attention_inputs(4, 2, 3)
    got = attend_packed(*inputs, PackedBlocks(ANCHORS, 3), scaling=0.3)
    seen_one_more = attend_packed(*inputs, PackedBlocks(ANCHORS + 1, 3), scaling=0.3)
    differs = (got - seen_one_more).abs().amax(dim=(2, 3)).view(2, 4, 3).amax(dim=-1) > 1e-3
    assert differs.tolist() == [[True, True, True, False], [True] * 4]  # the last of row 0 saw everything before


# -- the drafter's forward ------------------------------------------------------------------------------------------


def packed_inputs(drafter, size=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    width = len(drafter.config.target_layer_ids) * drafter.config.hidden_size
    features = torch.randn(2, CONTEXT, width, generator=g)
    embeds = torch.randn(2, 4 * size, drafter.config.hidden_size, generator=g)
    return features, embeds


def forward(drafter, features, embeds, mask, size=4):
    positions = ANCHORS[:, :, None] + torch.arange(size)
    return drafter(
        embeds,
        positions.flatten(1),
        context_features=features,
        context_position_ids=torch.arange(CONTEXT).expand(2, -1),
        attention_mask=mask,
    ).last_hidden_state


def drafting_forward(drafter, features, block, anchor):
    """One block, its context put into a cache first, as when drafting."""
    cache = DraftContextCache(drafter.config.num_hidden_layers)
    if anchor:
        drafter.extend_cache(features[None, :anchor], torch.arange(anchor)[None], cache)
    positions = torch.arange(anchor, anchor + len(block))[None]
    return drafter(block[None], positions, cache=cache).last_hidden_state[0]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("options", [{}, {"qk_norm": False, "attention_bias": True}], ids=str)
@torch.no_grad()
def test_packed_forward_equals_the_dense_one_and_one_block_at_a_time(heads, kv_heads, options):
    drafter = tiny_drafter(tiny_target(), num_attention_heads=heads, num_key_value_heads=kv_heads, **options)
    features, embeds = packed_inputs(drafter)
    blocks = PackedBlocks(ANCHORS, 4)
    packed = forward(drafter, features, embeds, blocks)
    torch.testing.assert_close(packed, forward(drafter, features, embeds, blocks.dense(CONTEXT)), atol=1e-5, rtol=0)
    for row in range(2):
        for i, anchor in enumerate(ANCHORS[row].tolist()):
            part = slice(4 * i, 4 * i + 4)
            alone = drafting_forward(drafter, features[row], embeds[row, part], anchor)
            torch.testing.assert_close(packed[row, part], alone, atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_block_reads_its_context_and_itself_only():
    drafter = tiny_drafter(tiny_target())
    features, embeds = packed_inputs(drafter)
    blocks = PackedBlocks(ANCHORS, 4)

    def change(features, embeds):
        after = forward(drafter, features, embeds, blocks)
        return (after - before).abs().view(2, 4, -1).amax(dim=-1)[0]

    before = forward(drafter, features, embeds, blocks)
    for position in range(CONTEXT):
        changed = features.clone()
        changed[0, position] += 1.0
        moved = change(changed, embeds)
        for i, anchor in enumerate(ANCHORS[0].tolist()):
            assert (moved[i] > 1e-4) == (position < anchor), (position, anchor)
            assert position < anchor or moved[i] == 0.0
    for i in range(4):
        changed = embeds.clone()
        changed[0, 4 * i + 3] += 1.0
        assert (change(features, changed) > 1e-4).tolist() == [j == i for j in range(4)]


@torch.no_grad()
def test_rows_do_not_depend_on_each_other_nor_on_padding_of_the_context():
    drafter = tiny_drafter(tiny_target())
    features, embeds = packed_inputs(drafter)
    before = forward(drafter, features, embeds, PackedBlocks(ANCHORS, 4))
    changed = features.clone()
    changed[1, 3:] = 1e4  # no block of row 1 sees position 3
    changed[0] += 1.0
    after = forward(drafter, changed, embeds, PackedBlocks(ANCHORS, 4))
    assert torch.equal(before[1], after[1])


@torch.no_grad()
def test_half_precision_stays_half_and_near():
    drafter = tiny_drafter(tiny_target())
    features, embeds = packed_inputs(drafter)
    expected = forward(drafter, features, embeds, PackedBlocks(ANCHORS, 4))
    drafter = drafter.to(torch.bfloat16)
    got = forward(drafter, features.bfloat16(), embeds.bfloat16(), PackedBlocks(ANCHORS, 4))
    assert got.dtype == torch.bfloat16
    assert (got.float() - expected).abs().mean() < 0.1 * expected.abs().mean()


# -- windows and slots that do not look ahead ------------------------------------------------------------------------

WINDOWS = [
    DraftWindow(size, starts_at_anchor, is_causal)
    for size in (None, 1, 3, 6)
    for starts_at_anchor in (False, True)
    for is_causal in (False, True)
]
KINDS = ["sliding_attention", "full_attention"]


def seen_by_hand(window, slot, key, anchor):
    """Of a key in the block or before the anchor."""
    if window.is_causal and key > slot:
        return False
    if window.size is None or key > slot:
        return True
    if window.starts_at_anchor:
        return key >= anchor - window.size
    return slot - key < window.size


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows_entry_by_entry_and_attention_with_the_dense_mask(window):
    size = 3
    blocks = PackedBlocks(ANCHORS, size)
    mask = blocks.dense(CONTEXT, window)
    for row, query, key in itertools.product(range(2), range(12), range(CONTEXT + 12)):
        anchor, offset = int(ANCHORS[row, query // size]), query % size
        if key < CONTEXT:
            sees = key < anchor and seen_by_hand(window, anchor + offset, key, anchor)
        else:
            place = anchor + (key - CONTEXT) % size
            sees = (key - CONTEXT) // size == query // size and seen_by_hand(window, anchor + offset, place, anchor)
        assert bool(mask[row, 0, query, key]) == sees
    queries, keys, values = attention_inputs(4, 2, size)
    expected = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=0.3, enable_gqa=True)
    got = attend_packed(queries, keys, values, blocks, scaling=0.3, window=window)
    torch.testing.assert_close(got, expected.transpose(1, 2), atol=1e-12, rtol=0)


@pytest.mark.parametrize("window_start", ["slot", "anchor"])
@pytest.mark.parametrize("causal_layers", ["none", "sliding", "all"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_packed_sliding_forward_equals_one_block_at_a_time(window_start, causal_layers, attention):
    rules = {"window_start": window_start, "causal_layers": causal_layers, "sliding_window": 3, "layer_types": KINDS}
    drafter = tiny_drafter(tiny_target(), **rules)
    drafter.set_attn_implementation(attention)
    features, embeds = packed_inputs(drafter)
    packed = forward(drafter, features, embeds, PackedBlocks(ANCHORS, 4))
    full = forward(tiny_drafter(tiny_target()), features, embeds, PackedBlocks(ANCHORS, 4))
    assert (packed - full).abs().max() > 1e-3, "the windows must matter"
    for row in range(2):
        for i, anchor in enumerate(ANCHORS[row].tolist()):
            part = slice(4 * i, 4 * i + 4)
            alone = drafting_forward(drafter, features[row], embeds[row, part], anchor)
            torch.testing.assert_close(packed[row, part], alone, atol=1e-5, rtol=0)
