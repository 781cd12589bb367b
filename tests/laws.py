"""Exact enumeration of the law of a speculative round, on tiny vocabularies and without random numbers.

`accept_sampled` is a piecewise constant function of its uniforms. Evaluated once inside each piece and weighted with
the piece's width, it is integrated exactly; the result is the joint law of what a round commits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

Prefix = tuple[int, ...]
Laws = dict[Prefix, Tensor]  # law float64 [vocab] of the token after each prefix (the anchor's is the empty one)


def random_laws(vocab: int, depth: int, seed: int, *, sharpness: float = 1.0, zeros: float = 0.0) -> Laws:
    """A random law after every prefix of up to `depth` tokens; `zeros` is the share of impossible tokens."""
    generator = torch.Generator().manual_seed(seed)
    laws = {}
    for length in range(depth + 1):
        for prefix in itertools.product(range(vocab), repeat=length):
            scores = torch.randn(vocab, generator=generator, dtype=torch.float64) * sharpness
            scores[torch.rand(vocab, generator=generator) < zeros] = -torch.inf
            if scores.isinf().all():
                scores[0] = 0.0
            laws[prefix] = scores.softmax(-1)
    return laws


def sequence_law(laws: Laws, vocab: int, length: int) -> dict[Prefix, float]:
    """Joint law of `length` tokens drawn one after the other."""
    return {
        tokens: float(
            torch.tensor([laws[tokens[:i]][token] for i, token in enumerate(tokens)], dtype=torch.float64).prod()
        )
        for tokens in itertools.product(range(vocab), repeat=length)
    }


def total_variation(law: dict[Prefix, float], other: dict[Prefix, float]) -> float:
    return 0.5 * sum(abs(law.get(key, 0.0) - other.get(key, 0.0)) for key in law.keys() | other.keys())


def round_law(
    accept: Callable[..., tuple[Tensor, Tensor]],
    draft: Laws,
    target: Laws,
    vocab: int,
    num_slots: int,
    length_of: Callable[[Prefix], int],
) -> dict[Prefix, float]:
    """Joint law of `num_slots + 1` tokens when one round commits the first ones and the target continues alone.

    Args:
        accept: `(draft_tokens, draft_probs, target_probs, lengths, accept_uniforms, next_uniforms)` to
            `(num_accepted, next_token)`, for many rows.
        length_of: Drafts verified, as a function of the drafted tokens.
    """
    rows = _Rows()
    for tokens in itertools.product(range(vocab), repeat=num_slots):
        draft_probs = torch.stack([draft[tokens[:k]] for k in range(num_slots)])
        target_probs = torch.stack([target[tokens[:k]] for k in range(num_slots + 1)])
        weight = float(draft_probs[range(num_slots), list(tokens)].prod())
        if weight == 0.0:
            continue
        length = length_of(tokens)
        ratios = [
            min(1.0, float(target_probs[k, token] / draft_probs[k, token])) for k, token in enumerate(tokens[:length])
        ]
        for num_accepted in range(length + 1):
            accepting = ratios[:num_accepted]
            rejecting = ratios[num_accepted : num_accepted + 1]
            share = weight * float(torch.tensor([*accepting, *(1 - r for r in rejecting)], dtype=torch.float64).prod())
            if share <= 0.0:
                continue
            uniforms = [r / 2 for r in accepting] + [(1 + r) / 2 for r in rejecting]
            uniforms += [0.5] * (num_slots - len(uniforms))
            for low, high in _pieces(draft_probs, target_probs, num_accepted):
                for point in (low + (high - low) / 3, high - (high - low) / 3):
                    rows.add(
                        tokens,
                        draft_probs,
                        target_probs,
                        length,
                        uniforms,
                        point,
                        share * (high - low) / 2,
                    )
    return _commit(rows, accept, target, vocab, num_slots)


def _pieces(draft_probs: Tensor, target_probs: Tensor, num_accepted: int) -> list[tuple[float, float]]:
    """Intervals of the last uniform on which the drawn token cannot change, for residual or target law."""
    laws = [target_probs[num_accepted]]
    if num_accepted < draft_probs.shape[0]:
        residual = (target_probs[num_accepted] - draft_probs[num_accepted]).clamp(min=0)
        if residual.sum() > 0:
            laws.append(residual / residual.sum())
    cuts = sorted({0.0, 1.0, *(float(c) for law in laws for c in law.cumsum(-1) if 0.0 < c < 1.0)})
    return [(low, high) for low, high in itertools.pairwise(cuts) if high - low > 1e-14]


class _Rows:
    def __init__(self) -> None:
        self.columns: list[list] = [[] for _ in range(7)]

    def add(self, *values) -> None:
        for column, value in zip(self.columns, values, strict=True):
            column.append(value)


def _commit(rows: _Rows, accept, target: Laws, vocab: int, num_slots: int) -> dict[Prefix, float]:
    tokens, draft_probs, target_probs, lengths, uniforms, points, weights = rows.columns
    num_accepted, next_token = accept(
        torch.tensor(tokens),
        torch.stack(draft_probs),
        torch.stack(target_probs),
        torch.tensor(lengths),
        torch.tensor(uniforms, dtype=torch.float64),
        torch.tensor(points, dtype=torch.float64),
    )
    law: dict[Prefix, float] = {}
    for row, weight in enumerate(weights):
        start = (*tokens[row][: int(num_accepted[row])], int(next_token[row]))
        for rest in itertools.product(range(vocab), repeat=num_slots + 1 - len(start)):
            full = (*start, *rest)
            share = weight
            for i in range(len(start), len(full)):
                share *= float(target[full[:i]][full[i]])
            law[full] = law.get(full, 0.0) + share
    return law
