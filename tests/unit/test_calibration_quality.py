"""Quality of survival estimates against slow references and scikit-learn."""

import numpy as np
import pytest
import sklearn.metrics
import torch

from dspark_hf import CalibrationError, Proposals
from dspark_hf.decoding.calibrate import SlotCalibration, calibrate
from dspark_hf.evaluation import calibration_quality as quality_module
from dspark_hf.evaluation.calibration_quality import slot_qualities
from dspark_hf.fitting.metrics import brier_score, expected_calibration_error


@pytest.fixture(scope="module", autouse=True)
def fewer_resamples():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quality_module, "NUM_RESAMPLES", 200)
        yield


@pytest.fixture(scope="module")
def proposals():
    g = torch.Generator().manual_seed(0)
    true = torch.randn(3000, 2, generator=g) * 1.5
    accepted = (torch.rand(true.shape, generator=g) < true.sigmoid()).long().cumprod(1).sum(1)
    verified = torch.randint(1, 3, (3000,), generator=g)
    return Proposals.of(3 * true, verified, torch.minimum(accepted, verified), [i // 30 for i in range(3000)])


@pytest.fixture(scope="module")
def slots(proposals):
    return slot_qualities(proposals, SlotCalibration.of({"temperatures": [3.0, 3.0]}), seed=0)


def test_point_values_are_those_of_the_plain_measures(proposals, slots):
    raw = calibrate(proposals.logits).survival
    for k, slot in enumerate(slots):
        rows = proposals.is_verified[:, k]
        predicted, outcome = raw[rows, k].double(), proposals.is_accepted[rows, k].double()
        assert slot.num_proposals == int(rows.sum())
        assert slot.before.ece.value == pytest.approx(expected_calibration_error(predicted, outcome))
        assert slot.before.brier.value == pytest.approx(brier_score(predicted, outcome))
        exact = sklearn.metrics.roc_auc_score(outcome, predicted)
        assert slot.before.auc.value == pytest.approx(exact, abs=2e-3)  # ties inside a fine bin
        assert sum(one.num_proposals for one in slot.before.bins) == slot.num_proposals


def test_calibration_shows_and_reaches_the_floor(slots):
    for slot in slots:
        assert slot.ece_change.high < 0 and not slot.is_worse
        assert slot.after.ece.value < slot.ece_floor_high < slot.before.ece.value
        assert slot.after.brier.value < slot.before.brier.value


def test_a_harmful_map_is_called_worse(proposals):
    harmful = slot_qualities(proposals, SlotCalibration.of({"temperatures": [0.2, 0.2]}), seed=0)
    assert all(slot.is_worse for slot in harmful)
    unchanged = slot_qualities(proposals, SlotCalibration.of({"temperatures": [1.0, 1.0]}), seed=0)
    assert [slot.ece_change.value for slot in unchanged] == [0.0, 0.0] and not any(s.is_worse for s in unchanged)


def test_the_interval_resamples_prompts_not_rounds():
    """30 equal rounds a prompt: as wide as with one round a prompt."""
    g = torch.Generator().manual_seed(1)
    logits, accepted = torch.randn(20, 1, generator=g), (torch.rand(20, generator=g) < 0.5).long()
    once = Proposals.of(logits, [1] * 20, accepted, list(range(20)))
    often = once.select(torch.arange(20).repeat_interleave(30))
    identity = SlotCalibration.of({"temperatures": [1.0]})
    wide, same = (slot_qualities(part, identity, seed=0)[0].before.brier for part in (once, often))
    assert np.allclose([wide.low, wide.high], [same.low, same.high])
    as_rounds = Proposals(often.logits, often.is_accepted, often.is_verified, torch.arange(600))
    narrow = slot_qualities(as_rounds, identity, seed=0)[0].before.brier
    assert narrow.high - narrow.low < 0.3 * (wide.high - wide.low)


def test_a_slot_that_no_held_out_round_verified_is_said():
    proposals = Proposals.of(torch.zeros(3, 2), [1] * 3, [1, 0, 1], [0, 1, 2])
    with pytest.raises(CalibrationError, match="slot 2 was verified in 0 of 3 held-out rounds.*record more"):
        slot_qualities(proposals, SlotCalibration.of({"temperatures": [1.0, 1.0]}), seed=0)
