"""`dspark train` on a tiny target: what it writes, how it stops, and that it goes on exactly where it stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer.testing
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny import VOCAB, greedy, random_ids, tiny_target
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import dspark_cli
from dspark_hf import DSparkDraftModel
from dspark_hf.errors import TrainingDataError
from dspark_hf.hub.card import render_card
from dspark_hf.training import run as run_module
from dspark_hf.training.recipe import TrainingRequest, choose_draft_vocabulary, coverage
from dspark_hf.training.records import TrainingSequence
from dspark_hf.training.run import latest_checkpoint, train_drafter
from dspark_hf.training.trainer import DSparkTrainer

pytest.importorskip("datasets", reason="answers are written and read with the train extra")

STEPS = 12
KEYS = ("num_tokens", "num_rounds")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A target with tokenizer, and its greedy answers."""
    folder = tmp_path_factory.mktemp("train")
    target = tiny_target("llama")
    target.save_pretrained(folder / "target")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w1"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w1").save_pretrained(folder / "target")
    with (folder / "answers.jsonl").open("w") as file:
        for i in range(60):
            ids = greedy(target, random_ids(6, seed=i), max_new_tokens=14)[0].tolist()
            file.write(json.dumps({"id": f"p/{i}", "prompt_ids": ids[:6], "response_ids": ids[6:]}) + "\n")
    return folder


def request(root, output, **changes):
    settings = {
        "max_steps": STEPS,
        "batch_size": 4,
        "max_anchors": 4,
        "num_hidden_layers": 1,
        "block_size": 3,
        "markov_rank": 4,
        "draft_vocab_size": 40,
        "dtype": "float32",
        "device": "cpu",
    }
    return TrainingRequest(
        target=str(root / "target"), data=(str(root / "answers.jsonl"),), output=output, **settings | changes
    )


@pytest.fixture(scope="module")
def finished(root):
    """An uninterrupted run, and the lines it printed."""
    lines = []
    outcome = train_drafter(request(root, root / "finished"), lines.append)
    return outcome, lines


def test_the_card_of_a_trained_drafter_tells_of_its_training(finished):
    outcome, _ = finished
    text = render_card(outcome.folder)
    assert f" | {STEPS} | " in text and "](reports/training.png)" in text
    assert "| answers.jsonl | not recorded |" in text and "no report of `dspark eval`" in text


def test_a_run_that_starts_from_a_drafter_tells_of_that_ones_training(root, finished, tmp_path):
    shape = {"num_hidden_layers": None, "block_size": None, "markov_rank": None, "draft_vocab_size": None}
    first = str(finished[0].folder)
    outcome = train_drafter(request(root, tmp_path, max_steps=1, initial_drafter=first, **shape))
    report = json.loads((outcome.folder / "reports" / "training.json").read_text())
    (earlier,) = report["earlier_runs"]
    assert earlier["num_steps"] == STEPS and "history" not in earlier and report["num_steps"] == 1
    assert earlier["pair"]["drafter_sha256"] != report["pair"]["drafter_sha256"]
    text = render_card(outcome.folder)
    assert "started from the drafter" not in text


def test_a_run_leaves_a_drafter_with_report_and_curves(root, finished):
    outcome, lines = finished
    assert outcome.is_finished and outcome.num_steps == STEPS
    text = "\n".join(lines)
    assert f"{STEPS} steps" in text and "GB of memory" in text and "draft vocabulary: 40 of 61" in text
    report = json.loads((outcome.folder / "reports" / "training.json").read_text())
    assert (
        report["is_finished"]
        and report["num_steps"] == STEPS
        and report["device_hours"] > 0
        and report["cpu_threads"] >= 1
    )
    assert report["metrics"]["eval_tau_greedy"] >= 1
    assert report["provenance"]["versions"]["torch"] == torch.__version__
    assert (outcome.folder / "reports" / "training.png").stat().st_size > 1000
    assert not list(outcome.folder.glob(".partial*"))
    drafter = DSparkDraftModel.from_pretrained(outcome.folder)
    assert drafter.dtype == torch.float32 and len(drafter.draft_token_ids) == 40
    target = tiny_target("llama")
    ids = random_ids(5)
    drafted = target.generate(ids, assistant_model=drafter, do_sample=False, max_new_tokens=12)
    assert torch.equal(drafted, greedy(target, ids, max_new_tokens=12))


SCRIPT = """
import os, signal, sys, torch
from pathlib import Path
from dspark_hf.training import progress, recipe, run
torch.set_num_threads(1)
root, output, kind, at = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
original = progress.TauProgress.on_step_end
def on_step_end(self, args, state, control, **kwargs):
    original(self, args, state, control, **kwargs)
    if state.global_step == at:
        os.kill(os.getpid(), getattr(signal, kind))
progress.TauProgress.on_step_end = on_step_end
request = recipe.TrainingRequest(
    target=str(root / "target"), data=(str(root / "answers.jsonl"),), output=output, max_steps=12, batch_size=4,
    max_anchors=4, num_hidden_layers=1, block_size=3, markov_rank=4, draft_vocab_size=40, dtype="float32",
    device="cpu",
)
print("finished", run.train_drafter(request, print).is_finished)
"""


def run_until(root, output, kind, at):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(root), str(output), kind, str(at)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(run_module.__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(("kind", "at"), [("SIGKILL", 7), ("SIGINT", 5)])
def test_an_interrupted_run_ends_with_the_same_weights(root, finished, tmp_path, kind, at):
    code, text = run_until(root, tmp_path / "out", kind, at)
    if kind == "SIGKILL":
        assert code == -signal.SIGKILL
        assert not (tmp_path / "out" / "config.json").exists()
    else:
        assert code == 0 and "finished False" in text, text
        assert latest_checkpoint(tmp_path / "out" / "checkpoints").name == f"checkpoint-{at}"
        DSparkDraftModel.from_pretrained(tmp_path / "out")  # usable as it is
    lines = []
    outcome = train_drafter(request(root, tmp_path / "out"), lines.append)
    assert any("going on from checkpoint" in line for line in lines)
    assert outcome.is_finished and outcome.num_steps == STEPS
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (outcome.folder, finished[0].folder))
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name


def test_more_steps_go_on_from_the_last_checkpoint(root, finished, tmp_path):
    train_drafter(request(root, tmp_path / "out", max_steps=4), lambda line: None)
    lines = []
    outcome = train_drafter(request(root, tmp_path / "out", max_steps=8), lines.append)
    assert outcome.num_steps == 8 and any("going on from checkpoint-4" in line for line in lines)


def test_a_finished_run_is_not_trained_on_by_repeating_it(root, finished):
    before = load_file(finished[0].folder / "model.safetensors")
    for _ in range(2):
        again = train_drafter(request(root, root / "finished"), lambda line: None)
        assert again.is_finished and again.num_steps == STEPS and again.metrics["eval_tau_greedy"] >= 1
    after = load_file(finished[0].folder / "model.safetensors")
    assert all(torch.equal(before[name], weight) for name, weight in after.items())
    assert latest_checkpoint(root / "finished" / "checkpoints").name == f"checkpoint-{STEPS}"


def test_data_under_other_prompt_ids_is_other_data(root, finished, tmp_path):
    """Ids decide what is held out: the same answers under others would be evaluated after training on them."""
    (tmp_path / "renamed.jsonl").write_text((root / "answers.jsonl").read_text().replace('"p/', '"q/'))
    other = replace(request(root, root / "finished"), data=(str(tmp_path / "renamed.jsonl"),))
    with pytest.raises(TrainingDataError, match="other data"):
        train_drafter(other, lambda line: None)


def test_another_draft_vocabulary_is_another_run(root, finished, tmp_path):
    drafter = DSparkDraftModel.from_pretrained(finished[0].folder)
    drafter.d2t -= 1
    temperatures = [2.0] * drafter.config.block_size
    drafter.config.calibration = {"greedy": {"temperatures": temperatures, "platt": None, "settings": {}}}
    drafter.save_pretrained(tmp_path / "initial")
    shape = {"num_hidden_layers": None, "block_size": None, "markov_rank": None, "draft_vocab_size": None}
    initial = request(root, tmp_path / "out", max_steps=2, initial_drafter=str(tmp_path / "initial"), **shape)
    train_drafter(initial, lambda line: None)
    trained = DSparkDraftModel.from_pretrained(tmp_path / "out")
    assert torch.equal(trained.draft_token_ids, drafter.draft_token_ids)
    assert trained.config.calibration is None  # fitted to the weights before
    with pytest.raises(TrainingDataError, match="draft_vocabulary"):
        train_drafter(request(root, tmp_path / "out", max_steps=2), lambda line: None)
    with pytest.raises(TrainingDataError, match="initial_drafter .* fixes block_size"):
        request(root, tmp_path / "out", **shape | {"block_size": 3}, initial_drafter=str(tmp_path / "initial"))


def test_restart_looks_at_the_features_before_it_deletes(root, tmp_path):
    train_drafter(request(root, tmp_path / "out", max_steps=2), lambda line: None)
    lines = (root / "answers.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "fewer.jsonl").write_text("".join(lines[:40]))
    other = replace(request(root, tmp_path / "out", max_steps=2, restart=True), data=(str(tmp_path / "fewer.jsonl"),))
    with pytest.raises(TrainingDataError, match="feature cache"):
        train_drafter(other, lambda line: None)
    assert latest_checkpoint(tmp_path / "out" / "checkpoints") is not None


def test_restart_forgets_the_checkpoints_and_keeps_its_lock(root, tmp_path):
    train_drafter(request(root, tmp_path / "out", max_steps=3), lambda line: None)
    lines = []
    changes = {"max_steps": 2, "learning_rate": 1e-3, "restart": True}
    outcome = train_drafter(request(root, tmp_path / "out", **changes), lines.append)
    assert outcome.num_steps == 2 and not any("going on" in line for line in lines)
    names = {path.name for path in (tmp_path / "out" / "checkpoints").iterdir()}
    assert names == {"checkpoint-1", "checkpoint-2", "run.json", ".lock"}


def test_a_failing_last_evaluation_loses_no_drafter(root, tmp_path, monkeypatch):
    def fails(trainer):
        raise MemoryError

    monkeypatch.setattr(run_module, "final_metrics", fails)
    with pytest.raises(MemoryError):
        train_drafter(request(root, tmp_path / "out", max_steps=2), lambda line: None)
    DSparkDraftModel.from_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "reports" / "training.json").read_text())["is_finished"]


def test_broken_numbers_end_training_and_keep_the_checkpoints_before(root, tmp_path):
    train_drafter(request(root, tmp_path / "out", max_steps=4), lambda line: None)
    good = latest_checkpoint(tmp_path / "out" / "checkpoints")
    weights = load_file(good / "model.safetensors")
    weights["fc.weight"][0, 0] = float("nan")
    before = (good / "model.safetensors").read_bytes()
    save_file(weights, good / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TrainingDataError, match="training broke by step.*smaller learning_rate"):
        train_drafter(request(root, tmp_path / "out", max_steps=8), lambda line: None)
    assert latest_checkpoint(tmp_path / "out" / "checkpoints") == good
    (good / "model.safetensors").write_bytes(before)
    assert train_drafter(request(root, tmp_path / "out", max_steps=8), lambda line: None).num_steps == 8


def test_a_run_in_another_thread_works(root, tmp_path):
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(train_drafter, request(root, tmp_path / "out", max_steps=2), lambda line: None).result()
    assert outcome.num_steps == 2


def test_a_second_run_into_the_same_output_is_refused(root, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with (
        FileLock(tmp_path / "checkpoints" / ".lock"),
        pytest.raises(TrainingDataError, match="another run is writing"),
    ):
        train_drafter(request(root, tmp_path))
    train_drafter(request(root, tmp_path, max_steps=1), lambda line: None)


def test_an_output_that_cannot_be_written_is_said_first(root, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(run_module, "prepare", None)
    with pytest.raises(TrainingDataError, match="cannot be written.*name another output"):
        train_drafter(request(root, tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"


def test_ctrl_c_cuts_an_evaluation_short(root, tmp_path, monkeypatch):
    """It reports nothing, no further step is done, and the folder holds that step's drafter."""
    original = DSparkTrainer._add_up

    def interrupted(self, dataset):
        os.kill(os.getpid(), signal.SIGINT)
        original(self, dataset)

    monkeypatch.setattr(DSparkTrainer, "_add_up", interrupted)
    changes = {"max_steps": 6, "num_evaluations": 3}
    outcome = train_drafter(request(root, tmp_path / "out", **changes), lambda line: None)
    assert not outcome.is_finished and outcome.num_steps == 2 and outcome.metrics == {}
    assert latest_checkpoint(tmp_path / "out" / "checkpoints").name == "checkpoint-2"
    DSparkDraftModel.from_pretrained(tmp_path / "out")
    monkeypatch.undo()
    assert train_drafter(request(root, tmp_path / "out", **changes), lambda line: None).num_steps == 6


def test_several_processes_are_refused(root, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrainingDataError, match="DSparkTrainer"):
        train_drafter(request(root, tmp_path / "out"), lambda line: None)


@pytest.mark.parametrize("text", ["{", "{}", '{"identity": 3, "spent_s": 1}', '{"identity": {}, "spent_s": "x"}'])
def test_a_damaged_run_file_is_said(root, tmp_path, text):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "run.json").write_text(text)
    with pytest.raises(TrainingDataError, match="run.json.*--restart"):
        train_drafter(request(root, tmp_path), lambda line: None)


def test_a_checkpoint_cut_short_is_passed_over(tmp_path):
    for step, state in ((3, '{"global_step": 3}'), (9, '{"global_st'), (12, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
    assert latest_checkpoint(tmp_path).name == "checkpoint-3"
    assert latest_checkpoint(tmp_path / "none") is None


def test_an_output_of_another_run_is_refused(root, finished):
    with pytest.raises(TrainingDataError, match="other learning_rate.*--restart"):
        train_drafter(request(root, root / "finished", learning_rate=0.5))
    with pytest.raises(TrainingDataError, match="config.markov_rank"):
        train_drafter(request(root, root / "finished", markov_rank=8))


def test_a_finished_drafter_is_not_overwritten_by_chance(root, finished, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TrainingDataError, match="already holds a drafter"):
        train_drafter(request(root, tmp_path))
    assert (tmp_path / "config.json").read_text() == "{}"


def test_a_full_disk_loses_no_checkpoint(root, tmp_path, monkeypatch):
    train_drafter(request(root, tmp_path / "out", max_steps=4), lambda line: None)
    before = latest_checkpoint(tmp_path / "out" / "checkpoints")

    def full(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(DSparkDraftModel, "save_pretrained", full)
    with pytest.raises(TrainingDataError, match="free some space"):
        train_drafter(request(root, tmp_path / "out", max_steps=8), lambda line: None)
    monkeypatch.undo()
    assert latest_checkpoint(tmp_path / "out" / "checkpoints") == before
    assert train_drafter(request(root, tmp_path / "out", max_steps=8), lambda line: None).num_steps == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"minutes": 1.0}, "excludes max_steps"),
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"features": "disk"}, "features must be cache or online"),
        ({"held_out_fraction": 0.0}, "held_out_fraction"),
        ({"decay_fraction": 1.0}, "decay_fraction"),
        ({"max_cache_gb": 1e-9}, "the limit is"),
        ({"epochs": float("inf")}, "epochs must be > 0 and finite"),
        ({"max_cache_gb": float("inf")}, "max_cache_gb"),
        ({"seed": -1}, "seed must lie"),
        ({"block_size": 0}, "block_size must be >= 1"),
        ({"draft_vocab_size": 62}, "at most the target's vocabulary of 61"),
        ({"num_evaluations": 0}, "num_evaluations must be >= 1"),
    ],
)
def test_bad_settings_are_refused(root, tmp_path, changes, message):
    with pytest.raises(TrainingDataError, match=message):
        train_drafter(request(root, tmp_path / "out", **changes), lambda line: None)


def test_one_path_is_read_as_one(tmp_path):
    made = TrainingRequest(target="t", data="answers.jsonl", output=str(tmp_path))
    assert made == TrainingRequest(target="t", data=("answers.jsonl",), output=tmp_path)
    assert TrainingRequest("t", [tmp_path / "a", "b"], tmp_path).data == (str(tmp_path / "a"), "b")
    for changes, message in [
        ({"data": 3}, "data must be a path, or a list of paths, got 3"),
        ({"data": (None,)}, "data must be a path, or a list of paths"),
        ({"output": None}, "output must be the path of a folder, got None"),
    ]:
        with pytest.raises(TrainingDataError, match=message):
            TrainingRequest(**{"target": "t", "data": "a", "output": tmp_path} | changes)


@pytest.mark.parametrize(("has_checkpoint", "message"), [(False, "before the first checkpoint"), (True, "are whole")])
def test_ctrl_c_says_what_is_there(tmp_path, monkeypatch, has_checkpoint, message):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "train_drafter", interrupted)
    if has_checkpoint:
        (tmp_path / "checkpoints" / "checkpoint-3").mkdir(parents=True)
    done = typer.testing.CliRunner().invoke(dspark_cli.app, ["train", "--data", "a", "--output", str(tmp_path)])
    assert done.exit_code == 130 and message in done.stderr
    assert has_checkpoint or f"no drafter is in {tmp_path}" in done.stderr


def test_a_resumed_train_data_counts_the_whole_file(root, tmp_path):
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": f"w{i}"}) + "\n" for i in range(5, 9)))
    arguments = ["--target", root / "target", "--prompts", tmp_path / "p.jsonl", "--output", tmp_path / "a.jsonl"]
    arguments += ["--dtype", "float32", "--device", "cpu", "--max-new-tokens", 3]
    for counts in ("0 of them from before; of the 4 made now", "4 of them from before; of the 0 made now"):
        done = typer.testing.CliRunner().invoke(dspark_cli.app, ["train", "data", *map(str, arguments)])
        assert done.exit_code == 0, done.output
        assert "4 answers of 4 prompts in" in done.stdout and counts in done.stdout


def test_the_draft_vocabulary_is_what_answers_use_most():
    ids = torch.tensor([5, 9, 9, 9, 7, 7, 30])
    sequences = [TrainingSequence("p", ids, torch.tensor([False, True, True, True, True, True, True]))]
    assert choose_draft_vocabulary(sequences, 61, 3).tolist() == [7, 9, 30]
    # Unseen tokens: the lowest ids first.
    assert choose_draft_vocabulary(sequences, 61, 5).tolist() == [0, 1, 7, 9, 30]
    # A stop token is always among them.
    assert choose_draft_vocabulary(sequences, 61, 3, [60]).tolist() == [7, 9, 60]
    assert coverage(sequences, torch.tensor([7, 9]), 61) == pytest.approx(5 / 6)


def test_the_command_reports_and_fails_readably(root, tmp_path):
    runner = typer.testing.CliRunner()
    basics = ["train", "--target", str(root / "target"), "--dtype", "float32", "--device", "cpu"]
    data = ["--data", str(root / "answers.jsonl")]
    small = ["--max-steps", "2", "--num-hidden-layers", "1", "--block-size", "2", "--markov-rank", "2"]
    done = runner.invoke(dspark_cli.app, [*basics, *data, "--output", str(tmp_path / "out"), *small])
    assert done.exit_code == 0, done.output
    assert "estimate:" in done.stdout and "drafter after 2 steps" in done.stdout
    for arguments, message in [
        ([*basics, "--output", str(tmp_path / "x")], "needs --data and --output"),
        ([*basics, "--data", str(tmp_path / "no.jsonl"), "--output", str(tmp_path / "x")], "does not exist"),
        (["train", "--seed", "7", "data", "--prompts", "p.jsonl", "--output", "o.jsonl"], "--seed must stand behind"),
        ([*basics, *data, "--output", str(tmp_path / "x"), "--epochs", "0"], "epochs must be > 0"),
        ([*basics, *data, "--output", str(tmp_path / "x"), "--markov-head-type", "lstm"], "markov_head_type must be"),
    ]:
        done = runner.invoke(dspark_cli.app, arguments)
        assert done.exit_code == 2 and message in done.output, done.output
        assert "Traceback" not in done.output


def test_evaluating_drafters_prints_and_writes_every_number(root, finished, tmp_path):
    with (tmp_path / "texts.jsonl").open("w") as file:
        for i, line in enumerate((root / "answers.jsonl").read_text().splitlines()[:12]):
            row = json.loads(line) | {"id": f"{'ab'[i % 2]}/{i}", "temperature": float(i % 3 == 0)}
            file.write(json.dumps(row) + "\n")
    drafter = ["--drafter", str(root / "finished"), "--drafter", str(root / "finished")]
    arguments = ["eval", "--texts", str(tmp_path / "texts.jsonl"), "--target", str(root / "target"), *drafter]
    arguments += ["--dtype", "float32", "--device", "cpu", "--json", str(tmp_path / "r.json")]
    start = time.monotonic()
    done = typer.testing.CliRunner().invoke(dspark_cli.app, arguments)
    assert done.exit_code == 0, done.output
    assert "mean of domains" in done.stdout and time.monotonic() - start < 60
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["num_texts"] == {"0": 8, "1": 4}
    assert len(report["texts"]) == 12
    tokens, rounds = (sum(text[key] for text in report["texts"] if not text["temperature"]) for key in KEYS)
    assert report["scores"][0]["tau"]["all"]["value"] == pytest.approx(tokens / rounds)
    for entry in report["scores"]:
        assert 1 <= entry["tau"]["all"]["value"] <= 4
        assert len(entry["confidence_ece"]) == 3
