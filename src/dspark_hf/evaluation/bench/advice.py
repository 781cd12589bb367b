"""Which gamma pays on this machine, and what one draft layer more would have to bring.

Expected speed over plain generation of a drafter that drafts and verifies g tokens every round:

    ratio(g) = plain step * tau(g) / (draft(g) + step(1 + g) + overhead)
    tau(g)   = 1 + sum over k <= g of the product of acceptance(1..k)

Seconds come from a throughput profile, acceptance from drafts that were all verified. That a slot is accepted as often
when later slots are not drafted is exact for drafts that are cut; the backbone costs the same for every g, as in
generate().
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..intervals import Estimate, Floats, Sums, bootstrap


@dataclass(frozen=True)
class GammaCosts:
    """Seconds at one number of rows and one context.

    Attributes:
        num_rows, context: Where.
        plain_s: Of a step of plain generation.
        round_s: Of a round with g = 1, 2, ... drafts, overhead included.
    """

    num_rows: int
    context: int
    plain_s: float
    round_s: tuple[float, ...]


@dataclass(frozen=True)
class GammaPoint:
    """One gamma: tau and speed over plain generation, as expected."""

    gamma: int
    tau: float
    speed_ratio: Estimate


@dataclass(frozen=True)
class GammaAdvice:
    """Which gamma is best at one number of rows.

    Attributes:
        drafter: Its name.
        points: By gamma, from 1.
        best: Gamma with the highest expected ratio; 0 where plain generation is at least as fast.
        gain_over_block: Speed at the best gamma over speed at the whole block, minus 1: chosen on one half of the
            prompts, judged on the other, and the other way round; no value with a single prompt.
        gain_over_next: Speed at the best gamma over the best other choice (0 is one), minus 1.
    """

    drafter: str
    num_rows: int
    context: int
    points: tuple[GammaPoint, ...]
    best: int
    gain_over_block: Estimate
    gain_over_next: float


def advise_gamma(
    drafter: str,
    reached: Sequence[Sequence[float]],
    accepted: Sequence[Sequence[float]],
    costs: GammaCosts,
    *,
    seed: int,
) -> GammaAdvice:
    """Best gamma for one drafter.

    Args:
        reached, accepted: `[prompts][slots]`, verified drafts whose predecessors were all accepted, and of these the
            accepted ones; at least one prompt, as many slots as `costs.round_s`.
        seed: Of resampling prompts.
    """
    num_slots = len(costs.round_s)
    columns = {f"reached {k}": [row[k] for row in reached] for k in range(num_slots)}
    columns |= {f"accepted {k}": [row[k] for row in accepted] for k in range(num_slots)}
    ratio = partial(_speed_ratio, costs=costs)
    totals = {name: np.asarray(sum(values), dtype=np.float64) for name, values in columns.items()}
    speeds = [1.0] + [float(ratio(totals, gamma)) for gamma in range(1, num_slots + 1)]
    best = int(np.argmax(speeds))
    points = tuple(
        GammaPoint(g, float(_tau(totals, g)), bootstrap(columns, partial(ratio, gamma=g), seed=seed))
        for g in range(1, num_slots + 1)
    )

    return GammaAdvice(
        drafter=drafter,
        num_rows=costs.num_rows,
        context=costs.context,
        points=points,
        best=best,
        gain_over_block=_gain_over_block(columns, costs, seed=seed),
        gain_over_next=speeds[best] / max(speed for g, speed in enumerate(speeds) if g != best) - 1,
    )


def _gain_over_block(columns: Mapping[str, Sequence[float]], costs: GammaCosts, *, seed: int) -> Estimate:
    """A gamma that is judged on the prompts that chose it looks better than it is; hence halves, every other prompt."""
    halves = {
        f"{name} of {half}": [value * (place % 2 == half) for place, value in enumerate(values)]
        for name, values in columns.items()
        for half in (0, 1)
    }

    def gain(sums: Sums) -> Floats:
        speeds = []
        for half in (0, 1):
            own = {name: sums[f"{name} of {half}"] for name in columns}
            ratios = [_speed_ratio(own, gamma, costs=costs) for gamma in range(1, len(costs.round_s) + 1)]
            of_half = np.stack([np.ones_like(own["reached 0"]), *ratios])
            speeds.append(np.where(own["reached 0"] > 0, of_half, np.nan))  # a half that was not drawn judges nothing
        gains = [
            np.take_along_axis(judge, np.argmax(chooser, axis=0)[None], axis=0)[0] / judge[-1] - 1
            for chooser, judge in (speeds, speeds[::-1])
        ]
        mean: Floats = (gains[0] + gains[1]) / 2
        return mean

    return bootstrap(halves, gain, seed=seed)


def _speed_ratio(sums: Sums, gamma: int, *, costs: GammaCosts) -> Floats:
    """Expected speed over plain generation."""
    return costs.plain_s * _tau(sums, gamma) / costs.round_s[gamma - 1]


def _tau(sums: Sums, gamma: int) -> Floats:
    """Tokens per round with `gamma` drafts; a slot that no draft reached adds nothing."""
    survival: Floats = np.ones_like(sums["reached 0"])
    tau: Floats = np.ones_like(sums["reached 0"])
    for k in range(gamma):
        survival = survival * (sums[f"accepted {k}"] / np.maximum(sums[f"reached {k}"], 1e-12))
        tau = tau + survival
    return tau


@dataclass(frozen=True)
class DepthAdvice:
    """What a draft layer costs, and what one more has to bring to pay.

    Attributes:
        drafter: Its name.
        num_layers: That it has.
        layer_s: Seconds of one of them in a draft of the whole block.
        layer_share: Of a round.
        tau: Measured, at the drafter's gamma.
        tau_to_pay: That it takes with one layer more to be as fast as now.
        acceptance: Mean conditional acceptance that gives `tau` in every slot.
        acceptance_to_pay: The same for `tau_to_pay`; None: no acceptance suffices.
        tau_to_lose: Least that it takes with one layer less; None for a single layer.
    """

    drafter: str
    num_rows: int
    context: int
    num_layers: int
    layer_s: float
    layer_share: float
    tau: float
    tau_to_pay: float
    acceptance: float
    acceptance_to_pay: float | None
    tau_to_lose: float | None


def advise_depth(
    drafter: str, *, num_layers: int, layer_s: float, tau: float, gamma: int, costs: GammaCosts
) -> DepthAdvice:
    """Of one drafter.

    Args:
        layer_s: Seconds of one draft layer.
        tau: At gamma.
        costs: Of rounds up to gamma.
    """
    round_s = costs.round_s[gamma - 1]
    to_pay = tau * (round_s + layer_s) / round_s
    acceptance = even_acceptance(tau, gamma)
    assert acceptance is not None, "a measured tau is at most gamma + 1"
    return DepthAdvice(
        drafter=drafter,
        num_rows=costs.num_rows,
        context=costs.context,
        num_layers=num_layers,
        layer_s=layer_s,
        layer_share=layer_s / round_s,
        tau=tau,
        tau_to_pay=to_pay,
        acceptance=acceptance,
        acceptance_to_pay=even_acceptance(to_pay, gamma),
        tau_to_lose=None if num_layers < 2 else tau * (round_s - layer_s) / round_s,
    )


def even_acceptance(tau: float, gamma: int) -> float | None:
    """Conditional acceptance that, equal in all `gamma` slots, gives `tau`; None above `gamma + 1`."""
    if tau > gamma + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**k for k in range(gamma + 1)) < tau else (low, middle)
    return high
