"""The drift watch: sums over a window, one warning, and a refit from past rounds only."""

import pytest
import torch
from tiny import random_ids, tiny_drafter, tiny_target
from transformers import GenerationConfig

from dspark_hf import CalibrationError, DSparkConfig, DSparkConfigError, watch_drift
from dspark_hf.decoding.calibrate import calibrate
from dspark_hf.decoding.drift import DriftWatch
from dspark_hf.decoding.observers import EndedRounds
from dspark_hf.fitting.proposals import proposals_of
from dspark_hf.fitting.refit import refit


def rounds(num_rounds, *, factor=1.0, shift=0.0, seed=0, slots=2, per_step=4, is_sampled=True):
    """Rounds whose head says `factor * true logit + shift`."""
    g = torch.Generator().manual_seed(seed)
    for start in range(0, num_rounds, per_step):
        true = torch.randn(per_step, slots, generator=g) * 1.5
        accepted = (torch.rand(true.shape, generator=g) < true.sigmoid()).long().cumprod(1).sum(1)
        logits = factor * true + shift
        yield EndedRounds(
            drafter=None,
            generation=start // 40,
            rows=tuple(range(per_step)),
            confidence_logits=logits,
            survival=calibrate(logits).survival,
            num_verified=(slots,) * per_step,
            num_accepted=tuple(accepted.tolist()),
            is_sampled=is_sampled,
        )


def watched(*parts, **settings):
    watch = DriftWatch(2, **settings)
    for part in parts:
        for ended in part:
            watch(ended)
    return watch


def test_right_predictions_do_not_warn(caplog):
    watch = watched(rounds(4000))
    assert not watch.has_warned and caplog.text == ""
    assert [abs(slot.gap) < 4 * slot.standard_error for slot in watch.check()] == [True, True]


def test_predictions_past_the_bound_warn_once(caplog):
    watch = watched(rounds(4000, shift=1.5))
    assert caplog.text.count("has drifted") == 1 and "dspark_hf.fitting.refit" in caplog.text
    assert all(watch.has_drifted(slot) and slot.gap > 0.1 for slot in watch.check())


def test_too_few_rounds_or_too_small_a_gap_is_no_drift():
    assert not watched(rounds(196, shift=1.5), check_every=1).has_warned
    assert watched(rounds(400, shift=1.5), check_every=1).has_warned
    assert not watched(rounds(4000, shift=0.3)).has_warned
    assert watched(rounds(4000, shift=0.3), bound=0.02).has_warned


def test_means_are_those_of_the_verified_slots():
    watch = DriftWatch(3)
    watch.observe(torch.tensor([[0.8, 0.4, 0.1], [0.6, 0.2, 0.1]]), [2, 1], [1, 1])
    watch.observe(torch.tensor([[0.4, 0.3]]), [0], [0])
    first, second = watch.check()
    assert (first.num_rounds, first.predicted, first.realised) == (2, pytest.approx(0.7), 1.0)
    assert (second.num_rounds, second.predicted, second.realised) == (1, pytest.approx(0.4), 0.0)
    assert first.standard_error == pytest.approx((0.8 * 0.2 + 0.6 * 0.4) ** 0.5 / 2)


def test_old_rounds_are_forgotten():
    watch = watched(rounds(1000, shift=3.0), rounds(2000, seed=1), window_rounds=1000)
    assert watch.check()[0].num_rounds <= 1000
    assert not any(watch.has_drifted(slot) for slot in watch.check())
    assert 1000 <= sum(len(ended.rows) for ended in watch.rounds) < 1000 + 4
    assert watch.rounds[0].generation > 20


def test_between_checks_nothing_is_read_from_the_device():
    """A tensor on the meta device has no values to read."""
    watch = DriftWatch(2, check_every=10)
    for _ in range(9):
        watch.observe(torch.empty(1, 2, device="meta"), [2], [1])
    with pytest.raises(NotImplementedError):
        watch.observe(torch.empty(1, 2, device="meta"), [2], [1])


def test_numbers_out_of_range_are_refused():
    with pytest.raises(CalibrationError, match="got 2, 0, 200 and 2000"):
        DriftWatch(2, check_every=0)


def test_a_refit_from_the_windows_rounds_mends_the_drift():
    config = DSparkConfig.from_target(tiny_target().config, block_size=3)
    call = GenerationConfig(do_sample=True, top_k=0, temperature=0.8)
    watch = watched(rounds(8000, factor=4.0), window_rounds=8000)
    fitted = refit(config, watch.rounds, call)
    fresh = proposals_of(list(rounds(8000, factor=4.0, seed=1)))
    calibrated = calibrate(fresh.logits, fitted.slot_calibration).survival
    gaps = (calibrated - fresh.is_accepted.float()).square().mean(0)
    assert bool((gaps < (calibrate(fresh.logits).survival - fresh.is_accepted.float()).square().mean(0) - 0.02).all())
    assert 3 < min(fitted.temperatures) < max(fitted.temperatures) < 6
    entry = config.calibration["sampled"]
    assert entry["temperatures"] == [*fitted.temperatures, 1.0]
    assert entry["platt"] is None or entry["platt"][2] == [1.0, 0.0]
    assert entry["settings"]["temperature"] == 0.8
    assert "greedy" not in config.calibration


def test_too_few_rounds_for_a_refit_leave_the_config_alone():
    config = DSparkConfig.from_target(tiny_target().config, block_size=2)
    with pytest.raises(CalibrationError, match="verified proposals"):
        refit(config, list(rounds(100)), GenerationConfig(do_sample=True))
    assert config.calibration is None


def test_a_refit_that_could_not_be_loaded_again_leaves_the_config_alone():
    call, target = GenerationConfig(do_sample=True), tiny_target().config
    config = DSparkConfig.from_target(target, block_size=1)
    with pytest.raises(CalibrationError, match="at most the drafter's block_size 1 slots, got 2; pass the config"):
        refit(config, list(rounds(4000)), call)
    without = DSparkConfig.from_target(target, block_size=2, enable_confidence_head=False)
    with pytest.raises(DSparkConfigError, match="must be None for a drafter without confidence head"):
        refit(without, list(rounds(4000)), call)
    assert config.calibration is None and without.calibration is None


def test_a_refit_refuses_rounds_of_another_mode():
    config = DSparkConfig.from_target(tiny_target().config, block_size=2)
    mixed = [*rounds(4000), *rounds(8, is_sampled=False)]
    with pytest.raises(CalibrationError, match="must all be sampled, .* and 2 of 1002 entries are not"):
        refit(config, mixed, GenerationConfig(do_sample=True))
    assert config.calibration is None


def test_a_watch_follows_the_mode_of_its_first_round_and_says_so_once(caplog):
    watch = watched(rounds(400), rounds(4000, shift=3.0, is_sampled=False), check_every=1)
    assert watch.mode == "sampled" and not watch.has_warned
    assert watch.check()[0].num_rounds == sum(len(ended.rows) for ended in watch.rounds) == 400
    assert caplog.text.count("follows sampled rounds, as its first was one; greedy ones are left out") == 1


def test_a_mode_that_was_asked_for_is_followed_in_silence(caplog):
    watch = watched(rounds(400), rounds(40, is_sampled=False), mode="greedy")
    assert watch.check()[0].num_rounds == 40 and caplog.text == ""
    with pytest.raises(CalibrationError, match="mode must be one of greedy, sampled, got 'beam'; leave it out"):
        DriftWatch(2, mode="beam")


@pytest.mark.parametrize("rows", [1, 2])
def test_nested_watches_keep_greedy_and_sampled_calls_apart(rows):
    target = tiny_target()
    drafter, ids = tiny_drafter(target), random_ids(5).repeat(rows, 1)
    with watch_drift(drafter, mode="greedy") as greedy, watch_drift(drafter, mode="sampled") as sampled:
        for do_sample in (False, True, False):
            target.generate(ids, assistant_model=drafter, do_sample=do_sample, top_k=50, max_new_tokens=6)
    assert {ended.generation for ended in greedy.rounds}.isdisjoint({ended.generation for ended in sampled.rounds})
    assert len({ended.generation for ended in greedy.rounds}) == 2 and sampled.rounds


def test_it_watches_generate_calls():
    target = tiny_target()
    drafter = tiny_drafter(target)
    with watch_drift(drafter) as watch:
        for rows in (1, 3):
            for one in (drafter, tiny_drafter(target)):  # the second is not watched
                target.generate(random_ids(5).repeat(rows, 1), assistant_model=one, do_sample=False, max_new_tokens=12)
    assert {ended.drafter for ended in watch.rounds} == {drafter}
    assert watch.check()[0].num_rounds == sum(len(ended.rows) for ended in watch.rounds) >= 8
