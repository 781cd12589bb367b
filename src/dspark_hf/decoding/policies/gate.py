"""Whether a round drafts at all: decided before drafting, from past rounds and step times only."""

from collections.abc import Sequence

from ...errors import UnsupportedGenerationError
from .facts import StepCosts

# Expected conditional acceptance of every slot while nothing is known of the drafter.
PRIOR_ACCEPTANCE = 0.6

# Judged drafts that the prior weighs, by slot, and rows * rounds that the forecast of a round weighs.
PRIOR_DRAFTS = 8.0
PRIOR_ROW_ROUNDS = 8.0

# After so many rows * rounds an observation has lost most of its weight (1 - 1/e).
MEMORY_ROW_ROUNDS = 256.0

# Plain rounds before drafting is tried again; doubled after each trial in vain, up to the second number.
FIRST_WAIT_ROUNDS = 16
MAX_WAIT_ROUNDS = 256

# Share of the time that trials may cost.
MAX_TRIAL_SHARE = 0.01

# A change of step times or rows by more than this makes a new situation.
MAX_DRIFT = 0.1


class DraftGate:
    """Says before each round whether drafting pays; if not, the round is a plain step.

    Two rates are compared, in tokens a second: a plain step's, `R / (step_s(R) + overhead)` for R live rows, and a
    drafted round's. The latter is a forecast, to which drafted rounds in the present situation are added as they
    come, so that what the policy really achieves decides in the end. The forecast takes the best number of drafts
    under the acceptance seen so far by slot, before any round `prior_acceptance`; draft seconds count in full. So a
    drafter that by the prior cannot pay at this batch size costs what trials cost, from the first round on.

    While the gate is closed, drafting is tried for one round after 16, 32, ... plain rounds, and again at once where
    that paid; but only if what trials lost so far, and what this one loses if no draft is accepted, are within
    `MAX_TRIAL_SHARE` of the time. When rows
    end or step times change the forecast is made anew and may open the gate at once. Rounds drafted on the word of a
    forecast that turns out wrong are no trials: they are few, a forecast weighs `PRIOR_ROW_ROUNDS` only.

    Numbers are floats on the host that the loop has read anyway; seconds come from `StepCosts`, never from a clock,
    so that the same rounds give the same decisions. Nothing of the present draft is known by then: lossless.

    Args:
        num_slots: Drafts of a block.
        prior_acceptance: Conditional acceptance by slot, in [0, 1]; the last counts for all that follow.

    Raises:
        UnsupportedGenerationError: a prior that is no probability, or none at all.
    """

    def __init__(self, num_slots: int, *, prior_acceptance: Sequence[float] = (PRIOR_ACCEPTANCE,)) -> None:
        if not prior_acceptance or not all(0.0 <= share <= 1.0 for share in prior_acceptance):
            raise UnsupportedGenerationError(
                f"prior_acceptance must hold probabilities, 0 to 1, got {prior_acceptance!r}; leave it out for "
                f"{PRIOR_ACCEPTANCE} at every slot"
            )
        given = list(prior_acceptance)[:num_slots]
        prior = given + given[-1:] * (num_slots - len(given))
        self._num_judged = [PRIOR_DRAFTS] * num_slots
        self._num_accepted = [PRIOR_DRAFTS * share for share in prior]
        self._situation: tuple[int, float, float] | None = None
        self._wants = True
        self._forecast = (0.0, 0.0)  # tokens and seconds of a drafted round
        self._num_drafted = 0
        self._seen = (0.0, 0.0)  # tokens and seconds of drafted rounds in the present situation
        self._total_s = 0.0
        self._lost_s = 0.0  # by trials
        self._num_plain = 0  # rounds since the last drafted one
        self._wait = FIRST_WAIT_ROUNDS
        self._is_trial = False

    def wants_draft(self, num_live: int, costs: StepCosts) -> bool:
        """Whether the round that begins now should draft.

        Args:
            num_live: Rows that have not ended, >= 1.
            costs: For these rows.
        """
        self._meet(num_live, costs)
        self._is_trial = False
        if self._wants:
            return True
        loss_s = self._forecast[1] - _plain_s(costs, num_live)
        may_lose = self._lost_s + loss_s <= MAX_TRIAL_SHARE * self._total_s
        self._is_trial = may_lose and self._num_plain >= self._wait
        return self._is_trial

    def observe(self, num_accepted: Sequence[int], lengths: Sequence[int], costs: StepCosts) -> None:
        """Take a drafted round: drafts accepted and verified of each live row, and the costs of that round."""
        num_live = len(lengths)
        keep = max(0.0, 1.0 - num_live / MEMORY_ROW_ROUNDS)
        self._learn(num_accepted, lengths, keep)
        tokens, round_s = num_live + sum(num_accepted), costs.round_seconds(num_live + sum(lengths))
        self._total_s += round_s
        self._seen = keep * self._seen[0] + tokens, keep * self._seen[1] + round_s
        self._num_drafted += 1
        if self._is_trial or self._num_drafted.bit_count() == 1:  # 1, 2, 4, ...: it need not be cheap for many rows
            self._forecast = self._foreseen(num_live, costs)
        self._decide(num_live, costs)
        self._num_plain = 0
        if self._is_trial:
            self._judge_trial(round_s - tokens * _plain_s(costs, num_live) / num_live)
        if self._wants:
            self._wait = FIRST_WAIT_ROUNDS

    def observe_plain(self, num_live: int, costs: StepCosts) -> None:
        """Take a round without a draft."""
        self._total_s += _plain_s(costs, num_live)
        self._num_plain += 1

    def _judge_trial(self, lost_s: float) -> None:
        """A trial that paid is repeated at once, one in vain later than the last."""
        self._lost_s += max(0.0, lost_s)
        if lost_s < 0:
            self._num_plain = self._wait
        else:
            self._wait = min(2 * self._wait, MAX_WAIT_ROUNDS)

    # -- what a drafted round is worth --------------------------------------------------------------------------

    def _learn(self, num_accepted: Sequence[int], lengths: Sequence[int], keep: float) -> None:
        """Count, by slot, the drafts whose predecessors were accepted, and those of them that were."""
        for k in range(len(self._num_judged)):
            reached = sum(n >= k for n, length in zip(num_accepted, lengths, strict=True) if length > k)
            if reached:
                self._num_judged[k] = keep * self._num_judged[k] + reached
                self._num_accepted[k] = keep * self._num_accepted[k] + sum(n > k for n in num_accepted)

    def _meet(self, num_live: int, costs: StepCosts) -> None:
        """Forecast anew when rows or step times are no longer those that the last forecast was made for."""
        now = (num_live, _plain_s(costs, num_live), costs.draft_s)
        if self._situation is not None and not _has_changed(self._situation, now):
            return
        self._situation = now
        self._forecast = self._foreseen(num_live, costs)
        self._num_drafted, self._seen = 0, (0.0, 0.0)
        self._decide(num_live, costs)

    def _decide(self, num_live: int, costs: StepCosts) -> None:
        weight = PRIOR_ROW_ROUNDS / num_live  # rounds
        tokens = weight * self._forecast[0] + self._seen[0]
        seconds = weight * self._forecast[1] + self._seen[1]
        self._wants = tokens * _plain_s(costs, num_live) > num_live * seconds

    def _foreseen(self, num_live: int, costs: StepCosts) -> tuple[float, float]:
        """Tokens and seconds of the round that gives most tokens a second, under the acceptance known by slot."""
        tokens, best = float(num_live), (0.0, 1.0)
        survival = 1.0
        for k, (accepted, judged) in enumerate(zip(self._num_accepted, self._num_judged, strict=True)):
            survival *= accepted / judged
            for n in range(1, num_live + 1):  # all rows are alike, so slot k of each comes before any slot k + 1
                tokens += survival
                round_s = costs.round_seconds(num_live * (1 + k) + n)
                if tokens * best[1] > best[0] * round_s:
                    best = (tokens, round_s)
        return best


def _plain_s(costs: StepCosts, num_live: int) -> float:
    return costs.seconds[num_live] + costs.overhead_s


def _has_changed(before: tuple[float, ...], now: tuple[float, ...]) -> bool:
    return any(abs(new - old) > MAX_DRIFT * old for old, new in zip(before, now, strict=True))
