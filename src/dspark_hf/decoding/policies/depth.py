"""How many slots a round drafts: from past rounds and step times only, before anything of the round is known."""

from collections.abc import Sequence

from .facts import StepCosts

# Rows * rounds after which an observation has lost most of its weight (1 - 1/e).
MEMORY_ROW_ROUNDS = 512.0

# A slot is judged when it was drafted in so many rows * rounds. Those of slots that are left out fade like all others,
# so such slots are drafted again now and then.
MIN_ROW_ROUNDS = 48.0


class DraftDepth:
    """Leaves out slots at the end of a block that cost more time than their accepted drafts are worth.

    Slot k is worth drafting while its accepted drafts in a round, over the seconds of drawing it, are at least the
    tokens per second of a whole round. Every slot is drafted until enough is known of it. A policy still decides how
    much of what was drafted is verified.

    Args:
        num_slots: Drafts of a whole block.
    """

    def __init__(self, num_slots: int) -> None:
        self._weight = [0.0] * num_slots  # rows * rounds in which the slot was drafted
        self._accepted = [0.0] * num_slots  # drafts accepted there
        self._rate = 0.0  # tokens a second of the last rounds

    def slots(self, num_live: int, costs: StepCosts) -> int:
        """Slots to draft in the round that begins now, 1 to `num_slots`."""
        others = range(1, len(self._weight))
        return next((k for k in others if not self._is_worth(k, num_live, costs)), len(self._weight))

    def observe(self, num_accepted: Sequence[int], lengths: Sequence[int], num_drafted: int, costs: StepCosts) -> None:
        """Take a drafted round: drafts accepted and verified of each live row, and the slots that were drafted."""
        num_live = len(num_accepted)
        keep = max(0.0, 1.0 - num_live / MEMORY_ROW_ROUNDS)
        for k in range(len(self._weight)):
            self._weight[k] = keep * self._weight[k] + num_live * (k < num_drafted)
            self._accepted[k] = keep * self._accepted[k] + sum(n > k for n in num_accepted)
        rate = (num_live + sum(num_accepted)) / costs.round_seconds(num_live + sum(lengths))
        self._rate = rate if not self._rate else keep * self._rate + (1.0 - keep) * rate

    def _is_worth(self, k: int, num_live: int, costs: StepCosts) -> bool:
        if self._weight[k] < MIN_ROW_ROUNDS:
            return True
        return num_live * self._accepted[k] / self._weight[k] >= self._rate * costs.slot_s
