"""The calibration that a drafter carries: its rules, how it travels, when it applies, when it warns."""

import json

import pytest
import torch
from tiny import random_ids, tiny_drafter, tiny_target
from transformers import GenerationConfig

from dspark_hf import DSparkConfig, DSparkConfigError, DSparkDraftModel
from dspark_hf.decoding import calibrate as calibrate_module
from dspark_hf.decoding.calibrate import (
    SlotCalibration,
    accepted_shares_for,
    calibrate,
    calibration_for,
    law_settings,
)
from dspark_hf.decoding.observers import observe_rounds

GREEDY = {"temperatures": [2.0, 0.5, 1.0, 4.0], "platt": None, "settings": {"repetition_penalty": 1.0}}
SAMPLED = {
    "temperatures": [1.0, 1.0, 1.0, 1.0],
    "platt": [[0.5, -1.0], [1.0, 0.0], [2.0, 0.0], [1.0, 1.0]],
    "settings": {"temperature": 1.0, "top_k": 0},
    "num_proposals": 500,
    "ece_before": 0.06,
    "ece_after": 0.01,
    "share_accepted": [0.6, 0.3, 0.1, 0.0],
}
CALIBRATION = {"greedy": GREEDY, "sampled": SAMPLED}


def config(**overrides):
    return DSparkConfig.from_target(tiny_target().config, **{"block_size": 4, "calibration": CALIBRATION} | overrides)


# -- rules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"temperatures": [1.0, 1.0, 1.0]},
            r"\['temperatures'\] must hold one number from 0.0001 to 10000 for each of the 4",
        ),
        ({"temperatures": [1.0, 0.0, 1.0, 1.0]}, "must hold one number from"),
        ({"temperatures": [1.0, float("inf"), 1.0, 1.0]}, "must hold one number from"),
        ({"temperatures": [1.0, 1e-50, 1.0, 1.0]}, "must hold one number from .* got .1.0, 1e-50"),
        ({"temperatures": None}, "must hold one number from"),
        ({"platt": [[1.0, 0.0]] * 3}, r"\['platt'\] must be None or hold, for each of the 4 slots"),
        ({"platt": [[1.0, 0.0]] * 3 + [[-1.0, 0.0]]}, "pair .a, b. with a from 0.0001 to 10000"),
        ({"platt": [[1.0, float("nan")]] * 4}, "b from -10000 to 10000; fit them with `dspark calibrate`"),
        ({"platt": [[1.0, 0.0]] * 3 + [[1e300, -1e300]]}, "pair .a, b. with a from 0.0001 to 10000"),
        ({"platt": [[1.0, 0.0]] * 3 + [[1.0, -1e5]]}, "b from -10000 to 10000"),
        ({"settings": {"temperature": "warm"}}, "names of generate.. arguments to finite numbers"),
        ({"num_proposals": -1}, r"\['num_proposals'\] must be a finite number >= 0"),
        ({"share_accepted": [0.5] * 3}, "must be None or hold a share from 0 to 1 for each of the 4 slots"),
        ({"share_accepted": [0.5] * 3 + [1.5]}, r"\['share_accepted'\] .* got .0.5, 0.5, 0.5, 1.5"),
        ({"share_accepted": [0.5] * 3 + [float("nan")]}, "a share from 0 to 1"),
        ({"colour": 1}, r"may only have the keys .*got \['colour'\]"),
    ],
)
def test_every_rule_of_an_entry_is_checked(changed, message):
    with pytest.raises(DSparkConfigError, match=message):
        config(calibration={"greedy": GREEDY | changed})


@pytest.mark.parametrize("entry", [{"temperatures": [1e-4, 1e4, 1.0, 1.0]}, {"platt": [[1e4, -1e4], [1e-4, 1e4]] * 2}])
def test_maps_at_their_bounds_give_probabilities(entry):
    drafter = config(calibration={"greedy": GREEDY | entry})
    maps = calibration_for(drafter, GenerationConfig(do_sample=False))
    logits = torch.tensor([[-1e4], [-1.0], [0.0], [1.0], [1e4]]).expand(-1, 4)
    conditional = calibrate(logits, maps).conditional
    assert bool(((conditional >= 0) & (conditional <= 1)).all())


def test_what_was_accepted_is_known_by_mode():
    sampled, greedy = (GenerationConfig(do_sample=do_sample) for do_sample in (True, False))
    assert accepted_shares_for(config(), sampled) == [0.6, 0.3, 0.1, 0.0]
    assert accepted_shares_for(config(), greedy) is None
    assert accepted_shares_for(config(calibration=None), sampled) is None


def test_unknown_modes_and_missing_keys_fail():
    with pytest.raises(DSparkConfigError, match=r"calibration may only have the keys .*got \['beam'\]"):
        config(calibration={"beam": GREEDY})
    with pytest.raises(DSparkConfigError, match="must have the keys"):
        config(calibration={"greedy": {"temperatures": [1.0] * 4}})


def test_without_a_confidence_head_there_is_nothing_to_calibrate():
    with pytest.raises(DSparkConfigError, match="must be None for a drafter without confidence head"):
        config(enable_confidence_head=False)


def test_it_travels_with_the_drafter(tmp_path):
    tiny_drafter(tiny_target(), calibration=CALIBRATION).save_pretrained(tmp_path)
    assert DSparkDraftModel.from_pretrained(tmp_path).config.calibration == CALIBRATION
    saved = json.loads((tmp_path / "config.json").read_text())
    del saved["calibration"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert DSparkConfig.from_pretrained(tmp_path).calibration is None


# -- application --------------------------------------------------------------------------------------------------


def test_temperatures_divide_the_logits_of_their_slots():
    logits = torch.tensor([[1.0, -1.0, 0.5]])
    got = calibrate(logits, SlotCalibration.of(GREEDY))
    assert got.conditional[0].tolist() == pytest.approx(torch.tensor([0.5, -2.0, 0.5]).sigmoid().tolist())
    assert torch.equal(got.survival, got.conditional.cumprod(-1))


@pytest.mark.parametrize("entry", [GREEDY, SAMPLED], ids=["temperatures", "platt"])
def test_an_estimate_does_not_depend_on_later_slots_or_other_rows(entry):
    logits = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    before = calibrate(logits, SlotCalibration.of(entry)).survival
    for slot in range(1, 4):
        changed = logits.clone()
        changed[:, slot:] += 1.0
        after = calibrate(changed, SlotCalibration.of(entry)).survival
        assert torch.equal(after[:, :slot], before[:, :slot]) and not torch.equal(after, before)
    assert torch.equal(calibrate(logits[3:4], SlotCalibration.of(entry)).survival, before[3:4])


def test_platt_maps_stand_for_the_temperatures():
    got = calibrate(torch.tensor([[2.0, 2.0]]), SlotCalibration.of(SAMPLED)).conditional[0].tolist()
    assert got == pytest.approx(torch.tensor([0.0, 2.0]).sigmoid().tolist())


def test_the_mode_decides_which_entry_applies():
    drafter = config(calibration={"greedy": GREEDY})
    assert calibration_for(drafter, GenerationConfig(do_sample=False)).scale.tolist() == [0.5, 2.0, 1.0, 0.25]
    assert calibration_for(drafter, GenerationConfig(do_sample=True)) is None
    assert calibration_for(config(calibration=None), GenerationConfig(do_sample=False)) is None


def warnings_of(caplog, drafter, **call):
    caplog.clear()
    calibrate_module._warn_of_settings.cache_clear()
    for _ in range(3):
        assert calibration_for(drafter, GenerationConfig(**call)) is not None
    return caplog.text


def test_other_sampling_settings_warn_once(caplog):
    text = warnings_of(caplog, config(), do_sample=True, temperature=0.7, top_k=50)
    assert text.count("WARNING") == 1
    assert "temperature 0.7 instead of 1.0, top_k 50 instead of 0" in text and "output is unaffected" in text


def test_the_settings_it_was_fitted_under_do_not_warn(caplog):
    assert warnings_of(caplog, config(), do_sample=True, temperature=1.0, top_k=0) == ""
    # Greedy search reads no temperature.
    assert "calibrated" not in warnings_of(caplog, config(), do_sample=False, temperature=0.3)
    assert "repetition_penalty 1.2" in warnings_of(caplog, config(), do_sample=False, repetition_penalty=1.2)


def test_what_is_left_out_of_a_call_counts_as_neutral():
    assert law_settings(GenerationConfig(do_sample=True))["top_p"] == 1.0
    assert "top_p" not in law_settings(GenerationConfig(do_sample=False))


@pytest.mark.parametrize("rows", [1, 2])
def test_generate_uses_it(rows):
    target = tiny_target()
    seen = []
    with observe_rounds(seen.append):
        for calibration in (None, CALIBRATION):
            drafter = tiny_drafter(target, calibration=calibration)
            target.generate(
                random_ids(6).repeat(rows, 1), assistant_model=drafter, do_sample=False, max_new_tokens=2 + 4
            )
    raw, calibrated = seen[0], seen[len(seen) // 2]
    assert torch.equal(raw.confidence_logits, calibrated.confidence_logits)
    expected = calibrate(raw.confidence_logits, SlotCalibration.of(GREEDY)).survival
    torch.testing.assert_close(calibrated.survival, expected)
    assert not torch.allclose(raw.survival, expected, atol=1e-3)


def test_a_calibrated_threshold_cuts_where_the_calibrated_estimate_falls_below():
    target = tiny_target()
    call = {"do_sample": False, "max_new_tokens": 12, "verification_policy": "threshold"}
    seen = []
    with observe_rounds(seen.append):
        sharp = {"greedy": GREEDY | {"temperatures": [0.01] * 4, "settings": {}}}
        drafter = tiny_drafter(target, calibration=sharp)
        target.generate(random_ids(6), assistant_model=drafter, assistant_confidence_threshold=0.6, **call)
    for ended in seen:
        keeps = (ended.confidence_logits[0] / 0.01).sigmoid() >= 0.6
        assert ended.num_verified[0] == int(keeps.long().cumprod(0).sum())
    assert len(seen) > 1
