"""What policies over all rows do to single rows, to rows without history, and on step times that were measured.

Confidences are simulated as in policy_study.py: independent Beta draws with the means of chat, code and math rows in
turn. A row starves in a round that verifies none of its drafts. The second part plays `lagged`, whose capacity comes
from earlier rounds, from its first round on, under several opinions about rows that nothing is known of, and compares
each round with hindsight. The third compares all policies with hindsight on a profile's step times, with the greedy
acceptance of the bundled drafter as means.

    python scripts/rows_study.py --json rows-study.json
    python scripts/rows_study.py --profile profile.json --profile-rows 24 --json rows-study.json
"""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from policy_study import (
    CONCENTRATION,
    MEAN_ACCEPTANCE,
    THRESHOLD,
    means,
    measured_costs,
    stair_name,
    staircase,
    theta,
    thetas_of,
)
from torch import Tensor
from tqdm.auto import tqdm

from dspark_hf import ThroughputProfileError, zoo
from dspark_hf.config_rules import VERIFICATION_POLICIES
from dspark_hf.decoding.policies import survival as survival_module
from dspark_hf.decoding.policies.facts import RoundFacts, StepCosts
from dspark_hf.decoding.policies.lagged import LAG_ROUNDS, LaggedPolicy
from dspark_hf.decoding.policies.registry import policy_factory
from dspark_hf.decoding.schedule import schedule
from dspark_hf.decoding.types import Confidence
from dspark_hf.evaluation.hindsight import HindsightPolicy
from dspark_hf.evaluation.intervals import Estimate, bootstrap
from dspark_hf.evaluation.provenance import check_can_write, collect_provenance, write_report
from dspark_hf.fitting.profile_store import load_profile
from dspark_hf.fitting.throughput import ThroughputProfile

BUNDLED = zoo.BUNDLED_ROOT / "smollm2-135m-instruct"
POLICIES = ("block", "lagged")
FLOORS = (None, 8)
NUM_ROWS = 48
# Tokens that cost as much as everything else in a step: a machine with room, and one without.
SCALES = (256, 16)
OPINIONS = (survival_module.INITIAL_ACCEPTANCE, 0.5, 0.95)
HISTORY_ROWS = (1, 10, 50)
HISTORY_SCALES = {1: 8, 10: 30, 50: 256}
HISTORY_ROUNDS = 8


def draw(num_rounds: int, mean: np.ndarray, seed: int) -> Tensor:
    """Conditional confidences, float64 `[rounds, rows, slots]`."""
    rng = np.random.default_rng(seed)
    size = (num_rounds, *mean.shape)
    return torch.from_numpy(rng.beta(mean * CONCENTRATION, (1 - mean) * CONCENTRATION, size=size))


# -- starving rows ----------------------------------------------------------------------------------------------------


def play(policy: Any, rounds: Tensor, costs: StepCosts) -> tuple[Tensor, list[float]]:
    """Lengths, int64 `[rounds, rows]`, and Theta of each round."""
    _, num_rows, num_slots = rounds.shape
    full = torch.full((num_rows,), num_slots)
    facts = RoundFacts(num_slots, tuple(range(num_rows)), torch.ones(num_rows, dtype=torch.bool), full, full, costs)
    all_lengths, thetas = [], []
    for conditional in rounds:
        confidence = Confidence(conditional, conditional.cumprod(dim=-1))
        lengths = schedule(policy, confidence, facts)
        stands = (torch.rand(conditional.shape) < conditional).long().cumprod(dim=-1).sum(dim=-1)
        policy.observe(confidence, lengths, torch.minimum(stands, lengths), facts)
        all_lengths.append(lengths)
        thetas.append(theta(confidence.survival, lengths, costs))
    return torch.stack(all_lengths), thetas


def longest_wait(lengths: Tensor) -> Tensor:
    """Most rounds in a row without a verified draft, of each row; int64 `[rows]`."""
    waited = longest = torch.zeros(lengths.shape[1], dtype=torch.long)
    for ell in lengths:
        waited = torch.where(ell > 0, 0, waited + 1)
        longest = torch.maximum(longest, waited)
    return longest


def starving(name: str, num_rows: int, costs: StepCosts, mean: np.ndarray, num_rounds: int, seed: int) -> list[dict]:
    """Every policy with every floor on the same rounds."""
    rounds, found = draw(num_rounds, mean, seed), []
    for policy in POLICIES:
        without: list[float] = []
        for floor in FLOORS:
            torch.manual_seed(seed)
            lengths, thetas = play(policy_factory(policy, THRESHOLD, floor)(), rounds, costs)
            without = without or thetas
            columns = {"with": thetas, "without": without}
            lost = bootstrap(columns, lambda s: 1 - s["with"] / s["without"], seed=seed, num_resamples=1000)
            of_kind = {kind: slice(place, None, len(MEAN_ACCEPTANCE)) for place, kind in enumerate(MEAN_ACCEPTANCE)}
            found.append(
                {
                    "rows": num_rows,
                    "cost": name,
                    "policy": policy,
                    "floor": floor,
                    "drafts": {kind: float(lengths[:, rows].double().mean()) for kind, rows in of_kind.items()},
                    "starved": {kind: float((lengths[:, rows] == 0).double().mean()) for kind, rows in of_kind.items()},
                    "longest_wait": int(longest_wait(lengths).max()),
                    "lost_to_floor": asdict(lost),
                }
            )
    return found


# -- rows without history ---------------------------------------------------------------------------------------------


@contextmanager
def opinion(acceptance: float) -> Iterator[None]:
    """What `lagged` expects of a slot that nothing is known of."""
    before = survival_module.INITIAL_ACCEPTANCE
    survival_module.INITIAL_ACCEPTANCE = acceptance
    try:
        yield
    finally:
        survival_module.INITIAL_ACCEPTANCE = before


def history(num_rows: int, num_trials: int, seed: int) -> list[dict[str, Any]]:
    """Loss of `lagged` against hindsight in its first rounds, by opinion."""
    costs, mean = staircase(num_rows, 1, HISTORY_SCALES[num_rows]), means(num_rows)
    rounds = draw(num_trials * HISTORY_ROUNDS, mean, seed).view(num_trials, HISTORY_ROUNDS, *mean.shape)
    best = [thetas_of(HindsightPolicy(), trial, costs) for trial in rounds]
    found = []
    for acceptance in OPINIONS:
        torch.manual_seed(seed)
        with opinion(acceptance):
            got = [thetas_of(LaggedPolicy(), trial, costs) for trial in rounds]
        spans: dict[str, Callable[[list[float]], float]] = {
            **{str(n + 1): (lambda values, n=n: values[n]) for n in range(LAG_ROUNDS)},
            f"{LAG_ROUNDS + 1} to {HISTORY_ROUNDS}": lambda values: sum(values[LAG_ROUNDS:]),
        }
        losses: dict[str, Estimate] = {}
        for span, part in spans.items():
            columns = {"got": [part(trial) for trial in got], "best": [part(trial) for trial in best]}
            losses[span] = bootstrap(columns, lambda s: 1 - s["got"] / s["best"], seed=seed, num_resamples=1000)
        found.append(
            {
                "rows": num_rows,
                "cost": stair_name(1, HISTORY_SCALES[num_rows]),
                "opinion": acceptance,
                "losses": {span: asdict(loss) for span, loss in losses.items()},
            }
        )
    return found


# -- measured step times ----------------------------------------------------------------------------------------------


def on_profile(profile: ThroughputProfile, num_rounds: int, seed: int) -> list[dict[str, Any]]:
    """Loss of every policy against hindsight for each number of rows, at the longest context."""
    report = json.loads((BUNDLED / "reports" / "evaluation.json").read_text(encoding="utf-8"))
    acceptance = next(score["conditional_acceptance"] for score in report["scores"] if score["temperature"] == 0)
    found = []
    for num_rows in profile.grid.num_rows:
        costs, num_slots = measured_costs(profile, num_rows)
        rounds = draw(num_rounds, np.array([acceptance[:num_slots]] * num_rows), seed)
        best = thetas_of(HindsightPolicy(), rounds, costs)
        plain = num_rows / profile.plain_step_s(num_rows, profile.grid.contexts[-1])
        losses = {}
        for name in VERIFICATION_POLICIES:
            torch.manual_seed(seed)
            columns = {"got": thetas_of(policy_factory(name, THRESHOLD)(), rounds, costs), "best": best}
            losses[name] = asdict(bootstrap(columns, lambda s: 1 - s["got"] / s["best"], seed=seed, num_resamples=1000))
        found.append({"rows": num_rows, "losses": losses, "best_over_plain": float(np.mean(best)) / plain})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, help="written by `dspark profile`; one more machine")
    parser.add_argument("--profile-rows", type=int, default=24, help="rows on that machine")
    parser.add_argument("--num-rounds", type=int, default=200, help="of each case, and trials of the second part")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.num_rounds < 2:
        parser.error(f"--num-rounds must be 2 or more, got {arguments.num_rounds}")
    try:
        check_can_write(arguments.json)
        profile = None if arguments.profile is None else load_profile(arguments.profile)
        measured = None if profile is None else measured_costs(profile, arguments.profile_rows)
    except (ThroughputProfileError, OSError) as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    cases = [(stair_name(1, scale), NUM_ROWS, staircase(NUM_ROWS, 1, scale), means(NUM_ROWS)) for scale in SCALES]
    if measured is not None:
        costs, num_slots = measured
        cases.append(("measured", arguments.profile_rows, costs, means(arguments.profile_rows)[:, :num_slots]))
    starved = [
        row for case in tqdm(cases, disable=None) for row in starving(*case, arguments.num_rounds, arguments.seed)
    ]
    histories = [
        row for rows in tqdm(HISTORY_ROWS, disable=None) for row in history(rows, arguments.num_rounds, arguments.seed)
    ]
    losses = [] if profile is None else on_profile(profile, arguments.num_rounds, arguments.seed)
    provenance = collect_provenance(torch.device("cpu"), torch.float64, seed=arguments.seed, n=arguments.num_rounds)
    content = {
        "kind": "rows_study",
        "starving": starved,
        "history": histories,
        "on_profile": losses,
        "provenance": asdict(provenance),
    }
    write_report(arguments.json, content)


if __name__ == "__main__":
    main()
