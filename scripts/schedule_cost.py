"""Milliseconds that each verification policy takes to choose the lengths of a round, `observe` included.

python scripts/schedule_cost.py --rows 64 --slots 7 --device cpu
"""

import argparse
import statistics
import time

import torch

from dspark_hf.config_rules import VERIFICATION_POLICIES
from dspark_hf.decoding.policies.facts import RoundFacts, StepCosts
from dspark_hf.decoding.policies.gate import DraftGate
from dspark_hf.decoding.policies.registry import policy_factory
from dspark_hf.decoding.schedule import schedule
from dspark_hf.decoding.types import Confidence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--slots", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=200)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device, num_rows, num_slots = torch.device(arguments.device), arguments.rows, arguments.slots
    conditional = torch.rand(num_rows, num_slots, device=device).sqrt()
    confidence = Confidence(conditional, conditional.cumprod(dim=-1))
    costs = StepCosts.of([1 + 16 * -(-b // 16) / 256 for b in range(num_rows * (1 + num_slots) + 1)], device=device)
    full = torch.full((num_rows,), num_slots, device=device)
    print(f"{num_rows} rows, {num_slots} slots, {device}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print("| policy | median ms | 95th percentile ms |\n|---|---|---|")
    for name in VERIFICATION_POLICIES:
        policy = policy_factory(name, 0.5)()

        def play(policy=policy) -> None:  # noqa: ANN001
            is_live = torch.ones(num_rows, dtype=torch.bool, device=device)
            facts = RoundFacts(num_slots, tuple(range(num_rows)), is_live, full, full, costs)
            lengths = schedule(policy, confidence, facts)
            policy.observe(confidence, lengths, lengths // 2, facts)

        report(name, play, device, arguments.repeats)
    gate = DraftGate(num_slots, prior_acceptance=(0.99,))

    def gated() -> None:
        gate.wants_draft(num_rows, costs)
        gate.observe([num_slots] * num_rows, [num_slots] * num_rows, costs)

    report("the gate", gated, device, arguments.repeats)


def report(name: str, play, device: torch.device, repeats: int) -> None:  # noqa: ANN001
    seconds = []
    for _ in range(10 + repeats):
        start_s = time.perf_counter()
        play()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start_s)
    seconds = seconds[10:]
    print(f"| {name} | {1e3 * statistics.median(seconds):.3f} | {1e3 * statistics.quantiles(seconds, n=20)[-1]:.3f} |")


if __name__ == "__main__":
    main()
