"""Drafters of known acceptance through the estimators: tau, slots, AUC, thresholds and speed come back."""

import math

import numpy as np
import pytest
from synthetic_drafters import SyntheticDrafter

from dspark_hf import SpeculationReport
from dspark_hf.decoding.calibrate import SlotCalibration
from dspark_hf.evaluation import calibration_quality, intervals
from dspark_hf.evaluation.acceptance_tables import group_scores
from dspark_hf.evaluation.cuts import CutPlan
from dspark_hf.evaluation.decoded import decoded_text
from dspark_hf.evaluation.results import GenerationTiming, PromptResult, RunPair, pooled_numbers
from dspark_hf.evaluation.rounds_file import PromptRounds

DRAFTER = SyntheticDrafter(((0.5, 0.4), (0.7, 0.6), (0.9, 0.8)), shift=1.2)
NUM_TRIALS, NUM_PROMPTS = 40, 40
# Of 40 intervals at 95 %, 32 or fewer hold the truth with a probability below 0.1 %.
FEWEST = 33


@pytest.fixture(scope="module", autouse=True)
def fewer_resamples():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intervals, "NUM_RESAMPLES", 400)
        patch.setattr(calibration_quality, "NUM_RESAMPLES", 200)
        patch.setattr("dspark_hf.evaluation.acceptance_tables.NUM_AUC_BINS", 100)
        yield


def scores_of(prompts, plan):
    texts = [decoded_text(one, plan, has_confidence=bool(one.logits[0])) for one in prompts]
    return texts, group_scores(texts, plan.cuts, seed=0)


@pytest.fixture(scope="module")
def trials():
    rng = np.random.default_rng(0)
    plan = CutPlan(DRAFTER.num_slots)
    return [scores_of(DRAFTER.prompts(rng, NUM_PROMPTS), plan)[1]["all"] for _ in range(NUM_TRIALS)]


def num_covering(estimates, true):
    return sum(one.low <= true <= one.high for one in estimates)


def test_tau_and_slots_lie_in_their_intervals(trials):
    taus = [score.lengths[-1].tau for score in trials]
    assert num_covering(taus, DRAFTER.tau) >= FEWEST
    for k, true in enumerate(DRAFTER.conditional):
        slots = [score.slots[k].conditional_acceptance for score in trials]
        assert num_covering(slots, true) >= FEWEST
        assert num_covering(slots, true + 0.1) < NUM_TRIALS / 2  # a wrong rate is not held
    shorter = [score.lengths[0].tau for score in trials]
    assert num_covering(shorter, 1 + DRAFTER.survival[0]) >= FEWEST
    rejected = [score.lengths[-1].rejected for score in trials]
    assert num_covering(rejected, DRAFTER.num_slots - DRAFTER.survival.sum()) >= FEWEST
    assert num_covering(taus, DRAFTER.tau + 0.3) < NUM_TRIALS / 2


def test_auc_lies_in_its_interval(trials):
    for k in range(DRAFTER.num_slots):
        found = [score.slots[k].confidence_auc for score in trials]
        assert num_covering(found, DRAFTER.auc) >= FEWEST
        assert num_covering(found, DRAFTER.auc + 0.06) < NUM_TRIALS / 2
        assert np.mean([one.value for one in found]) == pytest.approx(DRAFTER.auc, abs=0.01)


def test_counts_add_up(trials):
    counts = trials[0].counts
    assert counts.num_rounds == NUM_PROMPTS * DRAFTER.num_rounds
    assert counts.num_verified == DRAFTER.num_slots * counts.num_rounds
    assert counts.num_accepted + counts.num_rejected == counts.num_verified
    assert counts.num_tokens == counts.num_rounds + counts.num_accepted
    assert trials[0].slots[1].num_reached == trials[0].slots[0].num_accepted


def test_thresholds_keep_what_calibrated_confidences_say():
    """One slot that is accepted with the probability its logit says, and a head that is twice too unsure."""
    rng = np.random.default_rng(1)
    spread, prompts = 1.5, []
    for i in range(200):
        z = spread * rng.standard_normal(30)
        accepted = (rng.random(30) < 1 / (1 + np.exp(-z))).astype(int)
        num_new = int(accepted.sum()) + 31
        prompts.append(PromptRounds(f"a/{i}", "", (z[:, None] / 2).tolist(), [1] * 30, accepted.tolist(), num_new))
    calibration = SlotCalibration.of({"temperatures": [0.5]})
    _, scores = scores_of(prompts, CutPlan(1, (0.0, 0.6, 0.8), calibration))
    grid = np.linspace(-10, 10, 20001)
    density = np.exp(-0.5 * (grid / spread) ** 2)
    probability = 1 / (1 + np.exp(-grid))
    for scale, points in ((0.5, scores["all"].thresholds), (1.0, scores["all"].calibrated_thresholds)):
        for point in points:
            is_kept = 1 / (1 + np.exp(-scale * grid)) >= point.value
            verified = (density * is_kept).sum() / density.sum()
            accepted = (density * is_kept * probability).sum() / density.sum()
            assert point.accepted.value == pytest.approx(accepted, abs=0.02)
            assert point.rejected.value == pytest.approx(verified - accepted, abs=0.02)
            assert point.tau.value == pytest.approx(1 + point.accepted.value)
            assert point.rate.value == pytest.approx((1 + accepted) / (1 + verified), abs=0.02)
            assert point.draft_rate.value == pytest.approx(accepted / verified, abs=0.02)
    rates = [point.draft_rate.value for point in scores["all"].calibrated_thresholds]
    assert rates == sorted(rates) and rates[-1] > rates[0] + 0.1


def speed_trial(rng, plain_step_s, round_s):
    """Prompts of the synthetic drafter with noisy clocks; what a comparison makes of them."""
    results = []
    for one in DRAFTER.prompts(rng, NUM_PROMPTS):
        report = SpeculationReport(num_calls=1, num_new_tokens=one.num_new_tokens)
        for num_accepted in one.num_accepted:
            report.count_round(DRAFTER.num_slots, DRAFTER.num_slots, num_accepted)
        tokens = one.num_new_tokens - 1
        noise = np.exp(0.1 * rng.standard_normal(2) - 0.005)  # of mean 1
        plain = GenerationTiming(tokens, tokens * plain_step_s * noise[0])
        dspark = GenerationTiming(tokens, report.num_rounds * round_s * noise[1])
        results.append(PromptResult(one.id, 5, (RunPair("plain", plain, dspark, report),), None, None))
    return pooled_numbers(tuple(results), is_greedy=False, seed=0)


def test_the_speed_ratio_lies_in_its_interval():
    rng = np.random.default_rng(2)
    plain_step_s, round_s = 0.02, 0.03
    found = [speed_trial(rng, plain_step_s, round_s) for _ in range(NUM_TRIALS)]
    true = DRAFTER.tau * plain_step_s / round_s  # paper, Eq. 1
    assert num_covering([one["speed_ratio"] for one in found], true) >= FEWEST
    assert num_covering([one["tau"] for one in found], DRAFTER.tau) >= FEWEST
    assert num_covering([one["speed_ratio"] for one in found], 1.15 * true) < NUM_TRIALS / 2


def test_the_fewest_covering_is_what_chance_allows():
    tail = sum(math.comb(NUM_TRIALS, k) * 0.95**k * 0.05 ** (NUM_TRIALS - k) for k in range(FEWEST))
    assert tail < 1e-3
