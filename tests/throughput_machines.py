"""Machines that a throughput profile can be measured on without a model: what each thing takes is a formula."""

import math

from dspark_hf.fitting.fingerprint import Fingerprint
from dspark_hf.fitting.measuring import ProfilePlan, measure
from dspark_hf.fitting.throughput import ThroughputProfile

BLOCK_SIZE = 3
FINGERPRINT = Fingerprint(
    "cpu: fake", "float32", "aaaa", "bbbb", "padded", 2, {"dspark_hf": "1", "torch": "2", "transformers": "3"}
)


class StaircaseMachine:
    """A step takes a millisecond for each 4 tokens begun, and 1 % more for each token of context."""

    def __init__(self):
        self.num_rows = None
        self.calls = []

    def open(self, num_rows):
        self.num_rows = num_rows

    def step_s(self, tokens_per_row, context):
        self.calls.append(("step", self.num_rows, tokens_per_row, context))
        return 1e-3 * math.ceil(self.num_rows * tokens_per_row / 4) * (1 + context / 100)

    def draft_s(self, context, num_slots=None):
        self.calls.append(("draft" if num_slots is None else f"{num_slots} slots", self.num_rows, context))
        share = 1.0 if num_slots is None else 0.5 + 0.5 * (num_slots - 1) / (BLOCK_SIZE - 1)
        return share * 1e-4 * self.num_rows * (1 + context / 100)

    def plain_step_s(self, context):
        self.calls.append(("plain", self.num_rows, context))
        return 7e-4 * self.num_rows + 1e-6 * context

    def overhead_s(self):
        self.calls.append(("overhead", self.num_rows))
        return 2e-5 * self.num_rows


def profile_of(bench, *, num_rows=(1, 2, 4), contexts=(10, 30), num_repeats=3, seed=0, **changes) -> ThroughputProfile:
    """What measuring a machine gives."""
    plan = ProfilePlan(num_rows, contexts, num_repeats, seed)
    grid = plan.grid(BLOCK_SIZE)
    fields = {
        "fingerprint": FINGERPRINT,
        "target": "owner/target",
        "drafter": "my drafter",
        "grid": grid,
        "num_repeats": num_repeats,
        "provenance": {"seed": seed},
        **measure(bench, plan, grid, lambda: None)._asdict(),
    }
    return ThroughputProfile(**(fields | changes))
