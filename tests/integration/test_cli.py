"""The `dspark` command from end to end: help, errors, exit codes, and a comparison with a tiny model on disk."""

import inspect
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer.testing
from safetensors.torch import load_file, save_file
from tiny import VOCAB, tiny_drafter, tiny_target
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

import dspark_cli
from dspark_hf import zoo
from dspark_hf.evaluation import ComparisonSettings, loading
from dspark_hf.evaluation.compare import _Bench

HEAVY = {"torch", "transformers", "dspark_hf", "numpy"}


def run(*arguments):
    """Exit code, stdout and stderr of `dspark compare` with these arguments, in this process."""
    done = typer.testing.CliRunner().invoke(dspark_cli.app, ["compare", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target with tokenizer and chat template, its drafter, another target's drafter, and prompts."""
    root = tmp_path_factory.mktemp("models")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w1"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w1")
    tokenizer.chat_template = "{% for m in messages %}w2 {{ m['content'] }} {% endfor %}w3"
    target = tiny_target("llama")
    target.save_pretrained(root / "target")
    tokenizer.save_pretrained(root / "target")
    tiny_drafter(target).save_pretrained(root / "drafter")
    tiny_drafter(tiny_target(num_layers=5)).save_pretrained(root / "foreign")
    lines = [{"id": f"p{i}", "prompt": f"w{i} w{3 * i + 4}"} for i in range(1, 5)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


@pytest.fixture
def basics(folders):
    return (
        *("--target", folders / "target", "--drafter", folders / "drafter", "--prompts-file"),
        *(folders / "prompts.jsonl", "--dtype", "float32", "--device", "cpu", "--max-new-tokens", 10),
    )


# --- help


def imported_by(*arguments):
    """Top-level modules that a fresh interpreter holds after `python -X importtime *arguments`."""
    source = str(Path(dspark_cli.__file__).parent)
    paths = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        check=True,
    )
    return {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines()}


HELPS = [
    ["--help"],
    *([command, "--help"] for command in ("ablate", "bench", "compare", "demo", "doctor", "profile", "simulate")),
]


@pytest.mark.parametrize("arguments", HELPS)
def test_help_imports_nothing_heavy(arguments):
    imported = imported_by("-m", "dspark_cli", *arguments)
    assert "typer" in imported
    assert not imported & HEAVY


def test_the_import_check_can_fail():
    assert "numpy" in imported_by("-c", "import dspark_cli, numpy") & HEAVY


def test_help_names_every_option():
    text = typer.testing.CliRunner().invoke(dspark_cli.app, ["compare", "--help"], env={"COLUMNS": "200"}).stdout
    for name in inspect.signature(dspark_cli.compare_command).parameters:
        option = "--json" if name == "json_file" else f"--{name.replace('_', '-')}"
        assert option in text


def test_defaults_are_those_of_the_settings():
    parameters = inspect.signature(dspark_cli.compare_command).parameters
    for name, default in vars(ComparisonSettings()).items():
        assert parameters[name].default == default, name


# --- comparing


def test_compare_prints_a_report_and_writes_json(basics, tmp_path):
    path = tmp_path / "report.json"
    code, out, err = run(*basics, "--num-prompts", 3, "--json", path)
    assert (code, err) == (0, "")
    assert "Outputs: 3 of 3 prompts identical (greedy, float32)." in out
    assert "UNTRAINED" not in out
    report = json.loads(path.read_text())
    assert [prompt["prompt_id"] for prompt in report["prompts"]] == ["p1", "p2", "p3"]
    assert report["prompts"][0]["num_prompt_tokens"] == 4  # by the chat template
    assert report["settings"]["max_new_tokens"] == 10
    assert report["drafter_kind"] == "given"


def test_without_a_drafter_an_untrained_one_of_the_targets_sizes_runs(folders, basics):
    arguments = [argument for argument in basics if argument not in ("--drafter", folders / "drafter")]
    code, out, _ = run(*arguments, "--num-prompts", 1)
    assert code == 0
    assert "UNTRAINED" in out
    assert "--drafter ID_OR_FOLDER" in out
    assert "1 of 1 prompt identical" in out


def test_a_bundled_drafter_is_found_by_name_and_sizes(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(zoo, "BUNDLED_ROOT", tmp_path)
    config = tiny_target("llama").config
    assert loading.bundled_drafter("owner/Tiny", config) is None
    (tmp_path / "tiny").symlink_to(folders / "drafter")
    for name in ("tiny", "owner/Tiny"):
        assert loading.bundled_drafter(name, config) == tmp_path / "tiny"
    assert loading.bundled_drafter("other", config) is None
    assert loading.bundled_drafter("tiny", tiny_target(num_layers=5).config) is None
    target = tiny_target("llama")
    found = loading.load_drafter(None, target, "tiny", None, seed=0)
    assert (found.kind, found.name) == ("bundled", "bundled/tiny")


def test_sampling_with_knobs(basics):
    arguments = ["--temperature", 0.8, "--top-k", 20, "--policy", "threshold", "--threshold", 0.3]
    code, out, _ = run(*basics, *arguments, "--num-assistant-tokens", 2, "--repeats", 2, "--num-prompts", 2)
    assert code == 0
    assert "temperature 0.8 top_k 20" in out
    assert "2 drafts per round, policy threshold" in out
    assert "by design" in out


def test_bfloat16_runs(basics):
    code, out, _ = run(*basics, "--dtype", "bfloat16", "--num-prompts", 1)
    assert code == 0
    assert "bfloat16" in out


def test_texts_that_differ_in_float32_exit_with_1(basics, monkeypatch):
    right = _Bench._generate

    def wrong(self, ids, is_speculative, *args, **kwargs):
        new, timing, report = right(self, ids, is_speculative, *args, **kwargs)
        return [*new[:-1], (new[-1] + 1) % VOCAB] if is_speculative else new, timing, report

    monkeypatch.setattr(_Bench, "_generate", wrong)
    code, out, _ = run(*basics, "--num-prompts", 2)
    assert code == 1
    assert "0 of 2 prompts identical" in out
    assert "ERROR" in out


def test_ctrl_c_prints_what_was_measured(basics, monkeypatch, tmp_path):
    measure = _Bench.measure

    def interrupted(self, index, *args):
        if index == 2:
            raise KeyboardInterrupt
        return measure(self, index, *args)

    monkeypatch.setattr(_Bench, "measure", interrupted)
    code, out, err = run(*basics, "--json", tmp_path / "report.json")
    assert code == 130
    assert "2 of 4 prompts (interrupted)" in out
    assert "interrupted" in err
    assert json.loads((tmp_path / "report.json").read_text())["is_complete"] is False


def test_ctrl_c_before_the_first_prompt(basics, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(_Bench, "warm_up", interrupted)
    code, out, err = run(*basics)
    assert (code, out) == (130, "")
    assert err == "interrupted before any prompt was finished\n"


def hint(out):
    return [line for line in out.splitlines() if "dspark profile" in line]


@pytest.mark.parametrize(("speed", "is_hinted"), [(0.5, True), (2.0, False)])
def test_a_slow_pair_without_a_profile_is_told_of_profiles(basics, monkeypatch, tmp_path, speed, is_hinted):
    monkeypatch.setenv("DSPARK_HF_CACHE", str(tmp_path))
    right = _Bench._generate

    def timed(self, ids, is_speculative, *args, **kwargs):
        new, timing, report = right(self, ids, is_speculative, *args, **kwargs)
        return new, replace(timing, latency_s=1 / speed if is_speculative else 1.0), report

    monkeypatch.setattr(_Bench, "_generate", timed)
    code, out, _ = run(*basics, "--num-prompts", 2)
    assert code == 0
    assert bool(hint(out)) is is_hinted


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts-file", "absent.jsonl"], "absent.jsonl"),
        (["--dtype", "float64"], "dtype must be one of bfloat16, float32, auto, got 'float64'"),
        (["--device", "toaster"], "device must be auto, cpu, cuda or cuda:N, got 'toaster'"),
        (["--drafter", "./absent"], "drafter './absent' is not a folder"),
        (["--target", "/absent/model"], "target '/absent/model' is not a folder"),
        (["--target", "no-such-owner/no-such-model"], "the Hub did not deliver it"),
        (["--max-new-tokens", 0], "max_new_tokens must be >= 1, got 0"),
        (["--num-prompts", 0], "num_prompts must be >= 1, got 0"),
        (["--threads", 0], "--threads must be from 1 to"),
        (["--threads", 99999], "--threads must be from 1 to"),
        (["--top-p", 0.9], "top_p must be left out when temperature is 0"),
        (["--num-assistant-tokens", 5], "num_assistant_tokens must be at most 4"),
        (["--json", "absent/report.json"], "its folder does not exist"),
        (["--json", os.devnull], "no regular file"),
    ],
)
def test_bad_input_ends_in_one_line(basics, arguments, message):
    assert_one_line(run(*basics, *arguments), message)


def assert_one_line(result, message):
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("dspark: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_bad_prompts_files(basics, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "w1"}\n{"prompt": }\n')
    assert_one_line(run(*basics, "--prompts-file", path), "line 2")
    path.write_text("\n")
    assert_one_line(run(*basics, "--prompts-file", path), "holds no prompt")


def test_a_drafter_of_another_target(folders, basics):
    message = "made for a target with number of decoder layers 5"
    assert_one_line(run(*basics, "--drafter", folders / "foreign"), message)


def test_folders_that_are_no_drafter(folders, basics, tmp_path):
    assert_one_line(run(*basics, "--drafter", tmp_path), "has no config.json")
    assert_one_line(run(*basics, "--drafter", folders / "target"), "describes no drafter")


def test_a_drafter_without_all_its_weights(folders, basics, tmp_path):
    tiny_drafter(tiny_target("llama")).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["fc.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_one_line(run(*basics, "--drafter", tmp_path), "fc.weight")
    save_file(weights | {"fc.weight": torch.zeros(3, 3)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert run(*basics, "--drafter", tmp_path)[0] == 2
    (tmp_path / "model.safetensors").write_bytes(b"\x10\x00")
    assert_one_line(run(*basics, "--drafter", tmp_path), "cannot be read")


def test_debug_shows_the_traceback(basics):
    done = typer.testing.CliRunner().invoke(
        dspark_cli.app, ["compare", *map(str, basics), "--dtype", "float64", "--debug"]
    )
    assert "Traceback" in done.stderr
    assert done.exit_code == 2


def test_a_bug_is_not_dressed_up_as_bad_input(basics, monkeypatch):
    def broken(*args):
        raise ZeroDivisionError

    monkeypatch.setattr(_Bench, "warm_up", broken)
    done = typer.testing.CliRunner().invoke(dspark_cli.app, ["compare", *map(str, basics)])
    assert isinstance(done.exception, ZeroDivisionError)
