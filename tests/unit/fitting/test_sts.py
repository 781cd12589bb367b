"""Sequential temperature scaling on outcomes whose law is known."""

import pytest
import torch

from dspark_hf import CalibrationError, Proposals, SequentialTemperatureScaling
from dspark_hf.decoding.calibrate import SlotCalibration, calibrate
from dspark_hf.fitting.metrics import expected_calibration_error
from dspark_hf.fitting.sts import _fit_temperature, _slot


def drawn_proposals(rounds=8000, distortion=(0.5, 2.0, 1.5), shift=0.0, seed=0, spread=1.5):
    """Outcomes drawn from true logits; what the head says is the true logit times `distortion` plus `shift`."""
    generator = torch.Generator().manual_seed(seed)
    true = torch.randn(rounds, len(distortion), generator=generator) * spread
    accepted = (torch.rand(true.shape, generator=generator) < true.sigmoid()).long().cumprod(1).sum(1)
    logits = true * torch.tensor(distortion) + shift
    return Proposals.of(logits, [len(distortion)] * rounds, accepted.tolist(), [i // 40 for i in range(rounds)])


def errors(proposals, calibration=None):
    survival = calibrate(proposals.logits, calibration).survival
    outcomes = proposals.is_accepted.float()
    return [expected_calibration_error(survival[:, k], outcomes[:, k]) for k in range(proposals.num_slots)]


def test_the_distortion_of_every_slot_is_undone():
    fitted = SequentialTemperatureScaling().fit(drawn_proposals(rounds=40_000))
    assert fitted.temperatures == pytest.approx((0.5, 2.0, 1.5), rel=0.15)
    fresh = drawn_proposals(rounds=40_000, seed=1)
    before, after = errors(fresh), errors(fresh, fitted.slot_calibration)
    assert max(after) < 0.012 and min(before) > 0.025


def test_no_other_temperature_of_a_fine_grid_is_better():
    proposals = drawn_proposals(rounds=3000)
    slot = _slot(proposals, [(1.3, 0.0)], 1)
    found = slot.error(_fit_temperature(slot))
    grid = [slot.error((2.0 ** (-i / 16), 0.0)) for i in range(-48, 49)]
    assert found <= min(grid) + 1e-3
    assert max(grid) > found + 0.02


def test_slots_are_fitted_from_left_to_right():
    """Later slots do not change what an earlier one gets."""
    proposals = drawn_proposals()
    other = drawn_proposals(seed=5)
    changed = Proposals(
        torch.cat([proposals.logits[:, :2], other.logits[:, 2:]], dim=1),
        proposals.is_accepted,
        proposals.is_verified,
        proposals.prompt,
    )
    first, second = (SequentialTemperatureScaling().fit(p).temperatures for p in (proposals, changed))
    assert first[:2] == second[:2] and first[2] != second[2]


def test_where_all_temperatures_are_equal_the_one_nearest_to_1_is_taken():
    logits = torch.zeros(1000, 1)  # half at every temperature
    proposals = Proposals.of(logits, [1] * 1000, [i % 2 for i in range(1000)], [0] * 1000)
    assert SequentialTemperatureScaling().fit(proposals).temperatures == (1.0,)


def test_the_same_proposals_give_the_same_fit():
    fits = [SequentialTemperatureScaling(maps="platt").fit(drawn_proposals()) for _ in range(2)]
    assert fits[0] == fits[1]


def test_temperatures_change_the_order_of_products_but_not_within_a_slot():
    conditional = torch.tensor([[0.95, 0.50], [0.60, 0.78]])
    logits = conditional.logit()
    before = calibrate(logits).survival[:, 1]
    after = calibrate(logits, SlotCalibration.of({"temperatures": [2.0, 1.0]}))
    assert before.tolist() == pytest.approx([0.475, 0.468], abs=1e-6)
    assert after.survival[:, 1].tolist() == pytest.approx([0.406697, 0.429398], abs=1e-6)
    assert torch.equal(after.conditional.argsort(dim=0), conditional.argsort(dim=0))


def test_survival_never_rises_along_the_slots():
    fitted = SequentialTemperatureScaling(maps="platt").fit(drawn_proposals(shift=1.0))
    survival = calibrate(torch.randn(500, 3) * 30, fitted.slot_calibration).survival
    assert bool((survival[:, 1:] <= survival[:, :-1]).all())
    assert bool(((survival >= 0) & (survival <= 1)).all())


def test_platt_maps_mend_a_shift_that_no_temperature_can():
    proposals = drawn_proposals(rounds=20_000, shift=1.5)
    fitted = SequentialTemperatureScaling(maps="platt").fit(proposals)
    for (scale, shift), factor in zip(fitted.platt, (0.5, 2.0, 1.5), strict=True):
        assert scale == pytest.approx(1 / factor, rel=0.15)
        assert shift == pytest.approx(-1.5 / factor, abs=0.15)
    fresh = drawn_proposals(rounds=20_000, shift=1.5, seed=3)
    temperatures = SlotCalibration.of({"temperatures": fitted.temperatures})
    assert errors(fresh, fitted.slot_calibration)[0] < 0.015
    assert errors(fresh, temperatures)[0] > 0.03


def test_auto_takes_platt_maps_only_where_they_are_better():
    shifted = SequentialTemperatureScaling(maps="auto").fit(drawn_proposals(rounds=20_000, shift=1.5))
    assert shifted.platt == SequentialTemperatureScaling(maps="platt").fit(drawn_proposals(20_000, shift=1.5)).platt
    # All logits equal: both kinds give the same probabilities up to a shift that a temperature can make.
    symmetric = Proposals.of(
        torch.zeros(4000, 1), [1] * 4000, [i % 2 for i in range(4000)], [i % 50 for i in range(4000)]
    )
    assert SequentialTemperatureScaling(maps="auto").fit(symmetric).platt is None


def test_an_unknown_kind_of_map_is_refused():
    with pytest.raises(CalibrationError, match="maps must be one of temperature, platt, auto, got 'isotonic'"):
        SequentialTemperatureScaling(maps="isotonic")


def test_a_slot_that_gets_worse_on_held_out_proposals_is_left_as_it_is():
    proposals, honest = drawn_proposals(), drawn_proposals(distortion=(1.0, 2.0, 1.5), seed=1)
    fitted = SequentialTemperatureScaling().fit(proposals, honest)
    assert fitted.temperatures[0] == 1.0 and 1 in fitted.slots_left_as_they_are
    assert SequentialTemperatureScaling().fit(proposals).slots_left_as_they_are == ()


def test_slots_that_were_not_verified_say_nothing():
    proposals = drawn_proposals()
    noise = proposals.logits.clone()
    is_verified = proposals.is_verified.clone()
    is_verified[::2, 2] = False
    noise[::2, 2] = 100.0
    masked = Proposals(noise, proposals.is_accepted, is_verified, proposals.prompt)
    kept = proposals.select(torch.arange(1, len(proposals), 2))
    logits, outcomes = kept.logits[:, 2], kept.is_accepted[:, 2].float()
    fitted = SequentialTemperatureScaling().fit(masked)
    assert fitted.temperatures[:2] == SequentialTemperatureScaling().fit(proposals).temperatures[:2]
    prefix = calibrate(kept.logits[:, :2], SlotCalibration.of({"temperatures": fitted.temperatures[:2]})).survival[:, 1]
    error = expected_calibration_error(prefix * torch.sigmoid(logits / fitted.temperatures[2]), outcomes)
    assert error < expected_calibration_error(prefix * torch.sigmoid(logits), outcomes)


def test_too_few_proposals_are_refused():
    with pytest.raises(CalibrationError, match="slot 1 has 100 verified proposals.*record more"):
        SequentialTemperatureScaling().fit(drawn_proposals(rounds=100))


@pytest.mark.parametrize("maps", ["temperature", "platt", "auto"])
def test_a_slot_of_one_outcome_is_left_as_it_is(maps):
    """And the others get what they get without it."""
    drawn = drawn_proposals(distortion=(0.5, 2.0))
    none = torch.zeros(len(drawn), 1)
    proposals = Proposals(
        torch.cat([drawn.logits, none], 1),
        torch.cat([drawn.is_accepted, none.bool()], 1),
        torch.cat([drawn.is_verified, ~none.bool()], 1),
        drawn.prompt,
    )
    fitted, others = (SequentialTemperatureScaling(maps=maps).fit(p) for p in (proposals, drawn))
    assert fitted.temperatures == (*others.temperatures, 1.0)
    assert fitted.platt == (None if others.platt is None else (*others.platt, (1.0, 0.0)))
    assert fitted.slots_not_fitted == (3,) and others.slots_not_fitted == ()
    assert fitted.slots_left_as_they_are == ()


def test_a_slot_that_was_hardly_verified_is_left_as_it_is():
    proposals = drawn_proposals()
    is_verified = proposals.is_verified.clone()
    is_verified[:, 2] = False
    thin = Proposals(proposals.logits, proposals.is_accepted, is_verified, proposals.prompt)
    assert SequentialTemperatureScaling().fit(thin).slots_not_fitted == (3,)


def test_one_sided_outcomes_of_every_slot_are_refused():
    proposals = Proposals.of(torch.zeros(1000, 2), [2] * 1000, [0] * 1000, [0] * 1000)
    with pytest.raises(CalibrationError, match="slot 1: 0 of 1000 proposals were accepted.*--num-proposals"):
        SequentialTemperatureScaling().fit(proposals)


def test_a_platt_map_that_no_config_may_hold_is_none():
    g = torch.Generator().manual_seed(0)
    true = torch.randn(2000, 1, generator=g)
    accepted = (torch.rand(true.shape, generator=g) < true.sigmoid()).long().sum(1)
    proposals = Proposals.of(true / 5e4, [1] * 2000, accepted, [i // 20 for i in range(2000)])
    assert SequentialTemperatureScaling(maps="platt").fit(proposals).platt == ((1.0, 0.0),)
