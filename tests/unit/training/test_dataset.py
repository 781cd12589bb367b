"""Draws, orders and batches: the same in every run, whatever came before."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from dspark_hf.training.dataset import BATCHES_PER_GROUP, AnchorDataset, LengthGroupedEpochs, collate
from dspark_hf.training.features import TargetFeatures
from dspark_hf.training.records import TrainingSequence


def sequences(count=6, length=20):
    made = []
    for i in range(count):
        ids = torch.arange(length + i) + 1
        made.append(TrainingSequence(str(i), ids, torch.arange(length + i) >= 3))
    return made


def dataset(seed=0, **options):
    return AnchorDataset(sequences(), max_anchors=4, seed=seed, **options)


def anchors(data, draw):
    return data[draw]["anchors"].tolist()


def test_draws_do_not_depend_on_the_order_of_access():
    draws = [(epoch, index) for epoch in range(3) for index in range(6)]
    forwards, data = dataset(), dataset()
    expected = {draw: anchors(forwards, draw) for draw in draws}
    torch.manual_seed(123)
    assert {draw: anchors(data, draw) for draw in reversed(draws)} == expected
    assert {draw: anchors(pickle.loads(pickle.dumps(data)), draw) for draw in draws} == expected


def test_draws_differ_between_epochs_sequences_and_seeds():
    data = dataset()
    assert anchors(data, (0, 1)) != anchors(data, (1, 1))
    assert len({str(anchors(data, (epoch, 2))) for epoch in range(20)}) > 15
    assert len({str(anchors(data, (0, index))) for index in range(6)}) > 3
    assert anchors(dataset(1), (0, 1)) != anchors(data, (0, 1))
    assert anchors(data, 1) == anchors(data, (0, 1))
    assert len(data) == 6


def test_draws_leave_the_global_generator_alone():
    state = torch.get_rng_state()
    dataset()[(3, 2)]
    assert torch.equal(state, torch.get_rng_state())


def test_neighbouring_seeds_do_not_repeat_each_other():
    """seed + 1 at one place must not be seed at another, as with sums."""
    seen = [str(anchors(dataset(seed), (epoch, index))) for seed in range(4) for epoch in range(4) for index in (4, 5)]
    assert len(set(seen)) > 0.9 * len(seen)


def test_cached_features_are_those_of_the_sequence():
    cache = [
        TargetFeatures(torch.full((1, 20, 8), 1.0 * i), torch.full((1, 20, 4), -1.0 * i), torch.full((1, 20), i + 0.5))
        for i in range(9)
    ]
    data = dataset(cache=cache, cache_indices=[3, 1, 4, 8, 5, 0])
    for index, place in enumerate([3, 1, 4, 8, 5, 0]):
        item = data[(1, index)]
        assert item["features"].shape == (20, 8) and bool((item["features"] == place).all())
        assert item["final_hidden"].shape == (20, 4) and bool((item["final_hidden"] == -place).all())
        assert item["log_normalizer"].shape == (20,) and bool((item["log_normalizer"] == place + 0.5).all())
    assert bool((dataset(cache=cache)[(0, 2)]["features"] == 2).all())


def test_collate_pads_on_the_right():
    items = [
        {
            "input_ids": torch.arange(n) + 1,
            "loss_mask": torch.ones(n, dtype=torch.bool),
            "anchors": torch.arange(a),
            "features": torch.ones(n, 2),
        }
        for n, a in ((5, 1), (3, 2))
    ]
    batch = collate(items)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 0, 0]]
    assert batch["loss_mask"].tolist() == [[True] * 5, [True] * 3 + [False] * 2]
    assert batch["loss_mask"].dtype == torch.bool
    assert batch["anchors"].tolist() == [[0, -1], [0, 1]]
    assert batch["features"].shape == (2, 5, 2) and batch["features"][1, 3:].sum() == 0


# -- orders ---------------------------------------------------------------------------------------------------------


def order(sampler, epoch):
    sampler.set_epoch(epoch)
    return list(sampler)


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 99), min_size=1, max_size=60),
    batch_size=st.integers(1, 9),
    seed=st.integers(0, 2**31),
)
def test_each_epoch_has_every_sequence_once_but_for_a_short_last_step(lengths, batch_size, seed):
    sampler = LengthGroupedEpochs(lengths, batch_size, seed)
    surplus = len(lengths) % batch_size if len(lengths) >= batch_size else 0
    assert len(sampler) == len(lengths) - surplus
    for epoch in (0, 1, 5):
        drawn = order(sampler, epoch)
        assert {e for e, _ in drawn} == {epoch}
        indices = [i for _, i in drawn]
        assert len(set(indices)) == len(indices) == len(sampler) and set(indices) <= set(range(len(lengths)))
        assert drawn == order(LengthGroupedEpochs(lengths, batch_size, seed), epoch)


def test_orders_differ_between_epochs_and_seeds():
    lengths = [10 + i % 7 for i in range(50)]
    sampler = LengthGroupedEpochs(lengths, 4, 0)
    orders = [[i for _, i in order(sampler, epoch)] for epoch in range(4)]
    assert len(set(map(tuple, orders))) == 4
    assert [i for _, i in order(LengthGroupedEpochs(lengths, 4, 1), 0)] != orders[0]


def test_an_epoch_does_not_depend_on_the_epochs_before():
    lengths = list(range(1, 41))
    sampler = LengthGroupedEpochs(lengths, 4, 7)
    wanted = order(sampler, 3)
    for epoch in (0, 5, 1):
        list(sampler)
        order(sampler, epoch)
    torch.manual_seed(9)
    assert order(sampler, 3) == wanted == list(sampler)


@pytest.mark.parametrize("count", [64, 61, 5 * BATCHES_PER_GROUP * 4 + 3])
def test_batches_hold_similar_lengths(count):
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 1000, (count,), generator=g).tolist()
    drawn = [lengths[i] for _, i in order(LengthGroupedEpochs(lengths, 4, 0), 2)]
    count = len(drawn)
    batches = [drawn[i : i + 4] for i in range(0, count, 4)]
    assert all(batch == sorted(batch, reverse=True) for batch in batches)
    padding = sum(max(batch) * len(batch) - sum(batch) for batch in batches)
    in_order = [lengths[i : i + 4] for i in range(0, count, 4)]
    unsorted_padding = sum(max(batch) * len(batch) - sum(batch) for batch in in_order)
    assert padding < 0.4 * unsorted_padding
    longest = [max(batch) for batch in batches[:-1]]
    assert longest != sorted(longest, reverse=True), "batches of one length after the other would bias the steps"


def test_a_loader_with_workers_draws_the_same(tmp_path):
    data = dataset()
    sampler = LengthGroupedEpochs([len(s) for s in data.sequences], 2, 0)
    sampler.set_epoch(4)
    loader = DataLoader(data, batch_size=2, sampler=sampler, collate_fn=collate, num_workers=0)
    expected = [anchors(data, draw) for draw in sampler]
    got = [row[row >= 0].tolist() for batch in loader for row in batch["anchors"]]
    assert got == expected


def test_no_sequence_is_left_out_for_good():
    """Few sequences make one group; which of them wait must not depend on their lengths."""
    sampler = LengthGroupedEpochs(list(range(1, 21)), 8, 0)
    drawn = [i for epoch in range(30) for _, i in order(sampler, epoch)]
    assert set(drawn) == set(range(20))
