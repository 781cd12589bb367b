"""Drafters of known acceptance: recorded rounds of prompts, drawn from laws that are written down."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dspark_hf.evaluation.rounds_file import PromptRounds


@dataclass(frozen=True)
class SyntheticDrafter:
    """Accepts slot k of a prompt of kind i with probability `rates[i][k]`, given the slots before.

    Confidence logits of a slot that comes out accepted are normal around +shift/2, of others around -shift/2, so that
    their AUC is `Phi(shift / sqrt(2))`.

    Attributes:
        rates: By kind of prompt; kinds are equally frequent, and prompts of a kind are alike.
        num_rounds: Of every prompt.
        shift: Of confidence logits; None: no confidences.
    """

    rates: tuple[tuple[float, ...], ...]
    num_rounds: int = 20
    shift: float | None = None

    @property
    def num_slots(self):
        return len(self.rates[0])

    @property
    def survival(self):
        """Probability that drafts 1..k are all accepted, mean over kinds."""
        return np.mean([np.cumprod(one) for one in self.rates], axis=0)

    @property
    def tau(self):
        return 1 + float(self.survival.sum())

    @property
    def conditional(self):
        survival = self.survival
        return survival / np.concatenate([[1.0], survival[:-1]])

    @property
    def auc(self):
        return 0.5 * (1 + math.erf(self.shift / 2))

    def num_accepted(self, rng, num_prompts):
        """int `[prompts, rounds]`."""
        kinds = np.array(self.rates)[rng.integers(0, len(self.rates), num_prompts)]
        is_hit = rng.random((num_prompts, self.num_rounds, self.num_slots)) < kinds[:, None, :]
        return np.cumprod(is_hit, axis=-1).sum(axis=-1)

    def prompts(self, rng, num_prompts, data_set="own"):
        accepted = self.num_accepted(rng, num_prompts)
        slots = np.arange(self.num_slots)
        signs = np.where(slots < accepted[..., None], 0.5, -0.5)
        noise = rng.standard_normal(signs.shape)
        return [
            PromptRounds(
                id=f"{data_set}/{i}",
                digest="",
                logits=[[] for _ in accepted[i]] if self.shift is None else (self.shift * signs[i] + noise[i]).tolist(),
                num_verified=[self.num_slots] * self.num_rounds,
                num_accepted=accepted[i].tolist(),
                num_new_tokens=int(accepted[i].sum()) + self.num_rounds + 1,
            )
            for i in range(num_prompts)
        ]
