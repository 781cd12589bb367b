"""`dspark doctor`: it names each planted fault, and is silent on pairs without one."""

import copy
import dataclasses
import json
import shutil

import doctor_pairs as pairs
import pytest
import torch
import typer.testing
from doctor_pairs import NEW_TOKENS, examine, faults, healthy
from safetensors.torch import load_file, save_file
from throughput_machines import StaircaseMachine, profile_of
from tiny import tiny_drafter, tiny_target

import dspark_cli
from dspark_hf import DSparkDraftModel, zoo
from dspark_hf.decoding import target_refusals
from dspark_hf.decoding.report import SpeculationReport
from dspark_hf.evaluation import ComparisonError
from dspark_hf.evaluation.doctor import calibration, drafting, fit, machine, probes, prompting, weights
from dspark_hf.evaluation.doctor.case import Case, Decoded, PromptRounds
from dspark_hf.evaluation.doctor.findings import NotExamined
from dspark_hf.evaluation.report_files import keep_report
from dspark_hf.fitting.fingerprint import Fingerprint
from dspark_hf.fitting.profile_store import profile_path, save_profile
from dspark_hf.prompts import quickstart_prompts
from dspark_hf.training.feature_cache import target_fingerprint


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DSPARK_HF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def outcome(report, check):
    (found,) = (one for one in report.outcomes if one.check == check)
    return found


def fault_of(report, check):
    (finding,) = outcome(report, check).findings
    assert finding.is_fault and finding.mend and finding.certainty
    return finding


def case_of(drafter=None, **overrides):
    settings = {
        "target": pairs.target(),
        "drafter": healthy() if drafter is None else drafter,
        "tokenizer": pairs.tokenizer(),
        "prompts": pairs.prompts(),
        "max_new_tokens": NEW_TOKENS,
    }
    return Case(**settings | overrides)


# -- healthy pairs ------------------------------------------------------------------------------------------------


def test_it_is_silent_on_a_healthy_pair_and_leaves_it_alone():
    drafter = healthy()
    before = {name: p.clone() for name, p in drafter.state_dict().items()}, drafter.config.to_dict()
    state = torch.random.get_rng_state()
    report = examine(drafter, with_speed=True)
    assert report.is_healthy, report.faults
    # A tiny target is faster without drafts, which is no fault of the pair.
    assert {check for check, _ in report.notes} <= {"calibration", "speed"}
    assert all(torch.equal(p, before[0][name]) for name, p in drafter.state_dict().items())
    assert drafter.config.to_dict() == before[1]
    assert torch.equal(torch.random.get_rng_state(), state)
    acceptance = report.measured["acceptance"]
    assert acceptance["tau"].value > 2 and acceptance["slots"][0]["num_reached"] >= 12
    assert outcome(report, "speed").status in ("passed", "note")
    json.dumps(report.to_dict())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_is_silent_in_half_precision(dtype):
    report = examine(healthy().to(dtype), target=copy.deepcopy(pairs.target()).to(dtype))
    assert faults(report) == []
    assert "numbers are finite" in outcome(report, "overflow").detail


def test_a_verdict_names_the_drafts_behind_it():
    detail = outcome(examine(healthy()), "feature layers").detail
    num_drafts = 12 * (NEW_TOKENS - 1) * 4
    assert detail == f"2 other values tried, all surely accept less ({num_drafts} drafts each)"


def test_what_was_not_decided_is_said():
    report = examine(healthy(), prompts=pairs.prompts()[:1])
    assert "2 other values tried, 2 undecided, give more prompts" in outcome(report, "feature layers").detail


# -- planted faults -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "check", "cured"),
    [
        ("draft_layout", "fill_in", "layout", "draft_layout='anchor_first'"),
        ("target_layer_ids", [1, 2], "feature layers", "target_layer_ids: [0, 1]"),
        ("target_layer_ids", [-1, 0], "feature layers", "target_layer_ids: [0, 1]"),
        ("mask_token_id", 5, "mask token", "mask_token_id: 60"),
    ],
)
def test_a_setting_that_is_not_the_trained_one_is_named(field, value, check, cured):
    drafter = healthy()
    setattr(drafter.config, field, value)
    report = examine(drafter)
    assert faults(report) == [check]
    finding = fault_of(report, check)
    assert cured in finding.mend
    assert finding.evidence.low > 0 and "1104 drafts of 12 prompts" in finding.certainty


def test_two_wrong_settings_are_both_named():
    drafter = healthy()
    drafter.config.mask_token_id, drafter.config.target_layer_ids = 5, [1, 2]
    assert faults(examine(drafter)) == ["feature layers", "mask token"]


def test_with_one_prompt_nothing_is_claimed():
    drafter = healthy()
    drafter.config.mask_token_id = 5
    assert faults(examine(drafter, prompts=pairs.prompts()[:1])) == []


@pytest.mark.parametrize("kind", ["another target", "untrained"])
def test_features_that_say_nothing_are_named(kind):
    if kind == "another target":
        report = examine(healthy(), target=pairs.target(3))
    else:
        drafter = tiny_drafter(pairs.target(), target_layer_ids=[0, 1])
        for name, weight in drafter.named_parameters():
            if "norm" in name:  # or that alone would explain it
                weight.data.mul_(1 + 0.1 * torch.rand(weight.shape))
        report = examine(drafter)
    assert "features" in faults(report) and not {"layout", "mask token", "feature layers"} & set(faults(report))
    assert "within chance, or next to nothing" in fault_of(report, "features").certainty


def test_low_acceptance_that_is_explained_is_not_blamed_on_the_target(monkeypatch):
    case = case_of(target=pairs.target(3))
    case.causes.append("another target")
    with pytest.raises(NotExamined, match="explained by another target"):
        drafting.check_features(case)


def test_features_that_surely_change_next_to_nothing_are_not_read(monkeypatch):
    case = case_of()
    assert probes.probing_of(case).reads_features
    monkeypatch.setattr(probes, "NEGLIGIBLE_POINTS", 1000.0)
    case.probing = None
    assert not probes.probing_of(case).reads_features


def test_norms_that_are_all_ones_are_named():
    drafter = healthy()
    for name, weight in drafter.named_parameters():
        if "norm" in name:
            weight.data.fill_(1.0)
    report = examine(drafter)
    assert "norms" in faults(report)
    assert fault_of(report, "norms").what.startswith("all norms of the drafter are ones")


def test_a_single_norm_of_ones_is_named():
    drafter = healthy()
    drafter.hidden_norm.weight.data.fill_(1.0)
    ((finding,),) = (weights.check_norms(case_of(drafter))[1],)
    assert "1 of 10 norms" in finding.what and "hidden_norm" in finding.what


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_named_and_the_rest_is_not_guessed_at(value):
    drafter = healthy()
    drafter.fc.weight.data[0, 0] = value
    report = examine(drafter)
    assert "weights" in faults(report) and "fc.weight" in fault_of(report, "weights").what
    assert outcome(report, "layout").status == outcome(report, "features").status == "not examined"
    assert "layout" not in faults(report)


def test_float16_overflow_is_named():
    drafter = healthy()
    with torch.no_grad():  # in float32 the norm behind it takes the factor out again
        drafter.fc.weight.mul_(3e4)
    assert faults(examine(drafter)) == []
    drafter, target = drafter.half(), copy.deepcopy(pairs.target()).half()
    assert bool(drafter.fc.weight.isfinite().all())
    report = examine(drafter, target=target)
    finding = fault_of(report, "overflow")
    assert "in float16, first in fc" in finding.what and "bfloat16" in finding.mend
    assert set(faults(report)) <= {"overflow", "acceptance"}


def test_numbers_that_overflow_in_another_dtype_are_not_blamed_on_float16():
    drafter = healthy()
    drafter.fc.weight.data.fill_(3e38)
    (finding,) = drafting.check_overflow(case_of(drafter))[1]
    assert "in float32, first in fc" in finding.what and "float16" not in finding.certainty


def test_another_chat_template_is_named():
    template = "{% for m in messages %}ab cd ef gh {{ m['content'] }} ij kl{% endfor %}"
    report = examine(healthy(), tokenizer=pairs.tokenizer(template))
    assert faults(report) == ["prompt form"]
    finding = fault_of(report, "prompt form")
    assert "without a chat template" in finding.what and "where the target is as sure" in finding.certainty


THINKING = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if enable_thinking is not false %} ij kl mn{% endif %}"
)


def test_another_thinking_mode_is_named():
    report = examine(healthy(), tokenizer=pairs.tokenizer(THINKING))
    finding = fault_of(report, "prompt form")
    assert "with enable_thinking=False" in finding.what or "without a chat template" in finding.what
    assert report.measured["prompt_forms"][0]["form"] == "with enable_thinking=False"


def test_the_template_beside_the_drafter_and_chatml_are_tried(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    tokenizer = pairs.tokenizer("{{ 'ab ' + messages[0]['content'] }}")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    names = [form.name for form in prompting.forms_of(tokenizer, tmp_path)]
    assert names == ["with the chat template that lies beside the drafter", "without a chat template", "in ChatML"]
    tokenizer.chat_template = {"default": "{{ 'ab' }}", "tools": "{{ 'cd' }}"}
    assert [f.name for f in prompting.forms_of(tokenizer, None)][:2] == [
        "with the template 'default'",
        "with the template 'tools'",
    ]


# -- files and configs --------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "drafter"
    healthy().save_pretrained(made)
    return made


def with_copies(folder, embedding, **more):
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"embed_tokens.weight": embedding.contiguous()} | more, path, {"format": "pt"})


def test_stored_copies_of_the_same_target_are_fine(folder):
    own = pairs.target().get_input_embeddings().weight.detach()
    with_copies(folder, own.to(torch.bfloat16), **{"lm_head.weight": pairs.target().lm_head.weight.detach().clone()})
    detail, findings = weights.check_stored_copies(case_of(source=folder))
    assert findings == [] and detail == "stored copies: embedding, output head"


def test_a_stored_copy_of_another_target_is_named(folder):
    with_copies(folder, pairs.target(3).get_input_embeddings().weight.detach().clone())
    report = examine(DSparkDraftModel.from_pretrained(folder), target=pairs.target(), source=folder)
    assert "embedding (embed_tokens.weight) is not this target's" in fault_of(report, "stored copies").what


def test_a_stored_copy_of_another_version_is_a_note(folder):
    own = pairs.target().get_input_embeddings().weight.detach()
    with_copies(folder, own + 0.05 * own.std() * torch.randn(own.shape, generator=torch.Generator().manual_seed(0)))
    (finding,) = weights.check_stored_copies(case_of(source=folder))[1]
    assert not finding.is_fault and "another version" in finding.certainty


def test_a_head_copied_for_the_draft_vocabulary_is_compared_row_by_row(folder, tmp_path):
    reduced = tiny_drafter(pairs.target(), draft_vocab_size=20)
    reduced.d2t.copy_(torch.arange(20))  # the even tokens
    reduced.save_pretrained(tmp_path / "reduced")
    head = pairs.target().lm_head.weight.detach()
    path = tmp_path / "reduced" / "model.safetensors"
    for rows, is_same in ((slice(0, 40, 2), True), (slice(0, 20), False)):
        save_file(load_file(path) | {"lm_head.weight": head[rows].contiguous()}, path, {"format": "pt"})
        findings = weights.check_stored_copies(case_of(reduced, source=tmp_path / "reduced"))[1]
        assert (findings == []) == is_same


def test_weights_that_cannot_be_read_are_said_so(folder):
    (folder / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(NotExamined, match="model.safetensors cannot be read"):
        weights.check_stored_copies(case_of(source=folder))


def test_the_training_report_knows_its_target(folder):
    content = {"target_fingerprint": target_fingerprint(pairs.target()), "provenance": {"dtype": "float32"}}
    path = keep_report(folder, "training", content).with_suffix(".json")  # where `dspark train` puts it
    assert weights.check_training_report(case_of(source=folder))[1] == []
    (finding,) = weights.check_training_report(case_of(source=folder, target=pairs.target(3)))[1]
    assert not finding.is_fault and "fingerprints differ" in finding.certainty
    with pytest.raises(NotExamined, match="in float32, here it is in float16"):
        weights.check_training_report(case_of(source=folder, target=copy.deepcopy(pairs.target()).half()))
    path.write_text('{"written_by_hand": "from notes"}')
    with pytest.raises(NotExamined, match="written by hand"):
        weights.check_training_report(case_of(source=folder))
    path.write_text("{}")
    with pytest.raises(NotExamined, match="cannot be read"):
        weights.check_training_report(case_of(source=folder))


def test_a_target_of_other_sizes_ends_the_decoding_checks():
    report = examine(healthy(), target=tiny_target(num_layers=3))
    assert faults(report) == ["sizes"]
    assert "number of decoder layers 4" in fault_of(report, "sizes").what
    assert outcome(report, "acceptance").status == "not examined"


def test_a_tokenizer_with_more_tokens_than_the_target_is_named():
    tokenizer = pairs.tokenizer()
    tokenizer.add_tokens(["more"])
    (finding,) = fit.check_vocabulary(case_of(tokenizer=tokenizer))[1]
    assert finding.is_fault and "knows 62 tokens and the target 61" in finding.what


def test_a_resized_target_is_a_note_and_is_not_replayed(monkeypatch):
    monkeypatch.setattr(target_refusals, "MAX_VOCABULARY_CHANGE", 16)
    target = copy.deepcopy(pairs.target())
    target.resize_token_embeddings(62)
    report = examine(healthy(), target=target)
    (finding,) = outcome(report, "vocabulary").findings
    assert not finding.is_fault and "made for 61 tokens and the target has 62" in finding.what
    assert "cannot be replayed" in outcome(report, "layout").detail
    assert report.is_healthy


def test_what_can_be_drafted_is_counted():
    reduced = tiny_drafter(pairs.target(), draft_vocab_size=20, target_layer_ids=[0, 1])
    case = case_of(reduced)
    assert "20 can be drafted" in fit.check_vocabulary(case)[0]
    assert 0 < case.measured["draft_vocabulary"]["share_of_target_tokens"] < 0.7


def test_different_dtypes_are_a_note():
    report = examine(healthy().to(torch.bfloat16))
    (finding,) = outcome(report, "dtypes").findings
    assert not finding.is_fault and "target float32, drafter bfloat16" in finding.what
    assert report.is_healthy


def test_a_target_that_generate_refuses_is_named(monkeypatch):
    monkeypatch.setattr(type(pairs.target()), "_is_stateful", True)
    report = examine(healthy())
    assert faults(report) == ["sizes"] and "recurrent" in fault_of(report, "sizes").what


def test_what_shows_only_when_decoding_ends_the_checks(monkeypatch):
    target = copy.deepcopy(pairs.target())
    target.generation_config.guidance_scale = 2.0
    report = examine(healthy(), target=target)
    assert outcome(report, "acceptance").status == "not examined"
    assert "guidance" in outcome(report, "acceptance").detail


# -- acceptance ---------------------------------------------------------------------------------------------------


def decoded(logits, num_accepted, num_prompts=12):
    """Rounds in equal parts of prompts, every draft verified."""
    size = len(num_accepted) // num_prompts
    slots = 4 if logits is None else len(logits[0])
    rounds, report = [], SpeculationReport(num_calls=num_prompts)
    for start in range(0, size * num_prompts, size or 1):
        part = slice(start, start + size)
        values = (None,) * size if logits is None else tuple(logits[part])
        rounds.append(PromptRounds(values, (slots,) * size, tuple(num_accepted[part])))
    for accepted in num_accepted:
        report.count_round(slots, slots, accepted)
    return Decoded((), tuple(rounds), report)


def test_no_accepted_draft_at_all_is_named_with_its_causes():
    case = case_of()
    case.greedy = decoded(None, [0] * 240)
    (finding,) = drafting.check_acceptance(case)[1]
    assert finding.what == "no draft was accepted, of 240 in slot 1" and "below 1.9%" in finding.certainty
    assert "chat template" in finding.mend
    case.causes.append("another mask token")
    assert drafting.check_acceptance(case)[1][0].mend == "likely causes: another mask token"


@pytest.mark.parametrize("num_accepted", [[0] * 48, [0] * 239 + [1]])
def test_few_drafts_or_one_accepted_prove_nothing(num_accepted):
    case = case_of()
    case.greedy = decoded(None, num_accepted)
    assert drafting.check_acceptance(case)[1] == []


def test_without_answers_nothing_is_said():
    case = case_of()
    case.greedy = decoded(None, [])
    for check in (drafting.check_overflow, drafting.check_layout):
        with pytest.raises(NotExamined, match="answers no prompt with two tokens or more"):
            check(case)
    with pytest.raises(NotExamined, match="no draft was verified"):
        drafting.check_acceptance(case)
    with pytest.raises(NotExamined, match="no prompt has an answer in both forms"):
        prompting._gains({}, {}, 1)


def test_a_pair_that_cannot_run_has_neither_profile_nor_speed():
    case = case_of(misfit="of another size")
    for check in (machine.check_profile, machine.check_speed):
        with pytest.raises(NotExamined, match="of another size"):
            check(case)


# -- calibration --------------------------------------------------------------------------------------------------

MAPS = {
    "greedy": [(1.0, -1.5), (1.0, 0.0), (1.0, 1.0), (1.0, 0.2)],
    "sampled": [(0.4, 0.8), (0.4, 0.8), (1.0, 0.0), (1.0, 0.0)],
}


def drawn(mode, num_rounds=1200, seed=0):
    """Rounds whose outcomes follow a mode's maps."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rounds, 4, generator=generator) * 1.5 + 1.0
    scale, shift = torch.tensor(MAPS[mode]).T
    is_right = torch.rand(logits.shape, generator=generator) < torch.sigmoid(logits * scale + shift)
    return decoded(logits.tolist(), is_right.long().cumprod(dim=1).sum(dim=1).tolist())


def calibrated(**maps):
    """A case of a drafter with these maps by mode, whose rounds follow `MAPS`."""
    case = case_of()
    case.drafter.config.calibration = {
        mode: {"temperatures": [1.0] * 4, "platt": [list(pair) for pair in pairs_of], "settings": {"temperature": 1.0}}
        for mode, pairs_of in maps.items()
    }
    case.greedy = drawn("greedy")
    case.decode = lambda prompts, law: drawn("sampled")
    return case


def test_a_calibration_that_holds_is_passed():
    case = calibrated(**MAPS)
    assert calibration.check_calibration(case)[1] == []
    slots = case.measured["calibration"]["greedy"]["slots"]
    assert all(abs(slot["gap"]) < 0.05 for slot in slots) and len(slots) == 4


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_maps_of_two_slots_at_each_others_place_are_named(mode):
    swapped = list(MAPS[mode])
    swapped[0], swapped[2] = swapped[2], swapped[0]
    (finding,) = calibration.check_calibration(calibrated(**MAPS | {mode: swapped}))[1]
    assert finding.is_fault and "the maps of slots 1 and 3 are at each other's place" in finding.what
    assert f"exchange entries 1 and 3 of calibration['{mode}']" in finding.mend
    assert "4800 drafts of 12 prompts" in finding.certainty


def test_modes_at_each_others_place_are_named():
    found = calibration.check_calibration(calibrated(greedy=MAPS["sampled"], sampled=MAPS["greedy"]))[1]
    assert len(found) == 2 and all("the modes are at each other's place" in finding.what for finding in found)


def test_temperatures_count_where_there_are_no_other_maps():
    case = calibrated(**MAPS)
    temperatures = [0.25, 1.0, 1.0, 4.0]
    case.drafter.config.calibration = {"greedy": {"temperatures": temperatures, "platt": None, "settings": {}}}
    logits = torch.randn(1200, 4, generator=torch.Generator().manual_seed(1)) + 1
    uniforms = torch.rand(1200, 4, generator=torch.Generator().manual_seed(2))
    right = uniforms < torch.sigmoid(logits / torch.tensor(temperatures[::-1]))
    case.greedy = decoded(logits.tolist(), right.long().cumprod(dim=1).sum(dim=1).tolist())
    swapped, absent = calibration.check_calibration(case)[1]
    assert "slots 1 and 4" in swapped.what and "for sampled decoding" in absent.what and not absent.is_fault


def test_a_calibration_that_no_exchange_mends_is_said_not_to_hold():
    off = [(1.0, 2.0)] * 4
    (finding,) = calibration.check_calibration(calibrated(greedy=off, sampled=MAPS["sampled"]))[1]
    assert finding.is_fault and ("does not hold" in finding.what or "fit better" in finding.what)
    alone = calibration.check_calibration(calibrated(greedy=off))[1]
    assert "does not hold on these prompts" in alone[0].what and "standard errors" in alone[0].certainty


def test_estimates_are_not_blamed_for_another_fault():
    case = calibrated(greedy=[(1.0, 2.0)] * 4)
    case.causes.append("another mask token")
    with pytest.raises(NotExamined, match="mend first: another mask token"):
        calibration.check_calibration(case)


def test_none_is_a_note_with_the_command():
    case = case_of(target_name="T", drafter_name="D")
    (finding,) = calibration.check_calibration(case)[1]
    assert not finding.is_fault and finding.mend.startswith("dspark calibrate --target T --drafter D")


def test_rounds_without_confidences_judge_nothing():
    with pytest.raises(NotExamined, match="no round was drafted with confidences"):
        _ = decoded(None, [1] * 12).proposals
    with pytest.raises(NotExamined, match="no confidence head"):
        headless = tiny_drafter(pairs.target(), enable_confidence_head=False, confidence_head_with_markov=False)
        calibration.check_calibration(case_of(headless))


def test_sampled_rounds_are_decoded_under_the_settings_of_the_fit(monkeypatch):
    case, laws = calibrated(**MAPS), []
    case.drafter.config.calibration["sampled"]["settings"] = {"temperature": 0.7, "top_p": 0.9, "top_k": 5}
    case.decode = lambda prompts, law: laws.append(law) or drawn("sampled")
    calibration.check_calibration(case)
    assert [dataclasses.astuple(law) for law in laws] == [(0.7, 0.9, 5)]


# -- machine ------------------------------------------------------------------------------------------------------


def profile_for(case, **changes):
    return profile_of(
        StaircaseMachine(), fingerprint=dataclasses.replace(Fingerprint.of(case.target, case.drafter), **changes)
    )


def store(case, **changes):
    return save_profile(profile_for(case, **changes), profile_path(Fingerprint.of(case.target, case.drafter)))


def test_a_fresh_profile_is_taken():
    case = case_of()
    store(case)
    assert machine.check_profile(case)[1] == [] and case.profile is not None


def test_a_stale_profile_is_named():
    case = case_of()
    store(case, versions={"dspark_hf": "0", "torch": "1.0", "transformers": "5"})
    (finding,) = machine.check_profile(case)[1]
    assert finding.is_fault and "is stale" in finding.what and finding.mend.startswith("dspark profile")


def test_a_stale_profile_alone_is_what_the_examination_names():
    drafter = healthy()
    store(case_of(drafter), versions={"dspark_hf": "0", "torch": "1.0", "transformers": "5"})
    assert faults(examine(drafter)) == ["profile"]


def test_foreign_and_damaged_profiles_are_named():
    case = case_of()
    path = store(case, device="cpu: another")
    (finding,) = machine.check_profile(case)[1]
    assert finding.is_fault and "profile of something else" in finding.what
    path.write_text("nonsense")
    (finding,) = machine.check_profile(case)[1]
    assert finding.is_fault and "damaged" in finding.what


def test_a_missing_profile_is_a_note_where_a_policy_needs_it():
    case = case_of()
    assert machine.check_profile(case) == ("none, and policy full needs none", [])
    case.drafter.config.verification_policy = "block"
    (finding,) = machine.check_profile(case)[1]
    assert not finding.is_fault and "gives way to 'full'" in finding.what


def test_a_profile_of_the_same_pair_elsewhere_is_mentioned(cache):
    case = case_of()
    save_profile(profile_for(case, num_threads=7), cache / "profiles" / "other.json")
    save_profile(profile_for(case, num_threads=7, device="cpu: x"), cache / "profiles" / "a.json")
    (finding,) = machine.check_profile(case)[1]
    assert f"num_threads (7, here {torch.get_num_threads()})" in finding.what and "device" not in finding.what


def test_a_machine_on_which_drafting_cannot_pay_is_said_plainly():
    case = case_of()
    case.profile = dataclasses.replace(profile_for(case), plain=profile_for(case).draft)  # plain steps cost nothing
    case.greedy = decoded(None, [2] * 24)
    _, findings = machine.check_payoff(case)
    assert (
        findings[0].what.startswith("drafting cannot pay on this machine with 1, 2, 4 rows")
        and not findings[0].is_fault
    )
    assert machine._rows([1]) == "1 row"


def test_a_drafter_too_weak_for_this_machine_is_said_so():
    case = case_of()
    case.profile = profile_for(case)
    assert machine.check_payoff(case)[1] == []  # nothing is known of the drafter
    case.greedy = decoded(None, [0] * 24)
    drafting.check_acceptance(case)
    told, findings = machine.check_payoff(case)
    assert "does not pay with" in findings[-1].what and "24 rounds" in findings[-1].certainty
    with pytest.raises(NotExamined, match="no profile"):
        machine.check_payoff(case_of())


def test_expected_speed_counts_the_round_as_it_is():
    case = case_of()
    profile = profile_for(case)
    costs = profile.step_costs(1, 10)
    one = (1 + 0.5) / (costs.draft_s - 2 * costs.slot_s + float(costs.step_s[2]) + profile.overhead_s(1))
    assert machine._speed(profile, 1, 10, [0.5, 0.0, 0.0]) >= one * profile.plain_step_s(1, 10) * (1 - 1e-9)
    assert machine._speed(profile, 1, 10, None) > machine._speed(profile, 1, 10, [0.5, 0.5, 0.5])


@pytest.mark.parametrize(
    ("flags", "has_it"),
    [("flags : fpu avx512f", False), ("flags : avx512_bf16", True), ("Features : fp asimd bf16", True)],
)
def test_a_cpu_says_whether_it_has_bfloat16(tmp_path, flags, has_it):
    from dspark_hf._machine import cpu_has_bfloat16

    (tmp_path / "cpuinfo").write_text(f"model name : x\n{flags}\n")
    assert cpu_has_bfloat16(tmp_path / "cpuinfo") is has_it
    assert cpu_has_bfloat16(tmp_path / "absent") is None


def test_emulated_bfloat16_is_a_note(monkeypatch):
    case = case_of(target=copy.deepcopy(pairs.target()).to(torch.bfloat16))
    monkeypatch.setattr(machine, "cpu_has_bfloat16", lambda: False)
    monkeypatch.setattr(machine, "_bfloat16_over_float32", lambda size: 5.0)
    (finding,) = machine.check_bfloat16(case)[1]
    assert not finding.is_fault and "no instructions for bfloat16" in finding.what and "5.0 times" in finding.certainty
    monkeypatch.setattr(machine, "_bfloat16_over_float32", lambda size: 0.9)
    assert machine.check_bfloat16(case)[1] == []
    monkeypatch.setattr(machine, "cpu_has_bfloat16", lambda: True)
    assert machine.check_bfloat16(case)[1] == []
    monkeypatch.setattr(machine, "cpu_has_bfloat16", lambda: None)
    with pytest.raises(NotExamined, match="does not tell"):
        machine.check_bfloat16(case)
    assert machine.check_bfloat16(case_of())[0] == "no bfloat16 on a CPU"


def test_products_are_timed():
    assert 0 < machine._bfloat16_over_float32(32) < float("inf")


def test_too_little_memory_is_a_note(monkeypatch):
    case = case_of()
    monkeypatch.setattr(machine, "_free_bytes", lambda device: 1000)
    (finding,) = machine.check_memory(case)[1]
    assert not finding.is_fault and "1024 tokens" in finding.what
    per_token = case.measured["memory"]["target_cache_bytes_per_token"]
    assert per_token == 4 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, bytes
    monkeypatch.setattr(machine, "_free_bytes", lambda device: None)
    assert machine.check_memory(case)[1] == []


def test_texts_that_differ_where_they_must_not_are_a_bug(monkeypatch):
    case, real = case_of(), machine.compare

    def broken(*args, **kwargs):
        report = real(*args, **kwargs)
        first = report.prompts[0]
        wrong = dataclasses.replace(first, difference=type("D", (), {"is_error": True})())
        return dataclasses.replace(report, prompts=(wrong, *report.prompts[1:]))

    monkeypatch.setattr(machine, "compare", broken)
    findings = machine.check_speed(case)[1]
    assert findings[0].is_fault and "1 of 8 greedy texts differ" in findings[0].what


def test_slower_than_plain_is_a_note(monkeypatch):
    case, real = case_of(), machine.compare

    def slow(*args, **kwargs):
        report = real(*args, **kwargs)
        return dataclasses.replace(
            report, speed_ratio=dataclasses.replace(report.speed_ratio, value=0.5, low=0.4, high=0.6)
        )

    monkeypatch.setattr(machine, "compare", slow)
    (finding,) = machine.check_speed(case)[1]
    assert not finding.is_fault and "0.50x of plain generation (0.40 to 0.60, 8 prompts)" in finding.what


# -- settings and pieces ------------------------------------------------------------------------------------------


def test_bad_settings_are_refused():
    with pytest.raises(ComparisonError, match="max_new_tokens must be >= 2, got 1"):
        examine(healthy(), max_new_tokens=1)
    with pytest.raises(ComparisonError, match="number of prompts must be >= 1"):
        examine(healthy(), prompts=[])
    empty = dataclasses.replace(pairs.prompts()[0], messages=({"role": "user", "content": " "},))
    with pytest.raises(ComparisonError, match="none of the prompts has tokens"):
        examine(healthy(), prompts=[empty])


def test_mask_candidates_are_ids_of_the_vocabulary_each_once():
    tokenizer = pairs.tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<pad>", "mask_token": "<mask>"})
    found = probes.mask_candidates(tokenizer, 64)
    assert found[0] == 63 and tokenizer.mask_token_id in found and len(set(found)) == len(found)
    assert all(0 <= token < 62 for token in probes.mask_candidates(tokenizer, 62))


# -- the command --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    pairs.target().save_pretrained(root / "target")
    pairs.tokenizer().save_pretrained(root / "target")
    healthy().save_pretrained(root / "drafter")
    shutil.copytree(root / "drafter", root / "broken")
    config = json.loads((root / "broken" / "config.json").read_text())
    (root / "broken" / "config.json").write_text(json.dumps(config | {"mask_token_id": 5}))
    lines = [json.dumps({"id": p.id, "prompt": p.messages[0]["content"]}) for p in pairs.prompts()]
    (root / "prompts.jsonl").write_text("\n".join(lines))
    return root


def run(folders, *arguments, drafter="drafter"):
    basics = ["--target", folders / "target", "--drafter", folders / drafter, "--prompts", folders / "prompts.jsonl"]
    basics += ["--dtype", "float32", "--device", "cpu", "--max-new-tokens", NEW_TOKENS, "--no-speed"]
    done = typer.testing.CliRunner().invoke(
        dspark_cli.app, ["doctor", *map(str, [*basics, *arguments])], env={"COLUMNS": "200"}
    )
    return done.exit_code, done.stdout, done.stderr


def test_a_healthy_pair_exits_with_0_and_json_has_everything(folders, tmp_path):
    path = tmp_path / "report.json"
    code, out, err = run(folders, "--json", path)
    assert (code, err) == (0, "")
    assert "no fault found, 1 notes" in out and "tau" in out
    report = json.loads(path.read_text())
    assert report["is_healthy"] and report["provenance"]["n"] == 12
    assert {one["check"] for one in report["outcomes"]} >= {"layout", "norms", "calibration", "profile", "memory"}
    assert report["measured"]["acceptance"]["slots"][0]["conditional_acceptance"]["low"] > 0.5


def test_a_fault_exits_with_1_and_is_printed_with_its_cure(folders):
    code, out, err = run(folders, drafter="broken")
    assert (code, err) == (1, "")
    assert "FAULT, mask token: the mask is another token: mask_token_id is 5, and 60 accepts more" in out
    assert "how sure: " in out and "drafts of 12 prompts" in out and "mend: write mask_token_id: 60" in out
    assert "1 faults found" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-prompts", 0), "num_prompts must be >= 1"),
        (("--max-new-tokens", 1), "max_new_tokens must be >= 2"),
        (("--prompts", "/nowhere.jsonl"), "there is no file"),
        (("--drafter", "/nowhere"), "is not a folder"),
        (("--json", "/nowhere/x.json"), "its folder does not exist"),
        (("--threads", 0), "--threads must be from 1 to"),
    ],
)
def test_bad_input_exits_with_2_and_one_line(folders, arguments, message):
    code, out, err = run(folders, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("dspark: error: ") and message in err and len(err.splitlines()) == 1


def test_without_a_drafter_there_is_nothing_to_examine(folders):
    arguments = ["doctor", "--target", str(folders / "target"), "--dtype", "float32", "--device", "cpu"]
    done = typer.testing.CliRunner().invoke(dspark_cli.app, arguments)
    assert done.exit_code == 2 and "no drafter is shipped" in done.stderr


def test_interrupted_it_exits_with_130(folders, monkeypatch):
    def interrupted(case):
        raise KeyboardInterrupt

    monkeypatch.setitem(dspark_hf_checks(), "layout", interrupted)
    code, _, err = run(folders)
    assert code == 130 and "interrupted" in err


def dspark_hf_checks():
    from dspark_hf.evaluation.doctor.examine import CHECKS

    return CHECKS


def test_a_drafter_of_other_sizes_is_examined_not_refused(folders, tmp_path):
    tiny_drafter(tiny_target(num_layers=3)).save_pretrained(tmp_path / "other")
    code, out, err = run(folders, "--drafter", tmp_path / "other")
    assert (code, err) == (1, "")
    assert "FAULT, sizes" in out and "load the drafter of this target" in out


# -- the drafter in the package -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real():
    name = "smollm2-135m-instruct"
    return zoo.load_target(name, "float32"), zoo.load_drafter(name, "float32"), zoo.load_tokenizer(name)


@pytest.fixture(scope="module")
def real_case(real):
    """The bundled pair and its greedy answers; texts are the target's, whatever drafter made them."""
    target, drafter, tokenizer = real
    case = Case(target=target, drafter=drafter, tokenizer=tokenizer, prompts=quickstart_prompts(), max_new_tokens=64)
    assert case.greedy.texts
    return case


def with_fault(case, plant):
    drafter = copy.copy(case.drafter)
    drafter.config = copy.deepcopy(case.drafter.config)
    plant(drafter.config)
    made = Case(
        target=case.target,
        drafter=drafter,
        tokenizer=case.tokenizer,
        prompts=case.prompts,
        max_new_tokens=case.max_new_tokens,
    )
    made.greedy = case.greedy
    return made


@pytest.mark.real_model
@pytest.mark.full
def test_it_is_silent_on_the_bundled_drafter(real):
    target, drafter, tokenizer = real
    report = examine(drafter, target=target, tokenizer=tokenizer, prompts=quickstart_prompts(), max_new_tokens=48)
    assert report.is_healthy, report.faults


@pytest.mark.real_model
@pytest.mark.full
@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (lambda config: setattr(config, "draft_layout", "fill_in"), drafting.check_layout),
        (lambda config: setattr(config, "mask_token_id", 0), drafting.check_mask),
        (lambda config: None, None),
    ],
)
def test_faults_of_the_bundled_drafter_are_named(real_case, plant, check):
    case = with_fault(real_case, plant)
    for one in (drafting.check_layout, drafting.check_layer_ids, drafting.check_mask, drafting.check_features):
        assert bool(one(case)[1]) == (one is check), one.__name__
