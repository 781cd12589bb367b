"""Proposals from real decoding, and `dspark calibrate` from end to end on a tiny target."""

import dataclasses
import inspect
import json
import shutil

import pytest
import torch
import typer.testing
from near_pair import near_drafter as near
from near_pair import near_target
from safetensors.torch import load_file
from tiny import VOCAB, random_ids, tiny_drafter
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

import dspark_cli
from dspark_hf import CalibrationError, CalibrationRequest, DSparkConfig, record_proposals, record_speculation
from dspark_hf.decoding import loop
from dspark_hf.evaluation import calibration, calibration_quality, proposals
from dspark_hf.evaluation.calibration import calibrate_drafter
from dspark_hf.evaluation.calibration_files import check_output, write_calibrated
from dspark_hf.evaluation.proposals import RecordingSettings, read_proposals, record_to_file
from dspark_hf.fitting import sts
from dspark_hf.hub.card import render_card
from dspark_hf.training.records import is_held_out

GREEDY = RecordingSettings(temperature=0.0, top_p=None, top_k=None, max_new_tokens=12, batch_size=2, seed=0)


@pytest.fixture(scope="module")
def target():
    return near_target()


def counts(record):
    """Rounds of each row: drafts verified and accepted."""
    found = {}
    for ended in record.rounds:
        for row, *numbers in zip(ended.rows, ended.num_verified, ended.num_accepted, strict=True):
            found.setdefault(row, []).append(tuple(numbers))
    return found


@pytest.fixture
def prompts():
    return {f"p/{i}": random_ids(5 + i, seed=i)[0].tolist() for i in range(6)}


# -- rounds as they end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_one_by_one", [False, True])
def test_rows_of_a_batch_have_the_rounds_they_have_alone(target, monkeypatch, is_one_by_one):
    ids, drafter = torch.cat([random_ids(6, seed=s) for s in range(3)]), near(target)
    call = {"assistant_model": drafter, "do_sample": False, "max_new_tokens": 20}
    alone = {}
    for row in range(3):
        with record_proposals() as record:
            target.generate(ids[row : row + 1], **call)
        alone[row] = counts(record)[0]
    if is_one_by_one:
        monkeypatch.setattr(loop, "why_one_by_one", lambda *args: "a test")
    with record_proposals() as record, record_speculation() as report:
        target.generate(ids, **call)
    assert counts(record) == alone
    rounds = [numbers for row in alone.values() for numbers in row]
    assert report.num_verified == sum(verified for verified, _ in rounds)
    assert report.num_accepted == sum(accepted for _, accepted in rounds) > 0


def test_outside_the_block_nothing_is_recorded(target):
    with record_proposals() as record:
        pass
    target.generate(random_ids(5), assistant_model=near(target), max_new_tokens=8, do_sample=False)
    assert record.rounds == []


def test_drafts_cut_off_by_the_length_limit_are_not_verified(target):
    with record_proposals() as record:
        target.generate(random_ids(5), assistant_model=near(target), max_new_tokens=8, do_sample=False)
    found = record.proposals()
    assert found.num_slots == 4
    assert int(found.is_verified[-1].sum()) == record.rounds[-1].num_verified[0] < 4


# -- on disk ------------------------------------------------------------------------------------------------------


def test_an_interrupted_recording_goes_on_to_the_same_file(target, prompts, tmp_path, monkeypatch):
    drafter, decode = near(target), proposals._decode
    record_to_file(target, drafter, prompts, tmp_path / "whole.jsonl", GREEDY, num_proposals=10**6)
    num_calls = 0

    def interrupted(*args):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise KeyboardInterrupt
        return decode(*args)

    monkeypatch.setattr(proposals, "_decode", interrupted)
    path = tmp_path / "cut.jsonl"
    with pytest.raises(KeyboardInterrupt):
        record_to_file(target, drafter, prompts, path, GREEDY, num_proposals=10**6)
    assert 1 < len(path.read_text().splitlines()) < 7
    with path.open("a") as file:
        file.write('{"id": "p/0", "logi')  # killed while writing
    record_to_file(target, drafter, prompts, path, GREEDY, num_proposals=10**6)
    assert path.read_text() == (tmp_path / "whole.jsonl").read_text()


def test_batches_hold_prompts_of_similar_length_and_each_once():
    lengths = torch.randint(1, 100, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = {f"p/{i}": [1] * length for i, length in enumerate(lengths)}
    batches = list(proposals._batches(prompts, dataclasses.replace(GREEDY, batch_size=10)))
    assert sorted(name for batch in batches for name in batch) == sorted(prompts)
    spans = [max(len(prompts[n]) for n in b) - min(len(prompts[n]) for n in b) for b in batches]
    assert max(spans) < 40 and len(batches) == 30
    window = [len(prompts[batch[0]]) for batch in batches[: proposals.BATCHES_PER_WINDOW]]
    assert window != sorted(window) and window != sorted(window, reverse=True)


def test_it_stops_at_the_number_of_rounds(target, prompts, tmp_path):
    found = record_to_file(target, near(target), prompts, tmp_path / "a.jsonl", GREEDY, num_proposals=3)
    assert found.num_prompts == 2 and len(found) == len(read_proposals(tmp_path / "a.jsonl"))


def test_proposals_of_other_settings_or_drafters_are_not_mixed(target, prompts, tmp_path):
    path, drafter = tmp_path / "a.jsonl", near(target)
    record_to_file(target, drafter, prompts, path, GREEDY, num_proposals=1)
    drafter.config.calibration = {"greedy": {"temperatures": [2.0] * 4, "platt": None, "settings": {}}}
    record_to_file(target, drafter, prompts, path, GREEDY, num_proposals=1)  # raw logits do not depend on it
    with pytest.raises(CalibrationError, match="made with other: drafter"):
        record_to_file(target, near(target, seed=2), prompts, path, GREEDY, num_proposals=1)
    sampled = RecordingSettings(1.0, None, None, 12, 2, 0)
    with pytest.raises(CalibrationError, match="made with other: law.*settings"):
        record_to_file(target, drafter, prompts, path, sampled, num_proposals=1)


def test_only_rounds_of_todays_prompts_count(target, prompts, tmp_path):
    path, drafter = tmp_path / "a.jsonl", near(target)
    everything = record_to_file(target, drafter, prompts, path, GREEDY, num_proposals=10**6)
    first, second, third, *_ = prompts
    today = {first: prompts[first], second: prompts[third]}  # one as it was, one with another text
    fresh = record_to_file(target, drafter, today, tmp_path / "fresh.jsonl", GREEDY, num_proposals=10**6)
    again = record_to_file(target, drafter, today, path, GREEDY, num_proposals=10**6)
    assert again.num_prompts == 2 and len(again) < len(everything)
    assert int(again.is_verified.sum()) == int(fresh.is_verified.sum())
    assert len(path.read_text().splitlines()) == 1 + len(prompts) + 1
    assert len(record_to_file(target, drafter, prompts, path, GREEDY, num_proposals=1)) == len(everything)


def test_a_file_of_something_else_is_refused(target, prompts, tmp_path):
    (tmp_path / "a.jsonl").write_text("hello\n")
    with pytest.raises(CalibrationError, match="cannot be read as proposals"):
        record_to_file(target, near(target), prompts, tmp_path / "a.jsonl", GREEDY, num_proposals=1)
    assert (tmp_path / "a.jsonl").read_text() == "hello\n"


# -- the command --------------------------------------------------------------------------------------------------


def word(token):
    """Without digits, which the target's tokenizer class takes one by one."""
    return chr(97 + token // 26) + chr(97 + token % 26)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, target):
    """A target with tokenizer, its drafter, and prompts to fit on and to judge on."""
    root = tmp_path_factory.mktemp("models")
    words = Tokenizer(WordLevel({word(i): i for i in range(VOCAB)}, unk_token=word(1)))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token=word(1)).save_pretrained(root / "target")
    target.save_pretrained(root / "target")
    near(target, block_size=2, num_hidden_layers=1).save_pretrained(root / "drafter")
    for name, start in (("fit", 1), ("judge", 31)):
        lines = [
            json.dumps({"id": f"{name}/{i}", "prompt": f"{word(i)} {word(i + 3)} {word(i + 5)}"})
            for i in range(start, start + 24)
        ]
        (root / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return root


@pytest.fixture(autouse=True)
def small_numbers(monkeypatch):
    monkeypatch.setattr(sts, "MIN_PROPOSALS", 50)
    monkeypatch.setattr(sts, "MIN_OUTCOMES", 1)
    monkeypatch.setattr(calibration_quality, "NUM_RESAMPLES", 50)


def run(folders, output, *arguments, drafter="drafter"):
    basics = ["--target", folders / "target", "--drafter", folders / drafter, "--prompts", folders / "fit.jsonl"]
    basics += ["--output", output, "--dtype", "float32", "--device", "cpu", "--max-new-tokens", 16]
    done = typer.testing.CliRunner().invoke(
        dspark_cli.app, ["calibrate", *map(str, [*basics, *arguments])], env={"COLUMNS": "200"}
    )
    return done.exit_code, done.stdout, done.stderr


def test_calibrate_writes_a_drafter_a_report_and_a_figure(folders, tmp_path):
    pytest.importorskip("matplotlib")
    output = tmp_path / "out"
    code, out, err = run(folders, output, "--held-out-prompts", folders / "judge.jsonl")
    assert code == 0, err
    assert "greedy (repetition_penalty 1" in out and "sampled (" in out
    assert "held-out rounds also decide which slots keep their map" in " ".join(out.split())
    report = json.loads((output / "calibration" / "report.json").read_text())
    assert "decide which slots keep their map" in report["held_out_use"]
    assert report["provenance"]["n"] == sum(mode["num_held_out"] for mode in report["modes"].values())
    written = {name for name, mode in report["modes"].items() if mode["is_written"]}
    config = DSparkConfig.from_pretrained(output)
    assert set(config.calibration or {}) == written and written
    in_order = ", ".join(name for name in report["modes"] if name in written)
    assert f"calibrated drafter in {output}, written: {in_order}" in " ".join(out.split())
    for name in written:
        mode, entry = report["modes"][name], config.calibration[name]
        assert mode["num_held_out_prompts"] == 24 and entry["num_proposals"] == mode["num_fitted"] > 50
        assert entry["temperatures"] == pytest.approx(mode["temperatures"], abs=1e-5)
        assert entry["settings"] == mode["settings"]
    weights, ours = (load_file(folder / "model.safetensors") for folder in (folders / "drafter", output))
    assert weights.keys() == ours.keys() and all(torch.equal(ours[key], weights[key]) for key in ours)
    assert (output / "calibration" / "reliability.png").stat().st_size > 1000
    kept = {path.stem for path in (output / "reports").glob("*.json")}
    assert kept == {f"calibration-{name}" for name in written}
    card = render_card(output)
    for name in written:
        assert f"### {name}\n" in card and f"](reports/calibration-{name}.png)" in card
    assert "Not shown" not in card
    assert not [path for path in output.rglob("*") if "partial" in path.name or path.name.startswith(".calibrated")]


def test_in_place_only_the_config_changes_and_other_modes_stay(folders, tmp_path):
    drafter = tmp_path / "drafter"
    shutil.copytree(folders / "drafter", drafter)
    config = json.loads((drafter / "config.json").read_text())
    sampled = {"temperatures": [3.0, 3.0], "platt": None, "settings": {"temperature": 1.0}}
    (drafter / "config.json").write_text(json.dumps(config | {"calibration": {"sampled": sampled}}))
    before = (drafter / "model.safetensors").stat()
    code, _, err = run(folders, drafter, "--mode", "greedy", drafter=drafter)
    assert code == 0, err
    after = json.loads((drafter / "config.json").read_text())
    assert after["calibration"].pop("sampled") == sampled
    assert set(after.pop("calibration")) == {"greedy"}
    assert after == {key: value for key, value in config.items() if key != "calibration"}
    assert (drafter / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns


def make_slot_worse(monkeypatch, is_affected):
    decide = calibration.fit_mode

    def fit_mode(fitting, held_out, settings, **options):
        with pytest.MonkeyPatch.context() as patch:
            if is_affected(settings):
                patch.setattr(calibration_quality.SlotQuality, "is_worse", property(lambda slot: slot.slot == 2))
            return decide(fitting, held_out, settings, **options)

    monkeypatch.setattr(calibration, "fit_mode", fit_mode)


def test_a_mode_that_is_not_written_is_said(folders, tmp_path, monkeypatch):
    make_slot_worse(monkeypatch, lambda settings: "temperature" in settings)
    code, out, err = run(folders, tmp_path)
    out = " ".join(out.split())
    assert code == 0, err
    assert out.count("written: greedy not written: sampled, since calibrated slots [2] are further from") == 1
    assert set(DSparkConfig.from_pretrained(tmp_path).calibration) == {"greedy"}


def test_without_a_written_mode_there_is_no_drafter(folders, tmp_path, monkeypatch):
    make_slot_worse(monkeypatch, lambda settings: True)
    code, out, err = run(folders, tmp_path, "--mode", "greedy")
    assert code == 1 and "calibrated drafter in" not in out
    assert (
        "no mode was written" in err
        and "was made or changed" in err
        and "greedy, since calibrated slots [2] are further" in err
    )
    assert not (tmp_path / "config.json").exists() and (tmp_path / "calibration" / "report.json").exists()
    assert not (tmp_path / "reports").exists()


def test_the_help_says_what_held_out_prompts_decide():
    done = typer.testing.CliRunner().invoke(dspark_cli.app, ["calibrate", "--help"], env={"COLUMNS": "200"})
    assert "to decide which slots keep their map" in " ".join(done.stdout.split())


def fitted_on(num_proposals):
    return {"temperatures": [3.0, 3.0], "platt": None, "settings": {}, "num_proposals": num_proposals}


def test_modes_of_the_same_drafter_in_the_output_stay(folders, target, tmp_path):
    source, output = tmp_path / "source", tmp_path / "output"
    for folder, entries in ((source, {"greedy": fitted_on(1), "sampled": fitted_on(2)}), (output, None)):
        near(target, block_size=2, num_hidden_layers=1, calibration=entries).save_pretrained(folder)
    write_calibrated(str(source), output, {"greedy": fitted_on(3)})
    write_calibrated(str(source), output, {"sampled": fitted_on(4)})
    assert DSparkConfig.from_pretrained(output).calibration == {"greedy": fitted_on(3), "sampled": fitted_on(4)}


@pytest.mark.parametrize("other", [{"seed": 5}, {"block_size": 3}, {"dtype": torch.bfloat16}, None])
def test_another_model_in_the_output_is_not_overwritten(folders, target, tmp_path, monkeypatch, other):
    if other is None:
        target.save_pretrained(tmp_path)
    else:
        dtype = other.pop("dtype", torch.float32)
        near(target, **{"block_size": 2, "num_hidden_layers": 1} | other).to(dtype).save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(proposals, "_decode", None)  # refused before
    code, _, err = run(folders, tmp_path, "--mode", "greedy")
    assert code == 2 and "must be empty or hold the drafter that is calibrated" in err and "name another output" in err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "pytorch_model.bin"])
def test_part_of_a_model_in_the_output_is_not_overwritten(folders, tmp_path, name):
    (tmp_path / name).write_bytes(b"[]")
    with pytest.raises(CalibrationError, match="holds another model"):
        check_output(str(folders / "drafter"), tmp_path)


def test_a_repeated_command_decodes_nothing_again(folders, tmp_path, monkeypatch):
    assert run(folders, tmp_path / "out", "--mode", "greedy")[0] == 0
    monkeypatch.setattr(proposals, "_decode", None)
    assert run(folders, tmp_path / "out", "--mode", "greedy", "--maps", "platt")[0] == 0
    entry = json.loads((tmp_path / "out" / "config.json").read_text())["calibration"]["greedy"]
    assert len(entry["platt"]) == 2


def test_only_prompts_that_training_left_out_are_fitted_on(folders, tmp_path):
    assert run(folders, tmp_path / "out", "--mode", "greedy", "--not-trained-fraction", "0.5")[0] == 0
    lines = (tmp_path / "out" / "calibration" / "proposals-greedy-fit.jsonl").read_text().splitlines()[1:]
    used = {json.loads(line)["id"] for line in lines}
    assert used == {f"fit/{i}" for i in range(1, 25) if is_held_out(f"fit/{i}", 0.5)} and 4 < len(used) < 20


def test_ctrl_c_says_that_the_command_goes_on(folders, tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(proposals, "_decode", interrupted)
    code, _, err = run(folders, tmp_path / "out", "--mode", "greedy")
    assert code == 130 and "the same command goes on" in err
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "beam"], "modes must be some of greedy, sampled"),
        (["--temperature", "0"], "temperature must be above 0"),
        (["--maps", "isotonic"], "maps must be one of temperature, platt, auto"),
        (["--num-proposals", "0"], "num_proposals must be >= 1"),
        (["--not-trained-fraction", "1e-9"], "prompts must be some that training left out"),
        (["--max-prompt-tokens", "1"], "raise max_prompt_tokens"),
        (["--held-out-prompts", "fit.jsonl"], "24 prompts are both among those to fit on"),
    ],
)
def test_bad_input_is_one_line_and_writes_no_drafter(folders, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(folders)
    code, out, err = run(folders, tmp_path / "out", *arguments)
    assert (code, out) == (2, "")
    assert message in err and len(err.splitlines()) == 1
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_drafter_without_confidence_head_is_refused(folders, target, tmp_path):
    without = tiny_drafter(target, enable_confidence_head=False, confidence_head_with_markov=False)
    without.save_pretrained(tmp_path / "drafter")
    code, _, err = run(folders, tmp_path / "out", drafter=tmp_path / "drafter")
    assert code == 2 and "has no confidence head" in err


def test_too_few_rounds_are_said(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(sts, "MIN_PROPOSALS", 10**6)
    request = CalibrationRequest(
        str(folders / "target"),
        str(folders / "drafter"),
        (str(folders / "fit.jsonl"),),
        tmp_path / "out",
        dtype="float32",
        max_new_tokens=6,
    )
    with pytest.raises(CalibrationError, match="slot 1 has .* verified proposals"):
        calibrate_drafter(request)
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_slot_with_too_few_accepted_is_left_as_it_is_and_said(folders, tmp_path, monkeypatch):
    right = sts._why_unfit
    monkeypatch.setattr(sts, "_why_unfit", lambda rounds, slot: "too few" if slot == 1 else right(rounds, slot))
    code, out, err = run(folders, tmp_path / "thin", "--mode", "greedy")
    assert code == 0, err
    assert "many rejected prefixes: [2]; a higher --num-proposals records more" in " ".join(out.split())
    found = json.loads((tmp_path / "thin" / "calibration" / "report.json").read_text())["modes"]["greedy"]
    assert found["slots_not_fitted"] == [2] and found["temperatures"][1] == 1.0


def test_one_source_is_read_as_one(tmp_path):
    made = CalibrationRequest("t", None, "p.jsonl", str(tmp_path), held_out_prompts="q.jsonl", modes="greedy")
    assert made == CalibrationRequest("t", None, ("p.jsonl",), tmp_path, ("q.jsonl",), modes=("greedy",))
    with pytest.raises(CalibrationError, match="prompts must be a source, or a list of them, got 3"):
        CalibrationRequest("t", None, 3, tmp_path)
    with pytest.raises(CalibrationError, match="output must be the path of a folder, got None"):
        CalibrationRequest("t", None, "p.jsonl", None)


def test_defaults_of_the_command_are_those_of_the_request():
    parameters = inspect.signature(dspark_cli.calibrate_command).parameters
    fields = inspect.signature(CalibrationRequest).parameters
    differing = {"held_out_prompts", "modes", "held_out_fraction"}  # None for empty, or another name
    for name in set(fields) - differing - {"target", "drafter"}:
        assert parameters[name].default == fields[name].default, name
