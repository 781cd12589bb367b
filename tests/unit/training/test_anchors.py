"""Anchor blocks against a slow reference in plain Python."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dspark_hf.training.anchors import build_blocks, possible_anchors, sample_anchors


def slow_anchors(mask):
    return [i for i in range(len(mask) - 1) if mask[i] and mask[i + 1]]


def slow_slots(mask, anchor, size):
    """`(law position, previous position, next position)` of each supervised slot."""
    slots = []
    for k in range(1, size + 1):
        run = range(anchor, anchor + k + 1)
        if run[-1] >= len(mask) or not all(mask[i] for i in run):
            break
        slots.append((anchor + k - 1, anchor + k - 1, anchor + k))
    return slots


masks = st.lists(st.booleans(), min_size=1, max_size=24)


def check(rows, size, anchors=None):
    """Build the blocks of ragged `rows` and compare every slot."""
    length = max(map(len, rows))
    anchors = [slow_anchors(row) for row in rows] if anchors is None else anchors
    width = max(1, *map(len, anchors))
    ids, mask = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length, dtype=torch.bool)
    chosen = torch.full((len(rows), width), -1)
    for r, row in enumerate(rows):
        ids[r, : len(row)] = torch.arange(len(row)) + 100 * (r + 1)
        mask[r, : len(row)] = torch.tensor(row)
        chosen[r, : len(anchors[r])] = torch.tensor(anchors[r], dtype=torch.long)
    blocks = build_blocks(ids, mask, chosen, size)
    shape = (len(rows), width, size)
    assert {tuple(x.shape) for x in (blocks.previous_tokens, blocks.next_tokens, blocks.is_supervised)} == {shape}
    assert blocks.law_positions.shape == shape and blocks.anchor_positions.shape == shape[:2]
    for r, row in enumerate(rows):
        for a in range(width):
            anchor = int(chosen[r, a])
            expected = [] if anchor < 0 else slow_slots(row, anchor, size)
            supervised = blocks.is_supervised[r, a].tolist()
            assert supervised == [True] * len(expected) + [False] * (size - len(expected))
            assert int(blocks.anchor_positions[r, a]) == max(anchor, 0)
            for k, (law, previous, following) in enumerate(expected):
                assert int(blocks.law_positions[r, a, k]) == law
                assert int(blocks.previous_tokens[r, a, k]) == int(ids[r, previous])
                assert int(blocks.next_tokens[r, a, k]) == int(ids[r, following])
            if anchor >= 0:
                assert int(blocks.previous_tokens[r, a, 0]) == int(ids[r, anchor])
            # What no slot is asked is still read by gathers, so it must lie inside.
            assert 0 <= int(blocks.law_positions[r, a].min()) <= int(blocks.law_positions[r, a].max()) < length


@settings(max_examples=30, deadline=None)
@given(rows=st.lists(masks, min_size=1, max_size=3), size=st.integers(1, 7))
@example(rows=[[True]], size=4)
@example(rows=[[True] * 9, [True, True], [False] * 4], size=4)
@example(rows=[[False, True, True, False, True, True, True, False]], size=3)
def test_blocks_equal_the_slow_reference(rows, size):
    check(rows, size)


@settings(max_examples=20, deadline=None)
@given(row=st.lists(st.booleans(), min_size=2, max_size=16), size=st.integers(1, 5), data=st.data())
def test_any_position_as_an_anchor(row, size, data):
    """A block whose anchor is not in the mask supervises nothing."""
    check([row], size, [data.draw(st.lists(st.integers(0, len(row) - 1), max_size=4))])


@settings(max_examples=30, deadline=None)
@given(row=masks, max_anchors=st.integers(1, 12), seed=st.integers(0, 2**63 - 1))
def test_sampled_anchors(row, max_anchors, seed):
    mask = torch.tensor(row)
    possible = slow_anchors(row)
    assert possible_anchors(mask).tolist() == possible
    draws = [sample_anchors(mask, max_anchors, torch.Generator().manual_seed(seed)).tolist() for _ in range(2)]
    assert draws[0] == draws[1] == sorted(set(draws[0]))
    assert set(draws[0]) <= set(possible)
    assert len(draws[0]) == min(max_anchors, len(possible))


def test_every_anchor_is_drawn_about_as_often():
    mask = torch.ones(11, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(10)
    for _ in range(600):
        counts[sample_anchors(mask, 3, generator)] += 1
    # 180 expected, standard deviation 11
    assert counts.sum() == 1800 and counts.min() > 130 and counts.max() < 230
