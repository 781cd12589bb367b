"""Calibration error and ranking against worked numbers and slow loops."""

import math

import pytest
import sklearn.calibration
import sklearn.metrics
import torch

from dspark_hf.fitting.metrics import brier_score, calibrated_error_floor, expected_calibration_error, roc_auc


def test_worked_calibration_error():
    predicted = torch.tensor([0.02, 0.03, 0.12, 0.52, 0.54, 0.97, 0.98, 0.99])
    outcome = torch.tensor([0.0, 0, 1, 0, 1, 1, 1, 0])
    assert expected_calibration_error(predicted, outcome) == pytest.approx(0.24125, abs=1e-6)


def test_weights_count_as_repetitions():
    predicted, outcome = torch.tensor([0.1, 0.6, 1.0]), torch.tensor([0.0, 1.0, 1.0])
    weight = torch.tensor([3, 0, 2])
    repeated = expected_calibration_error(predicted.repeat_interleave(weight), outcome.repeat_interleave(weight))
    assert expected_calibration_error(predicted, outcome, weight) == pytest.approx(repeated, abs=1e-7)


def test_auc_equals_the_share_of_pairs():
    g = torch.Generator().manual_seed(0)
    predicted = torch.randint(0, 6, (40,), generator=g) / 5
    label = torch.randint(0, 2, (40,), generator=g).double()
    pairs = [1.0 if p > n else 0.5 if p == n else 0.0 for p in predicted[label == 1] for n in predicted[label == 0]]
    assert roc_auc(predicted, label, 1 - label) == pytest.approx(sum(pairs) / len(pairs), abs=1e-9)
    assert math.isnan(roc_auc(predicted, torch.ones(40), torch.zeros(40)))


@pytest.fixture
def drawn():
    g = torch.Generator().manual_seed(3)
    predicted = torch.rand(4000, generator=g)
    return predicted, (torch.rand(4000, generator=g) < predicted**1.5).float()


def test_measures_equal_those_of_scikit_learn(drawn):
    predicted, outcome = (values.double() for values in drawn)
    shares, means = sklearn.calibration.calibration_curve(outcome, predicted, n_bins=20)
    counts = torch.histc(predicted, bins=20, min=0, max=1).numpy()
    error = float((counts * abs(shares - means)).sum() / counts.sum())
    assert expected_calibration_error(predicted, outcome) == pytest.approx(error, abs=1e-9)
    assert roc_auc(predicted, outcome, 1 - outcome) == pytest.approx(sklearn.metrics.roc_auc_score(outcome, predicted))
    assert brier_score(predicted, outcome) == pytest.approx(sklearn.metrics.brier_score_loss(outcome, predicted))


def test_the_floor_is_what_calibrated_outcomes_give(drawn):
    predicted, distorted = drawn
    mean, high = calibrated_error_floor(predicted, seed=0, num_draws=300)
    outcome = (torch.rand(4000, generator=torch.Generator().manual_seed(9)) < predicted).float()
    assert 0.5 * mean < expected_calibration_error(predicted, outcome) < high
    assert expected_calibration_error(predicted, distorted) > 2 * high
    assert calibrated_error_floor(predicted[:400], seed=0, num_draws=300)[0] == pytest.approx(mean * 10**0.5, rel=0.2)
