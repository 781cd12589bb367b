"""The draft gate: what it knows before any round, what it learns, and what its trials cost."""

import random

import pytest

from dspark_hf import UnsupportedGenerationError
from dspark_hf.decoding.policies.facts import StepCosts
from dspark_hf.decoding.policies.gate import FIRST_WAIT_ROUNDS, MAX_TRIAL_SHARE, DraftGate

NUM_SLOTS = 5


def line(num_rows, per_token, *, draft_s=0.1):
    """Step times that grow by `per_token` seconds a token, from 1 second."""
    return StepCosts.of([1.0 + per_token * b for b in range(num_rows * (1 + NUM_SLOTS) + 1)], draft_s=draft_s)


class Game:
    """Rounds of equal rows whose drafts are accepted with one chance each."""

    def __init__(self, gate, chance, seed=0):
        self.gate, self.chance, self.random = gate, chance, random.Random(seed)
        self.tokens, self.seconds, self.decisions = 0, 0.0, []

    def play(self, num_rows, costs, num_rounds, length=NUM_SLOTS):
        for _ in range(num_rounds):
            wants = self.gate is None or self.gate.wants_draft(num_rows, costs)
            self.decisions.append(wants)
            if wants:
                kept = [self.accepted(length) for _ in range(num_rows)]
                if self.gate is not None:
                    self.gate.observe(kept, [length] * num_rows, costs)
                self.tokens += num_rows + sum(kept)
                self.seconds += costs.seconds[num_rows * (1 + length)] + costs.draft_s
            else:
                self.gate.observe_plain(num_rows, costs)
                self.tokens += num_rows
                self.seconds += costs.seconds[num_rows]
        return self

    def accepted(self, length):
        return next((k for k in range(length) if self.random.random() >= self.chance), length)

    @property
    def rate(self):
        return self.tokens / self.seconds


def test_a_cheap_step_is_drafted_for_from_the_first_round_on():
    assert DraftGate(NUM_SLOTS).wants_draft(1, line(1, 0.01))


def test_a_full_machine_never_drafts_before_there_is_reason_to():
    game = Game(DraftGate(NUM_SLOTS), chance=0.0).play(64, line(64, 1.0), FIRST_WAIT_ROUNDS)
    assert game.decisions == [False] * FIRST_WAIT_ROUNDS


def test_the_drafters_own_acceptance_is_a_better_prior():
    costs = line(8, 0.2)
    assert not DraftGate(NUM_SLOTS).wants_draft(8, costs)
    assert DraftGate(NUM_SLOTS, prior_acceptance=(0.9, 0.85)).wants_draft(8, costs)


@pytest.mark.parametrize("num_rows", [1, 8, 64])
def test_a_useless_drafter_is_found_out_in_a_few_rounds(num_rows):
    costs = line(num_rows, 0.001)
    game = Game(DraftGate(NUM_SLOTS), chance=0.0).play(num_rows, costs, 60)
    assert 1 <= game.decisions.index(False) <= 1 + 28 // num_rows


@pytest.mark.parametrize("num_rows", [1, 8, 64])
def test_a_drafter_better_than_expected_is_found_out_by_trials(num_rows):
    costs = line(num_rows, 0.5 / num_rows, draft_s=0.1)  # by the prior a draft is worth less than it costs
    game = Game(DraftGate(NUM_SLOTS, prior_acceptance=(0.2,)), chance=0.9).play(num_rows, costs, 1500)
    assert not any(game.decisions[:FIRST_WAIT_ROUNDS])
    assert all(game.decisions[-500:])


@pytest.mark.parametrize("num_rows", [1, 8, 64])
@pytest.mark.parametrize("per_token", [0.2, 1.0])
def test_trials_in_vain_cost_about_a_hundredth(num_rows, per_token):
    costs = line(num_rows, per_token)
    game = Game(DraftGate(NUM_SLOTS, prior_acceptance=(0.05,)), chance=0.0).play(num_rows, costs, 4000, length=1)
    plain = num_rows / costs.seconds[num_rows]
    assert not game.decisions[0]
    assert any(game.decisions)
    assert 1.0 - game.rate / plain <= 1.2 * MAX_TRIAL_SHARE


@pytest.mark.parametrize("num_rows", [1, 4, 16, 64])
@pytest.mark.parametrize("per_row_cost", [0.02, 0.2, 1.0, 4.0])
@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_it_comes_close_to_the_better_of_always_and_never(num_rows, per_row_cost, chance):
    costs, num_rounds = line(num_rows, per_row_cost / num_rows), 2500 if num_rows <= 4 else 500
    gated = Game(DraftGate(NUM_SLOTS), chance).play(num_rows, costs, num_rounds).rate
    always = Game(None, chance).play(num_rows, costs, num_rounds).rate
    never = num_rows / costs.seconds[num_rows]
    # Where a prior is wrong the other way round and a trial is dear, a hundredth of the time finds out slowly.
    is_surprise = always > never and not DraftGate(NUM_SLOTS).wants_draft(num_rows, costs)
    assert gated >= (0.9 if is_surprise else 0.97) * max(always, never)


def test_rows_that_end_open_the_gate_at_once():
    gate = DraftGate(NUM_SLOTS)
    game = Game(gate, chance=0.7).play(64, line(64, 1.0, draft_s=20.0), 20)
    assert not any(game.decisions)
    assert gate.wants_draft(2, line(2, 0.01))


def test_what_was_learned_of_the_drafter_holds_in_a_new_situation():
    gate, costs = DraftGate(NUM_SLOTS), line(2, 0.001, draft_s=0.5)
    assert DraftGate(NUM_SLOTS).wants_draft(2, costs)
    Game(gate, chance=0.0).play(4, line(4, 0.01), 30)
    assert not gate.wants_draft(2, costs)


def test_small_changes_are_no_new_situation():
    gate = DraftGate(NUM_SLOTS)
    Game(gate, chance=0.0).play(1, line(1, 0.01, draft_s=0.2), 40)
    seen = gate._seen
    gate.wants_draft(1, line(1, 0.02, draft_s=0.21))
    assert gate._seen == seen
    gate.wants_draft(1, line(1, 0.02, draft_s=0.3))
    assert gate._seen != seen


def test_the_same_rounds_give_the_same_decisions():
    games = [Game(DraftGate(NUM_SLOTS), chance=0.4, seed=3).play(4, line(4, 0.1), 300) for _ in range(2)]
    assert games[0].decisions == games[1].decisions
    assert len(set(games[0].decisions)) == 2


@pytest.mark.parametrize("prior", [(), (1.2,), (-0.1,), (float("nan"),)])
def test_a_prior_is_made_of_probabilities(prior):
    with pytest.raises(UnsupportedGenerationError, match="must hold probabilities"):
        DraftGate(NUM_SLOTS, prior_acceptance=prior)
