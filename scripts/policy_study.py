"""What each verification policy loses against hindsight, and against the best policy that may not look ahead.

Confidences are simulated: independent Beta draws whose means are the conditional acceptance by slot that the paper
shows for DSpark on Qwen3-4B (Figure 2; rows are chat, code and math in turn), as spread as the confidences of slot 1
in Figure 6. A policy's loss is one minus the ratio of mean Theta (tokens a second) over the same rounds. Hindsight sees
whole drafts first, which no lossless policy may; the best causal policy is computed exactly for one and two rows,
on confidences of three equally likely levels.

With a profile that `dspark profile` wrote, the step times of this machine are one more case. The table of
docs/policies.md is renewed with --write only.

    python scripts/policy_study.py --write
    python scripts/policy_study.py --profile profile.json --profile-rows 8
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from scipy.stats import beta
from torch import Tensor

from dspark_hf import ThroughputProfileError
from dspark_hf.decoding.policies.facts import RoundFacts, StepCosts, VerificationPolicy
from dspark_hf.decoding.policies.registry import policy_factory
from dspark_hf.decoding.schedule import schedule
from dspark_hf.decoding.types import Confidence
from dspark_hf.evaluation.causal import CausalOptimum
from dspark_hf.evaluation.hindsight import HindsightPolicy
from dspark_hf.evaluation.intervals import bootstrap
from dspark_hf.evaluation.provenance import collect_provenance, scrub
from dspark_hf.fitting.profile_store import load_profile
from dspark_hf.fitting.throughput import ThroughputProfile

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "policies.md"
START, END = "<!-- study -->", "<!-- end of study -->"

MEAN_ACCEPTANCE = {
    "chat": [0.7353, 0.7376, 0.7402, 0.7441, 0.7583, 0.7656, 0.7609],
    "code": [0.8857, 0.8719, 0.8598, 0.8608, 0.8579, 0.8594, 0.8510],
    "math": [0.9053, 0.8899, 0.8878, 0.8854, 0.8872, 0.8906, 0.8824],
}
NUM_SLOTS = 7
# mean (1 - mean) / variance - 1 of the histogram of slot 1 in Figure 6: 0.826 and 0.0321
CONCENTRATION = 3.5
NUM_LEVELS = 3
THRESHOLD = 0.5
POLICIES = ("full", "threshold", "prefix", "smoothed", "block", "lagged")
MANY_ROWS, FEW_ROWS = (10, 50, 100), (1, 2)
# Steps of w tokens, and how many tokens cost as much as everything else in a step.
MANY_STAIRS = [(1, 256), (8, 256), (16, 256), (64, 256)]
FEW_STAIRS = [*MANY_STAIRS, (1, 8), (2, 8), (4, 8), (8, 8)]
BAR = 0.02
# Drafters better and worse than the one simulated: the same acceptance at every slot, and cases that tell them apart.
OTHER_ACCEPTANCE = (0.3, 0.5, 0.7, 0.95)
OTHER_CASES = {1: [(2, 8), (4, 8), (2, 2)], 2: [(2, 8), (4, 8), (8, 8)], 10: [(8, 256), (16, 256), (8, 30), (16, 30)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, help="written by `dspark profile`; one more case")
    parser.add_argument("--profile-rows", type=int, default=8, help="rows of that case")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/policies.md")
    parser.add_argument("--num-rounds", type=int, default=300, help="of each case; five times as many for 1 and 2 rows")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measured = None
    if arguments.profile is not None:
        try:
            measured = measured_costs(load_profile(arguments.profile), arguments.profile_rows)
        except (ThroughputProfileError, OSError) as error:
            parser.error(str(error))
    tables = []
    for row_counts, stairs in ((FEW_ROWS, FEW_STAIRS), (MANY_ROWS, MANY_STAIRS)):
        cases = [(n, stair_name(*stair), staircase(n, *stair), NUM_SLOTS) for n in row_counts for stair in stairs]
        if measured is not None and (arguments.profile_rows <= max(FEW_ROWS)) == (row_counts == FEW_ROWS):
            cases.append((arguments.profile_rows, "measured", *measured))
        rows = []
        for num_rows, name, costs, num_slots in cases:
            study = few_rows if num_rows <= max(FEW_ROWS) else many_rows
            mean = means(num_rows)[:, :num_slots]
            rows.append([str(num_rows), name, *study(mean, costs, arguments.num_rounds, arguments.seed)])
            print(" | ".join(rows[-1]), flush=True)
        tables.append(rows)
    text = page(tables, others(arguments), arguments)
    if arguments.write:
        write(text)
    print(text)


def measured_costs(profile: ThroughputProfile, num_rows: int) -> tuple[StepCosts, int]:
    """Costs at the longest context measured, and the slots of blocks: those profiled, at most `NUM_SLOTS`."""
    measured = profile.step_costs(num_rows, profile.grid.contexts[-1])
    block_size = profile.grid.tokens_per_row[-1] - 1
    num_slots = min(block_size, NUM_SLOTS)
    costs = StepCosts.of(
        measured.step_s[: num_rows * (1 + num_slots) + 1].tolist(),
        measured.draft_s,
        profile.overhead_s(num_rows),
        slot_s=measured.slot_s,
    )
    return costs.without_slots(block_size - num_slots), num_slots


def staircase(num_rows: int, width: int, scale: int) -> StepCosts:
    """Step times `1 + w * ceil(B / w) / scale`."""
    return StepCosts.of([1 + width * -(-b // width) / scale for b in range(num_rows * (1 + NUM_SLOTS) + 1)])


def stair_name(width: int, scale: int) -> str:
    return f"1 + B/{scale}" if width == 1 else f"1 + {width}⌈B/{width}⌉/{scale}"


# -- rounds -----------------------------------------------------------------------------------------------------------


def means(num_rows: int) -> np.ndarray:
    """Mean confidence of each row and slot: the domains in turn."""
    rows = list(MEAN_ACCEPTANCE.values())
    return np.array([rows[r % len(rows)] for r in range(num_rows)])


def others(arguments: argparse.Namespace) -> list[list[str]]:
    """Largest loss of each policy over `OTHER_CASES`, by acceptance."""
    rows = []
    for acceptance in OTHER_ACCEPTANCE:
        cases = []
        for num_rows, stairs in OTHER_CASES.items():
            study, mean = few_rows if num_rows <= 2 else many_rows, np.full((num_rows, NUM_SLOTS), acceptance)
            cases += [
                study(mean, staircase(num_rows, *stair), arguments.num_rounds // 2, arguments.seed) for stair in stairs
            ]
        worst = [max(per_cent(case[column]) for case in cases) for column in range(len(POLICIES))]
        rows.append([f"{acceptance:g}", *(f"{value:.2f}%" for value in worst)])
    return rows


def per_cent(cell: str) -> float:
    return float(cell.split("%")[0])


def theta(survival: Tensor, lengths: Tensor, costs: StepCosts) -> float:
    """Tokens a second that a round's lengths are expected to give."""
    is_verified = torch.arange(survival.shape[1]) < lengths[:, None]
    return float((len(survival) + survival[is_verified].sum()) / costs.round_s[len(survival) + int(lengths.sum())])


def thetas_of(policy: VerificationPolicy, rounds: Tensor, costs: StepCosts) -> list[float]:
    """Theta of each of `[rounds, rows, slots]` conditional confidences, which the policy meets one after the other."""
    _, num_rows, num_slots = rounds.shape
    full = torch.full((num_rows,), num_slots)
    facts = RoundFacts(num_slots, tuple(range(num_rows)), torch.ones(num_rows, dtype=torch.bool), full, full, costs)
    result = []
    for conditional in rounds:
        confidence = Confidence(conditional, conditional.cumprod(dim=-1))
        lengths = schedule(policy, confidence, facts)
        uniforms = torch.rand(conditional.shape, dtype=conditional.dtype)
        stands = (uniforms < conditional).long().cumprod(dim=-1).sum(dim=-1)
        policy.observe(confidence, lengths, torch.minimum(stands, lengths), facts)
        result.append(theta(confidence.survival, lengths, costs))
    return result


def losses(rounds: Tensor, costs: StepCosts, best: Sequence[float], seed: int) -> list[str]:
    """Loss of each policy against `best`, Theta by round, in per cent."""
    torch.manual_seed(seed)
    return [loss(thetas_of(policy_factory(name, THRESHOLD)(), rounds, costs), best, seed) for name in POLICIES]


def loss(thetas: Sequence[float], best: Sequence[float], seed: int) -> str:
    columns = {"got": thetas, "best": best}
    estimate = bootstrap(columns, lambda sums: 1 - sums["got"] / sums["best"], seed=seed, num_resamples=1000)
    half = (estimate.high - estimate.low) / 2
    return f"{estimate.value:.2%}".replace("-0.00%", "0.00%") + (f" ± {half:.2%}" if half >= 5e-5 else "")


def many_rows(mean: np.ndarray, costs: StepCosts, num_rounds: int, seed: int) -> list[str]:
    """Losses against hindsight."""
    rng = np.random.default_rng(seed)
    drawn = rng.beta(mean * CONCENTRATION, (1 - mean) * CONCENTRATION, size=(num_rounds, *mean.shape))
    rounds = torch.from_numpy(drawn)
    return losses(rounds, costs, thetas_of(HindsightPolicy(), rounds, costs), seed)


def few_rows(mean: np.ndarray, costs: StepCosts, num_rounds: int, seed: int) -> list[str]:
    """Losses against the best causal policy, and what hindsight has over that."""
    shape, mean = mean.shape, mean[..., None]
    middles = (np.arange(NUM_LEVELS) + 0.5) / NUM_LEVELS
    levels = beta.ppf(middles, mean * CONCENTRATION, (1 - mean) * CONCENTRATION)
    causal = CausalOptimum(levels.tolist(), costs)
    chosen = np.random.default_rng(seed).integers(NUM_LEVELS, size=(5 * num_rounds, *shape))
    rounds = torch.from_numpy(np.take_along_axis(levels[None], chosen[..., None], axis=-1)[..., 0])
    best = [
        theta(conditional.cumprod(dim=-1), torch.tensor(causal.lengths(places.tolist())), costs)
        for conditional, places in zip(rounds, chosen, strict=True)
    ]
    hindsight = thetas_of(HindsightPolicy(), rounds, costs)
    return [*losses(rounds, costs, best, seed), loss(best, hindsight, seed)]


# -- the page ---------------------------------------------------------------------------------------------------------


def page(tables: list[list[list[str]]], worst: list[list[str]], arguments: argparse.Namespace) -> str:
    few, many = tables
    facts = collect_provenance(torch.device("cpu"), torch.float64, seed=arguments.seed, n=arguments.num_rounds)
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    command = scrub(shlex.join(["python", "scripts/policy_study.py", *sys.argv[1:]]))
    head = ["rows", "seconds of a step", *POLICIES]
    return "\n".join(
        [
            f"One or two rows, loss against the best causal policy (last column: what that loses to hindsight; n = "
            f"{5 * arguments.num_rounds} rounds of each case):",
            "",
            *table([*head, "best causal"], few),
            "",
            f"Ten rows and more, loss against hindsight (n = {arguments.num_rounds} rounds of each case):",
            "",
            *table(head, many),
            "",
            f"Half widths of 95 % bootstrap intervals over rounds stand behind ±, where 0.01 % or more. `threshold` is "
            f"at {THRESHOLD}{remark(few)}. {verdict(few, many)}",
            "",
            "Other drafters: the largest loss of each policy when every slot is accepted with the same chance, over "
            f"{sum(map(len, OTHER_CASES.values()))} cases with 1, 2 and 10 rows:",
            "",
            *table(["mean confidence", *POLICIES], worst),
            "",
            f"`{command}`, commit {(facts.git_commit or 'unknown')[:12]}, {versions}, seed {facts.seed}.",
        ]
    )


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


def remark(few: list[list[str]]) -> str:
    full, threshold = (2 + POLICIES.index(name) for name in ("full", "threshold"))
    cuts_nothing = all(row[full] == row[threshold] for row in few)
    return f"; on {NUM_LEVELS} levels it cuts nothing here" if cuts_nothing else ""


def verdict(few: list[list[str]], many: list[list[str]]) -> str:
    """The largest loss of each policy that looks over edges."""
    parts = []
    for name in ("smoothed", "block", "lagged"):
        column = 2 + POLICIES.index(name)
        worst = [max(per_cent(row[column]) for row in rows) for rows in (few, many)]
        parts.append(f"`{name}` {worst[0]:.2f} % and {worst[1]:.2f} %")
    return f"Largest losses in the two tables: {', '.join(parts)}; {BAR:.0%} is the bar."


def write(text: str) -> None:
    """Put the study between its marks in the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    _, _, after = rest.partition(END)
    part = PAGE.with_suffix(".part")
    part.write_text(f"{before}{START}\n{text}\n{END}{after}", encoding="utf-8")
    os.replace(part, PAGE)


if __name__ == "__main__":
    main()
