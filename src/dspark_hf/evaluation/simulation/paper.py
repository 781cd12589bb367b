"""The paper's load curves (arXiv 2607.05147, Figures 7 and 8), and what they imply."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_FILE = Path(__file__).parents[2] / "data" / "paper_load_curves.json"

Curve = list[list[float]]

# Concurrent requests up to which all curves of Figure 8 are shown; ratios to a highest load are to this one.
MOST_USERS = 200.0


@dataclass(frozen=True)
class PaperModel:
    """Curves of one production model; points of two numbers, as the resource's `units` say.

    Attributes:
        user_speed_and_throughput, throughput, budget: By system, `mtp-1` and `dspark`.
    """

    name: str
    user_speed_and_throughput: dict[str, Curve]
    throughput: dict[str, Curve]
    budget: dict[str, Curve]


class RoundLine(NamedTuple):
    """Seconds of a round, linear in verified tokens.

    Attributes:
        seconds_per_token: Of a round without tokens, over accepted tokens of a request in it.
        tokens_per_base: Tokens that cost as much as everything else in the round.
    """

    seconds_per_token: float
    tokens_per_base: float


@cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return content


def source() -> str:
    """Where the numbers come from."""
    return str(_content()["source"])


def paper_models() -> tuple[PaperModel, ...]:
    """The models of Figures 7 and 8."""
    return tuple(PaperModel(name, **curves) for name, curves in _content()["models"].items())


def conditional_acceptance(num_slots: int) -> dict[str, list[float]]:
    """Of DSpark on Qwen3-4B by domain (Figure 2), at most seven slots."""
    return {domain: values[:num_slots] for domain, values in _content()["conditional_acceptance"].items()}


def columns(points: Curve) -> tuple[Floats, Floats]:
    """A curve's two numbers, the first ascending."""
    ordered = np.array(sorted(points))
    return ordered[:, 0], ordered[:, 1]


def gain_at_users(model: PaperModel, users: Floats | float) -> Floats:
    """Throughput of DSpark over MTP-1's with as many concurrent requests (Figure 8)."""
    ours, theirs = (np.interp(users, *columns(model.throughput[system])) for system in ("dspark", "mtp-1"))
    return np.asarray(ours / theirs)


def at_most_users(model: PaperModel) -> tuple[float, float]:
    """Speed of a user and throughput of MTP-1 with `MOST_USERS` requests (Figures 7 and 8)."""
    throughput = float(np.interp(MOST_USERS, *columns(model.throughput["mtp-1"])))
    speed, total = columns(model.user_speed_and_throughput["mtp-1"])
    return float(np.interp(-throughput, -total, speed)), throughput


def fitted_round(model: str) -> RoundLine:
    """Seconds of a round that the MTP-1 curve of Figure 8 implies.

    C requests that each gain tau tokens in a round of T seconds give `C tau / T` tokens a second, so `C / throughput`
    is `T / tau`, at B = 2 C verified tokens. With a tau that does not depend on load, a line through it is T up to
    that factor. What a request costs besides its tokens (its keys and values are read) is part of the slope.
    """
    curves = next(one for one in paper_models() if one.name == model)
    concurrency, throughput = columns(curves.throughput["mtp-1"])
    slope, base = np.polyfit(2 * concurrency, concurrency / throughput, 1, w=np.sqrt(concurrency))
    return RoundLine(float(base), float(base / slope))
