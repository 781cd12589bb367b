"""Sequences, anchors and cached features as batches, the same in every run that starts or resumes at a step."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, Sampler

from .anchors import sample_anchors
from .feature_cache import FeatureCache
from .records import TrainingSequence

# Batches whose sequences are sorted by length together; more pad less and mix less.
BATCHES_PER_GROUP = 32

Draw = tuple[int, int]  # epoch, index


class AnchorDataset(Dataset[dict[str, Tensor]]):
    """Sequences with freshly drawn anchors.

    Indexed by `(epoch, index)`: the draw depends on nothing else, so a resumed run sees the anchors of an
    uninterrupted one whatever was prefetched before it stopped. A plain index is epoch 0.

    Args:
        sequences: The data.
        max_anchors: Blocks per sequence.
        seed: Of the draws.
        cache: Features of `sequences`, by `cache_indices`; None: the trainer computes them.
        cache_indices: Place of each sequence in the cache.
    """

    def __init__(
        self,
        sequences: Sequence[TrainingSequence],
        *,
        max_anchors: int,
        seed: int,
        cache: FeatureCache | None = None,
        cache_indices: Sequence[int] | None = None,
    ) -> None:
        self.sequences = sequences
        self._max_anchors = max_anchors
        self._seed = seed
        self._cache = cache
        self._cache_indices = range(len(sequences)) if cache_indices is None else cache_indices

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, draw: int | Draw) -> dict[str, Tensor]:
        epoch, index = (0, draw) if isinstance(draw, int) else draw
        sequence = self.sequences[index]
        generator = torch.Generator().manual_seed(_mixed_seed(self._seed, epoch, index))
        item = {
            "input_ids": sequence.input_ids,
            "loss_mask": sequence.loss_mask,
            "anchors": sample_anchors(sequence.loss_mask, self._max_anchors, generator),
        }
        if self._cache is not None:
            cached = self._cache[self._cache_indices[index]]
            item["features"] = cached.features[0]
            item["final_hidden"] = cached.final_hidden[0]
            item["log_normalizer"] = cached.log_normalizer[0]
        return item


_PADDING = {"anchors": -1}


def collate(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad a batch on the right; anchors with -1, everything else with 0."""
    return {
        name: pad_sequence([item[name] for item in items], batch_first=True, padding_value=_PADDING.get(name, 0))
        for name in items[0]
    }


class LengthGroupedEpochs(Sampler[Draw]):
    """A new order each epoch, with sequences of similar length in a batch; yields `(epoch, index)`.

    Sequences that would make a last, smaller step wait for another epoch: several processes would fill it up with
    sequences of the first one.

    Args:
        lengths: Of the sequences.
        batch_size: Sequences of one optimiser step, over all processes and accumulated batches.
        seed: Of the orders.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self._lengths = lengths
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = 0

    def __len__(self) -> int:
        total = len(self._lengths)
        return total - total % self._batch_size if total >= self._batch_size else total

    def set_epoch(self, epoch: int) -> None:
        """Called by the data loader before each epoch, also when it resumes in the middle of one."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Draw]:
        generator = torch.Generator().manual_seed(_mixed_seed(self._seed, self._epoch, -1))
        # Which ones wait is drawn anew each epoch, before lengths are looked at.
        order = torch.randperm(len(self._lengths), generator=generator).tolist()[: len(self)]
        size = self._batch_size * BATCHES_PER_GROUP
        batches: list[list[int]] = []
        for start in range(0, len(order), size):
            group = sorted(order[start : start + size], key=lambda i: self._lengths[i], reverse=True)
            batches.extend(group[i : i + self._batch_size] for i in range(0, len(group), self._batch_size))
        for place in torch.randperm(len(batches), generator=generator).tolist():
            yield from ((self._epoch, i) for i in batches[place])


def _mixed_seed(*parts: Any) -> int:
    """One 63-bit seed of several integers (splitmix64 steps)."""
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & (2**64 - 1)
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        state ^= state >> 31
    return state >> 1
