"""scripts/gpu_train.sh without a GPU, a network or a model: usage, pieces and sums, and results within their limits."""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from tiny import tiny_drafter, tiny_target

from dspark_hf import DSparkDraftModel
from dspark_hf.training.records import TrainingSequence, split_held_out

SCRIPTS = Path(__file__).parents[2] / "scripts"
SCRIPT = SCRIPTS / "gpu_train.sh"

pytestmark = pytest.mark.skipif(sys.platform != "linux" or shutil.which("bash") is None, reason="a script for Linux")


def run(*arguments, script=SCRIPT, **environment):
    return subprocess.run(
        ["bash", str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHON": sys.executable} | environment,
        timeout=60,
    )


def sums(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def functions(tmp_path):
    """Runs bash code that has the script's functions, as if it had been called with nothing to do."""
    text = SCRIPT.read_text().rsplit("\ncase ", 1)[0]
    path = tmp_path / "functions.sh"

    def call(code, **environment):
        path.write_text(f"{text}\n{code}\n")
        return run(script=path, **environment)

    return call


@pytest.fixture
def trained(tmp_path):
    """What a run of `train` has in its folders when it ends."""
    work = tmp_path / "store/run"
    (work / "drafter/reports").mkdir(parents=True)
    (work / "drafter/config.json").write_text("{}")
    (work / "drafter/reports/training.json").write_text("{}")
    (work / "drafter/model.safetensors").write_bytes(bytes(range(256)) * 10)
    (work / "eval_held_out.json").write_text("{}")
    (work / "answers.jsonl").write_text("{}\n")
    (work / "answers.jsonl.settings.json").write_text("{}")
    (work / "run.log").write_text("said\n")
    (work / "training.log").write_text("step 1\rstep 2\n")
    return work


WRITE = 'WORK={} OUT={}; LOG=$WORK/run.log; mkdir -p "$OUT"; write_results'


# --- usage


@pytest.mark.parametrize("arguments", [[], ["receive"], ["train", "store"], ["join", "a", "b", "c"], ["other"]])
def test_wrong_calls_show_usage(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert "usage: gpu_train.sh pack" in done.stderr


def test_help_names_every_setting():
    done = run("--help")
    assert done.returncode == 0
    assert all(len(line) <= 120 for line in done.stdout.splitlines())
    code = SCRIPT.read_text()
    settings = {line.split(":-")[0] for line in code.split("${")[1:] if ":-" in line.split("}")[0]}
    settings = {name for name in settings if name.isupper()}
    assert {"LIMIT_S", "MINUTES", "FILE_BYTES", "TARGET_PYTHON"} <= settings
    assert all(f"{name}=" in done.stdout or f"{name} " in done.stdout for name in settings)


def test_shell_syntax():
    assert subprocess.run(["bash", "-n", str(SCRIPT)]).returncode == 0
    if shutil.which("shellcheck"):
        assert subprocess.run(["shellcheck", str(SCRIPT)]).returncode == 0


def test_every_wheel_is_pinned(functions):
    done = functions('for name in $WHEELS; do grep -q "^$name==" "$CONSTRAINTS" || echo "$name"; done',
                     CONSTRAINTS=str(SCRIPTS.parent / "constraints.txt"))  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "")


# --- parts


def test_pieces_make_the_file_again(functions, tmp_path):
    (tmp_path / "file").write_bytes(os.urandom(1234))
    (tmp_path / "pieces").mkdir()
    done = functions(f"cut_file {tmp_path}/file 100 {tmp_path}/pieces part")
    assert done.stdout.strip() == "13"
    pieces = [tmp_path / f"pieces/part.{i}" for i in range(1, 14)]
    assert sorted(pieces) == sorted((tmp_path / "pieces").iterdir())
    assert all(piece.stat().st_size <= 100 for piece in pieces)
    assert b"".join(piece.read_bytes() for piece in pieces) == (tmp_path / "file").read_bytes()


def test_receive_moves_whole_parts_and_refuses_damaged_ones(tmp_path):
    part, store = tmp_path / "part-1", tmp_path / "store"
    part.mkdir()
    piece = part / "store.tar.1-of-2"
    piece.write_bytes(b"whole")
    assert run("receive", part, store).returncode == 1  # no sums
    (part / "SHA256SUMS").write_text(f"{hashlib.sha256(b'whole').hexdigest()}  {piece.name}\n")
    piece.write_bytes(b"other")
    done = run("receive", part, store)
    assert done.returncode == 1
    assert "is damaged" in done.stderr
    assert not store.exists()
    piece.write_bytes(b"whole")
    assert run("receive", part, store).returncode == 0
    assert (store / piece.name).read_bytes() == b"whole"


def test_train_without_all_parts_says_which_and_leaves_a_log(tmp_path):
    store, out = tmp_path / "store", tmp_path / "out"
    store.mkdir()
    (store / "store.tar.1-of-2").write_bytes(b"")
    done = run("train", store, out)
    assert done.returncode == 1
    assert "lacks part 2 of 2" in done.stdout + done.stderr
    with tarfile.open(out / "results.tar.gz") as archive:
        assert b"lacks part 2 of 2" in archive.extractfile("./run.log").read()
    assert run("train", store, out).returncode == 1  # an earlier run's folder is not mixed with


# --- phases


PHASES = "WORK={0} LOG={0}/log GRACE_S=1 CHILDREN=()\n"


def test_phases_end_at_their_limits_and_failures_are_told(functions, tmp_path):
    done = functions(
        PHASES.format(tmp_path)
        + """
        begin good 5 echo fine
        begin bad 5 bash -c 'exit 3'
        begin slow 1 sleep 30
        begin late 0 echo never
        finish || echo "not all"
        """
    )
    assert "good: done" in done.stdout
    assert "bad: ended with exit code 3" in done.stdout
    assert "slow: stopped at its limit" in done.stdout
    assert "late: skipped" in done.stdout
    assert "not all" in done.stdout


def test_a_limit_is_one_ctrl_c(functions, tmp_path):
    code = "import time\ntry: time.sleep(30)\nexcept KeyboardInterrupt: print('kept'); time.sleep(0.3); print('once')"
    done = functions(PHASES.format(tmp_path) + f'begin polite 1 {sys.executable} -c "{code}"\nfinish || true')
    assert "kept\nonce" in done.stdout


def test_told_to_stop_results_are_written(functions, tmp_path, trained):
    done = functions(
        WRITE.format(trained, tmp_path / "out").replace("; write_results", "; GRACE_S=1 CHILDREN=()")
        + "\ntrap write_results EXIT; trap on_signal TERM; begin slow 20 sleep 20; kill -TERM $$; finish"
    )
    assert done.returncode == 143
    assert "told to stop" in done.stdout
    assert (tmp_path / "out/results.tar.gz").is_file()


# --- results


def test_join_restores_what_train_wrote(functions, tmp_path, trained):
    out, joined = tmp_path / "out", tmp_path / "joined"
    functions(WRITE.format(trained, out), FILE_BYTES="1000")
    assert sorted(path.name for path in out.iterdir()) == [
        "SHA256SUMS", "answers.tar.gz", *(f"model.safetensors.{i}" for i in (1, 2, 3)), "results.tar.gz",
    ]  # fmt: skip
    assert all(path.stat().st_size <= 1000 for path in out.iterdir())
    done = run("join", out, joined)
    assert (done.returncode, done.stderr) == (0, "")
    assert sums(joined / "drafter") == sums(trained / "drafter")
    assert (joined / "training.log").read_text() == "step 1\nstep 2\n"
    assert (joined / "answers.jsonl").is_file()
    assert run("join", out, joined).returncode == 1  # nothing is overwritten


def test_join_refuses_damage_and_lost_pieces(functions, tmp_path, trained):
    out = tmp_path / "out"
    functions(WRITE.format(trained, out), FILE_BYTES="1000")
    piece = out / "model.safetensors.2"
    content = piece.read_bytes()
    piece.write_bytes(content[:-1] + b"x")
    assert "is damaged" in run("join", out, tmp_path / "joined").stderr
    piece.unlink()
    assert "is damaged" in run("join", out, tmp_path / "joined").stderr


def test_results_stay_within_the_limits(functions, tmp_path, trained):
    out = tmp_path / "out"
    functions(WRITE.format(trained, out), FILE_BYTES="1000", MAX_FILES="5")  # answers have no room
    assert len(list(out.iterdir())) == 5
    done = functions(WRITE.format(trained, out), FILE_BYTES="1000", MAX_FILES="4")  # nor have the weights
    assert "do not fit into 2 files" in done.stdout
    assert not list(out.glob("model.safetensors.*"))
    assert "no drafter came back" in run("join", out, tmp_path / "joined").stderr


# --- the parts in Python


@pytest.fixture(scope="module")
def parts():
    spec = importlib.util.spec_from_file_location("gpu_train", SCRIPTS / "gpu_train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_held_out_answers_are_those_that_training_holds_out(parts, tmp_path):
    rows = [{"id": f"p{i % 60}", "temperature": 0.0, "prompt_ids": [1], "response_ids": [2, 3]} for i in range(120)]
    source, output = tmp_path / "answers.jsonl", tmp_path / "held_out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts.write_held_out([source], 0.3, 10, output)
    written = [json.loads(line)["id"] for line in output.read_text().splitlines()]
    sequences = [TrainingSequence(row["id"], torch.tensor([1, 2, 3]), torch.ones(3).bool()) for row in rows]
    _, held_out = split_held_out(sequences, 0.3)
    assert 5 <= len(written) <= 10
    assert set(written) <= {sequence.id for sequence in held_out}


def test_salvage_makes_a_drafter_of_the_last_whole_checkpoint(parts, tmp_path):
    with pytest.raises(SystemExit, match="no whole checkpoint"):
        parts.salvage(tmp_path)
    drafter = tiny_drafter(tiny_target()).float()
    for step in (9, 10, 11):
        drafter.save_pretrained(tmp_path / f"checkpoints/checkpoint-{step}")
    (tmp_path / "checkpoints/checkpoint-9/trainer_state.json").write_text("{}")
    (tmp_path / "checkpoints/checkpoint-10/trainer_state.json").write_text('{"global_step": 10}')
    parts.salvage(tmp_path)
    loaded = DSparkDraftModel.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.fc.weight, drafter.fc.weight.bfloat16())
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 10
