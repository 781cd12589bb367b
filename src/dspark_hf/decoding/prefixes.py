"""Texts of several rows that differ in length: what logits processors are shown."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prefixes:
    """Committed tokens of several rows.

    Attributes:
        ids: int64 `[rows, capacity]`; a row's text is its first entries, padding of the prompt among them.
        ends: int64 `[rows]`, on the device of `ids`: how many of them, each row >= 1.
        lengths: The same numbers for the host.
        rows: Which rows of the batch these are.
    """

    ids: Tensor
    ends: Tensor
    lengths: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def last(self) -> Tensor:
        """The last token of each row, int64 `[rows]`."""
        return self.ids.gather(1, self.ends[:, None] - 1).squeeze(1)

    def followed_by(self, tokens: Tensor) -> "Prefixes":
        """The same texts with `tokens` int64 `[rows, n]` behind them."""
        num_new = tokens.shape[1]
        ids = torch.nn.functional.pad(self.ids, (0, num_new))
        ids.scatter_(1, self.ends[:, None] + torch.arange(num_new, device=ids.device), tokens)
        return Prefixes(ids, self.ends + num_new, tuple(length + num_new for length in self.lengths), self.rows)

    def groups(self) -> Iterator[tuple[Tensor, Tensor, tuple[int, ...]]]:
        """Rows of equal length together: indices here int64 `[n]`, texts int64 `[n, length]`, rows of the batch."""
        for length in sorted(set(self.lengths)):
            here = [r for r, own in enumerate(self.lengths) if own == length]
            index = torch.tensor(here, device=self.ids.device)
            yield index, self.ids[index, :length], tuple(self.rows[r] for r in here)
