"""Accepted length by data set, and differences of it between drafters on the same prompts."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .data_sets import groups_among
from .intervals import Estimate, Floats, Sums, bootstrap
from .paired import Paired, compare_pairs
from .replay import ReplayedText
from .results import domain_of

MEAN = "mean of data sets"


@dataclass(frozen=True)
class PairedDifference:
    """tau of `drafter` minus tau of `baseline` on the same prompts.

    Attributes:
        tau: The difference.
        group: Of data sets that are pooled; `mean of data sets` weighs each data set alike.
        gain_percent: By how much the drafter's tau is larger.
        p_value: Two-sided, of a test that swaps the two drafters within prompts, of this one comparison.
    """

    drafter: str
    baseline: str
    temperature: float
    tau: Estimate
    group: str = "all"
    gain_percent: Estimate | None = None
    p_value: float | None = None


def tau_of(texts: Sequence[ReplayedText], *, seed: int) -> Estimate:
    """Pooled over texts."""
    columns = tau_columns(texts)
    return bootstrap(columns, pooled(_data_sets(texts)), seed=seed)


def mean_tau_of(texts: Sequence[ReplayedText], *, seed: int) -> Estimate:
    """Mean over data sets of the pooled taus; every resample draws from the prompts of all data sets.

    There is no interval where a data set has a single prompt: what it would be without that prompt is not known.
    """
    found = bootstrap(tau_columns(texts), mean(_data_sets(texts)), seed=seed)
    return found if _fewest_prompts(texts) > 1 else _without_interval(found)


def paired_differences(
    names: tuple[str, str],
    temperature: float,
    texts: tuple[Sequence[ReplayedText], Sequence[ReplayedText]],
    *,
    seed: int,
) -> list[PairedDifference]:
    """How much more the first drafter accepts than the second: of all prompts, by group, and by data set on average."""
    first, second = texts
    assert [text.id for text in first] == [text.id for text in second], "both drafters have the same prompts"
    groups = groups_among(_data_sets(first))
    statistics: list[tuple[str, list[str], Callable[[Sums], Floats]]] = [
        (group, members, pooled(members)) for group, members in groups.items()
    ]
    if len(groups["all"]) > 1:
        statistics.append((MEAN, groups["all"], mean(groups["all"])))
    differences = []
    for group, members, statistic in statistics:
        ours, theirs = (tau_columns([text for text in part if domain_of(text.id) in members]) for part in texts)
        found = compare_pairs(ours, theirs, statistic, seed=seed)
        if group == MEAN and _fewest_prompts(first) == 1:
            found = Paired(_without_interval(found.difference), _without_interval(found.gain_percent), found.p_value)
        differences.append(
            PairedDifference(
                names[0], names[1], temperature, found.difference, group, found.gain_percent, found.p_value
            )
        )
    return differences


def tau_columns(texts: Sequence[ReplayedText]) -> dict[str, list[float]]:
    """What each text adds to the tokens and rounds of each data set."""
    columns: dict[str, list[float]] = {}
    for name in _data_sets(texts):
        for kind in ("tokens", "rounds"):
            columns[f"{name}/{kind}"] = [
                float(getattr(text, f"num_{kind}")) if domain_of(text.id) == name else 0.0 for text in texts
            ]
    return columns


def pooled(data_sets: Sequence[str]) -> Callable[[Sums], Floats]:
    """tau of all texts of some data sets, from sums of `tau_columns`."""

    def statistic(sums: Sums) -> Floats:
        tokens, rounds = (sum(sums[f"{name}/{kind}"] for name in data_sets) for kind in ("tokens", "rounds"))
        ratio: Floats = tokens / rounds  # type: ignore[assignment]
        return ratio

    return statistic


def mean(data_sets: Sequence[str]) -> Callable[[Sums], Floats]:
    """Mean of the taus of some data sets, likewise."""

    def statistic(sums: Sums) -> Floats:
        taus = [sums[f"{name}/tokens"] / sums[f"{name}/rounds"] for name in data_sets]
        result: Floats = sum(taus) / len(taus)  # type: ignore[assignment]
        return result

    return statistic


def _data_sets(texts: Sequence[ReplayedText]) -> list[str]:
    return list(dict.fromkeys(domain_of(text.id) for text in texts))


def _fewest_prompts(texts: Sequence[ReplayedText]) -> int:
    return min(Counter(domain_of(text.id) for text in texts).values())


def _without_interval(found: Estimate) -> Estimate:
    return replace(found, low=None, high=None)
