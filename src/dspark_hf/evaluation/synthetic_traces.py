"""Traces of a drafter that does not exist, whose acceptance is known: for tests, and for studies of drift.

At each place the true chance `c_k` that draft k is accepted, given those before it, is drawn from a Beta law with a
given mean; what the confidence head says of it is right, or wrong by a known map of its logit. Slots are independent
of each other, so the mean is also the share of drafts accepted among those whose predecessors were.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from .settings import ComparisonError
from .traces import AcceptanceTraces, PromptTrace, prompt_trace

# mean (1 - mean) / variance - 1 of the paper's histogram of slot 1 (arXiv 2607.05147, Figure 6): 0.826 and 0.0321
CONCENTRATION = 3.5

# Of `c_k`: beyond, logits lose digits.
SMALLEST = 1e-6


def synthetic_traces(
    rates: Mapping[str, Sequence[float]],
    *,
    num_prompts: int,
    num_rounds: int,
    seed: int,
    persistence: float = 0.0,
    concentration: float = CONCENTRATION,
    logit_scale: float = 1.0,
    logit_shift: float = 0.0,
    prompt_length: int = 64,
) -> AcceptanceTraces:
    """Rounds of a drafter with known acceptance, layout `rounds`.

    Args:
        rates: By domain, the mean conditional acceptance of each slot, inside 0 to 1; as many slots for each.
        num_prompts: Of each domain.
        num_rounds: Of each prompt.
        persistence: Chance that a slot's `c_k` stays as it was from one round to the next; its correlation.
        concentration: Of the Beta laws, above 0; the larger, the less `c_k` varies.
        logit_scale, logit_shift: What the confidence head says is `scale * logit(c_k) + shift`; 1 and 0 is calibrated.

    Raises:
        ComparisonError: a value breaks its rule.
    """
    means = {domain: np.array(values, dtype=np.float64) for domain, values in rates.items()}
    shapes = {values.shape for values in means.values()}
    if len(shapes) != 1 or any(len(s) != 1 for s in shapes) or any(((m <= 0) | (m >= 1)).any() for m in means.values()):
        raise ComparisonError(f"rates must be inside 0 to 1, as many for each domain, got {dict(rates)}")
    for name, value, holds, rule in (
        ("num_prompts", num_prompts, num_prompts >= 1, ">= 1"),
        ("num_rounds", num_rounds, num_rounds >= 1, ">= 1"),
        ("persistence", persistence, 0 <= persistence < 1, "0 or more, and below 1"),
        ("concentration", concentration, concentration > 0, "above 0"),
    ):
        if not holds:
            raise ComparisonError(f"{name} must be {rule}, got {value!r}")
    rng = np.random.default_rng(seed)
    prompts: list[PromptTrace] = []
    for domain, mean in means.items():
        for number in range(num_prompts):
            truth = _truth(mean, num_rounds, persistence, concentration, rng)
            stands = (rng.random(truth.shape) < truth).cumprod(axis=1)
            logits = logit_scale * np.log(truth / (1 - truth)) + logit_shift
            prompts.append(
                prompt_trace(
                    f"{domain}/{number}",
                    logits.astype(np.float32),
                    stands.sum(axis=1).astype(np.int64),
                    layout="rounds",
                    prompt_length=prompt_length,
                )
            )
    return AcceptanceTraces(tuple(prompts), "sampled", source={"synthetic": {d: m.tolist() for d, m in means.items()}})


def _truth(
    mean: np.ndarray, num_rounds: int, persistence: float, concentration: float, rng: np.random.Generator
) -> np.ndarray:
    """`c_k` of each round, float64 `[rounds, slots]`: the law of each is the Beta law, whatever the persistence."""
    fresh = rng.beta(mean * concentration, (1 - mean) * concentration, size=(num_rounds, len(mean)))
    stays = rng.random(fresh.shape) < persistence
    stays[0] = False
    last_fresh = np.maximum.accumulate(np.where(stays, 0, np.arange(num_rounds)[:, None]), axis=0)
    return np.take_along_axis(fresh, last_fresh, axis=0).clip(SMALLEST, 1 - SMALLEST)
