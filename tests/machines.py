"""Stand-ins for a throughput profile, for calls of generate()."""

import torch

from dspark_hf.fitting.throughput import MeasuredCosts, ProfileGrid


class Machine:
    """Stands for a profile: `step_s(B)` for every number of rows and context."""

    def __init__(self, step_s, draft_s=0.0, max_rows=32, slot_s=0.0):
        self.make, self.seconds, self.slot_s = step_s, draft_s, slot_s
        self.grid = ProfileGrid(tuple(range(1, max_rows + 1)), tuple(range(1, 9)), (1, 4096))
        self.asked = []

    def covers(self, num_rows, num_tokens):
        return num_rows <= self.grid.num_rows[-1]

    def step_costs(self, num_rows, context):
        self.asked.append((num_rows, context))
        return MeasuredCosts(
            torch.tensor([self.make(b) for b in range(num_rows * 8 + 1)]).double(), self.seconds, self.slot_s
        )

    def overhead_s(self, num_rows):
        return 0.0


LINEAR_MACHINE = Machine(lambda b: 1.0 + 0.1 * b)
